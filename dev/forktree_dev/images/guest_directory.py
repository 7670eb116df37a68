"""The folder that an agent takes as `--guest-dir`: one kernel and initramfs, any number of images."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from forktree_dev import cache
from forktree_dev.images import root_file_systems
from forktree_dev.images.initrd import initrd
from forktree_dev.images.kernel import kernel

IMAGES: Mapping[str, Callable[[], Path]] = {
    "tiny": root_file_systems.tiny,
    "python": root_file_systems.python,
    "gym": root_file_systems.gym,
    "atari": root_file_systems.atari,
    "browser": root_file_systems.browser,
}
"""What can be made, by the name that templates use for it (`builtin:NAME`)."""

STANDARD: Sequence[str] = tuple(name for name in IMAGES if name != "browser")
"""What is made on every machine that is set up. Others are large, and made by what first asks for them."""


def guest_directory(names: Sequence[str]) -> Path:
    """A guest directory with the images of these names.

    It holds `vmlinux`, `initrd`, `images/NAME.erofs` and `manifest.json` with the SHA-256 of each. The files
    are links into the cache.
    """
    the_kernel = kernel()
    boot = {"kernel": the_kernel.vmlinux, "initrd": initrd(the_kernel)}
    images = {name: IMAGES[name]() for name in sorted(set(names))}
    links = {"vmlinux": boot["kernel"], "initrd": boot["initrd"]}
    links |= {f"images/{name}.erofs": path for name, path in images.items()}

    def make(folder: Path) -> None:
        (folder / "images").mkdir()
        for link, target in links.items():
            (folder / link).symlink_to(target)
        manifest = {
            "kernel": the_kernel.version,
            "kernel_sha256": _sha256(boot["kernel"]),
            "initrd_sha256": _sha256(boot["initrd"]),
            "images": {
                name: {"file": f"images/{name}.erofs", "sha256": _sha256(path)}
                for name, path in images.items()
            },
        }
        (folder / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")

    # Names in the cache say what is inside, so they stand for the content here.
    entry_key = cache.key([*(f"{link} {target}" for link, target in links.items()), Path(__file__)])
    return cache.entry("guest", entry_key, make, announce="assembling the guest directory")


def _sha256(path: Path) -> str:
    with path.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
