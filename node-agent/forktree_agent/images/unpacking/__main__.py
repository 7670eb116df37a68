"""`python -m forktree_agent.images.unpacking`: one image, from archives to a root file system, in a jail.

Its orders come as one line of JSON on standard input, what it has to say goes out the same way: first how
large the image will be, then, once it is told to go on, that it is written; or why not, in one sentence.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from forktree_agent.images.unpacking import jail
from forktree_agent.images.unpacking.erofs import Layout
from forktree_agent.images.unpacking.layers import Allowance, copy_files, read_layers
from forktree_agent.images.unpacking.tree import File, Folder, Refused, Symlink, Tree

_MOUNTED = (b"dev", b"proc", b"sys")
_FOLDERS = ((b"run", 0o755), (b"tmp", 0o1777))
_HOSTS = b"127.0.0.1 localhost\n::1 localhost\n"
"""What a container engine would put there."""


def main() -> int:
    """0 also after a refusal: what failed is said."""
    line = sys.stdin.readline()
    if not line:
        return 0  # Its parent is gone.
    orders = json.loads(line)
    limits = jail.Limits(
        uid=orders["uid"],
        memory_bytes=orders["memory_bytes"],
        cpu_seconds=orders["cpu_seconds"],
        file_bytes=orders["unpacked_bytes"],
    )
    try:
        jail.enter(limits, parent=orders["parent"])
    except OSError as err:
        _say({"broken": f"the jail for unpacking cannot be made: {err}"})
        return 0
    try:
        _unpack(orders)
    except Refused as err:
        _say({"refused": str(err)})
    except MemoryError:
        _say({"refused": "the image wants more memory to be unpacked than it may have"})
    return 0


def _unpack(orders: dict[str, Any]) -> None:
    layers: list[int] = orders["layers"]
    out: int = orders["out"]

    def allowance() -> Allowance:
        return Allowance(bytes=orders["unpacked_bytes"], entries=orders["entries"])

    tree = Tree()
    read_layers(layers, tree, allowance())
    _make_bootable(tree, orders["working_folder"].encode(), len(layers))
    layout = Layout(tree)
    _say({"bytes": layout.size_bytes})
    if sys.stdin.readline() != "go\n":
        return
    layout.write_frame(out)
    copy_files(layers, layout.files, lambda node: layout.writer(out, node), allowance())
    os.fsync(out)
    _say({"written": True})


def _make_bootable(tree: Tree, working_folder: bytes, layer: int) -> None:
    """What every root must have: where init mounts, where programs write, and where the command is run."""
    for name in _MOUNTED:
        if not isinstance(tree.find(name), Folder):
            tree.put(name, Folder(mode=0o755, layer=layer))
    for name, mode in _FOLDERS:
        if not isinstance(tree.find(name), Folder | Symlink):
            tree.put(name, Folder(mode=mode, layer=layer))
    if not isinstance(tree.resolved(working_folder), Folder):
        tree.put(working_folder, Folder(mode=0o755, layer=layer))
    hosts = tree.find(b"etc/hosts")
    if hosts is None or (isinstance(hosts, File) and hosts.size == 0):
        content = File(mode=0o644, layer=layer, size=len(_HOSTS), content=_HOSTS)
        tree.put(b"etc/hosts", content)


def _say(what: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
