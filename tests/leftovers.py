"""Looks for what we left on this machine, and knows nothing of what we believe we started.

It reads /proc, the control groups and the API server, and never our own tables, files or modules: a table
that forgot a machine would hide it from itself. Take `Traces.now` first, run things, then ask `left_behind`.
As a program: `leftovers.py before > FILE`, later `leftovers.py after --before FILE --marker TEXT`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

GROUP = "forktree.dev"
_NAME = "forktree"
_CGROUPS = Path("/sys/fs/cgroup")
_MEMFD = re.compile(r"/memfd:(.*?)(?: \(deleted\))?$")

Kind = dict[str, str]
"""What identifies a thing for ever → how to describe it to a person."""


@dataclass(frozen=True, slots=True)
class Process:
    """One process, as /proc shows it to root."""

    pid: int
    start_ticks: str
    command: str
    mentions: str
    """Everything about it in which a folder or name could stand; its control groups are in it."""
    network_namespaces: frozenset[str]
    memfds: Mapping[str, str]
    """Inode → name, of those it has open or mapped."""

    @property
    def key(self) -> str:
        return f"{self.pid}@{self.start_ticks}"

    def is_ours(self, markers: Iterable[str]) -> bool:
        return _mentions(self.mentions, markers)


@dataclass(frozen=True, slots=True)
class Traces:
    """Things by kind. The difference of two is what came in between."""

    processes: Kind = field(default_factory=Kind)
    cgroups: Kind = field(default_factory=Kind)
    netns: Kind = field(default_factory=Kind)
    mounts: Kind = field(default_factory=Kind)
    memfds: Kind = field(default_factory=Kind)
    objects: Kind = field(default_factory=Kind)

    @classmethod
    def now(cls, *, kubeconfig: Path | None = None, kubectl: str = "kubectl") -> Traces:
        """Everything of these kinds on the machine, ours or not. Without `kubeconfig` no objects are read."""
        processes = list(_processes())
        return cls(
            processes={each.key: each.command for each in processes},
            cgroups={str(path): str(path) for path in _cgroups()},
            netns={inode: inode for each in processes for inode in each.network_namespaces},
            mounts=_mounts(),
            memfds={inode: name for each in processes for inode, name in each.memfds.items()},
            objects=_objects(kubeconfig, kubectl) if kubeconfig else {},
        )

    def counts(self) -> dict[str, int]:
        return {kind: len(things) for kind, things in asdict(self).items()}

    def lines(self) -> list[str]:
        """One line a thing, for a person."""
        return [f"{kind}: {text}" for kind, things in asdict(self).items() for text in things.values()]


def left_behind(
    before: Traces, markers: Iterable[str], *, kubeconfig: Path | None = None, kubectl: str = "kubectl"
) -> Traces:
    """What is there now, was not there before, and is ours: empty when all was cleaned up.

    `markers` are texts that only our run uses: its state folder, its name. A process is ours when one stands
    in its command line, environment, working folder, open files or control group. This process and those
    above it are not looked for, but their memfds are: tests hold some themselves.
    """
    markers = tuple(markers)
    spared = _self_and_ancestors()
    seen = list(_processes())
    ours = [each for each in seen if each.pid not in spared and each.key not in before.processes]
    ours = [each for each in ours if each.is_ours(markers)]
    ours_pids = {each.pid for each in ours}
    others = [each for each in seen if each.pid not in ours_pids and each.pid not in spared]
    holders = [*ours, *(each for each in seen if each.pid in spared)]
    return Traces(
        processes={each.key: f"{each.pid} {each.command}" for each in ours},
        cgroups=_new(
            {str(path): str(path) for path in _cgroups() if not _is_in_use(path, others)}, before.cgroups
        ),
        netns=_new(
            {inode: f"{inode} of {each.command}" for each in holders for inode in each.network_namespaces},
            before.netns
            | {inode: inode for inode in (_link(Path("/proc/self/ns/net")), _link(Path("/proc/1/ns/net")))},
        ),
        # Ours mention a marker, or pin a namespace, which is the one reason for us to mount at all.
        mounts=_new(
            {key: text for key, text in _mounts().items() if _mentions(text, (*markers, "nsfs"))},
            before.mounts,
        ),
        memfds=_new(
            {
                inode: f"{name} in {each.command}"
                for each in holders
                for inode, name in each.memfds.items()
                if each.pid in ours_pids or name.startswith(_NAME)
            },
            before.memfds,
        ),
        objects=_new(_objects(kubeconfig, kubectl), before.objects) if kubeconfig else {},
    )


def _new(now: Kind, before: Kind) -> Kind:
    return {key: text for key, text in now.items() if key not in before}


def _mentions(text: str, words: Iterable[str]) -> bool:
    return any(word in text for word in words)


def _processes() -> Iterator[Process]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                process = _process(entry)
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue  # It ended while we looked.
            if process:
                yield process


def _process(entry: Path) -> Process | None:
    stat = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
    if stat[0] in "ZX":
        return None  # It has ended and holds nothing; its parent has not asked yet.
    command = _text(entry / "cmdline")
    files = dict(_links(entry / "fd"))
    mapped = {
        inode: match[1]
        for line in _text(entry / "maps").splitlines()
        if (match := _MEMFD.search(line)) and (inode := line.split()[4])
    }
    return Process(
        pid=int(entry.name),
        start_ticks=stat[19],
        command=command[:200] or f"[{_text(entry / 'comm').strip()}]",
        mentions="\n".join(
            [
                command,
                _text(entry / "environ"),
                _link(entry / "cwd"),
                _text(entry / "cgroup"),
                *files.values(),
            ]
        ),
        network_namespaces=frozenset(
            [
                _link(entry / "ns" / "net"),
                *(target for target in files.values() if target.startswith("net:[")),
            ]
        ),
        memfds=mapped | _open_memfds(entry, files),
    )


def _open_memfds(entry: Path, files: Mapping[str, str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for descriptor, target in files.items():
        if match := _MEMFD.match(target):
            try:
                found[str((entry / "fd" / descriptor).stat().st_ino)] = match[1]
            except FileNotFoundError:
                continue  # Closed while we looked.
    return found


def _text(path: Path) -> str:
    return path.read_bytes().replace(b"\0", b" ").decode(errors="replace")


def _link(path: Path) -> str:
    try:
        return str(path.readlink())
    except OSError:
        return ""


def _links(folder: Path) -> Iterator[tuple[str, str]]:
    for each in folder.iterdir():
        yield each.name, _link(each)


def _self_and_ancestors() -> frozenset[int]:
    pids: list[int] = []
    pid = os.getpid()
    while pid > 1:
        pids.append(pid)
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return frozenset(pids)


def _cgroups() -> Iterator[Path]:
    """Folders of every hierarchy, v1 and v2, that have our name somewhere in their path."""
    for folder, _, _ in os.walk(_CGROUPS):
        if _NAME in folder.removeprefix(str(_CGROUPS)):
            yield Path(folder)


def _is_in_use(cgroup: Path, others: Iterable[Process]) -> bool:
    """By somebody else's run of the same programs: they are in it, or their keeper was told its name."""
    name = next(part for part in cgroup.parts if _NAME in part)
    return any(_mentions(each.mentions, [name]) for each in others)


def _mounts() -> Kind:
    """Mounts as seen by every process, since some may live in a mount namespace of their own."""
    found: Kind = {}
    read: set[str] = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or (namespace := _link(entry / "ns" / "mnt")) in read:
            continue
        read.add(namespace)
        try:
            lines = _text(entry / "mountinfo").splitlines()
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            # By device and place: the same mount shows in each namespace that it propagates to.
            found[f"{fields[2]} {fields[4]}"] = f"{fields[4]} ({line.partition(' - ')[2]})"
    return found


def _objects(kubeconfig: Path, kubectl: str) -> Kind:
    """All objects of our group, of whatever types the API server knows there."""

    def ask(*arguments: str) -> str:
        command = [kubectl, f"--kubeconfig={kubeconfig}", *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout

    types = ask("api-resources", f"--api-group={GROUP}", "--verbs=list", "-o", "name").split()
    if not types:
        return {}
    items = json.loads(ask("get", ",".join(types), "--all-namespaces", "-o", "json"))["items"]
    return {
        each["metadata"][
            "uid"
        ]: f"{each['kind']} {each['metadata'].get('namespace', '')}/{each['metadata']['name']}"
        for each in items
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("moment", choices=["before", "after"])
    parser.add_argument("--before", type=Path, help="what `before` printed")
    parser.add_argument("--marker", action="append", default=[], help="a text that only our run uses")
    parser.add_argument("--kubeconfig", type=Path)
    parser.add_argument("--kubectl", default="kubectl")
    options = parser.parse_args()
    if options.moment == "before":
        print(json.dumps(asdict(Traces.now(kubeconfig=options.kubeconfig, kubectl=options.kubectl))))
        return 0
    before = Traces(**json.loads(options.before.read_text())) if options.before else Traces()
    left = left_behind(before, options.marker, kubeconfig=options.kubeconfig, kubectl=options.kubectl)
    print(json.dumps({"counts": left.counts(), "found": left.lines()}))
    return 1 if any(left.counts().values()) else 0


if __name__ == "__main__":
    sys.exit(main())
