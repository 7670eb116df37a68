"""Which Debian packages the machines' own file systems are made of: read from the images themselves."""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forktree_dev import cache, images
from forktree_dev.container_images.debian_files import DebianPackage

_STATUS = "var/lib/dpkg/status"
_KERNEL = re.compile(r"(?P<release>\S+) \((?P<version>\S+)\)")


def guest_packages(names: Sequence[str]) -> tuple[DebianPackage, ...]:
    """Those of these root file systems and of the kernel, each once, without hashes of their archives."""
    guests = images.guest_directory(names)
    manifest = json.loads((guests / "manifest.json").read_text())
    found = {_kernel(manifest)} | {package for name in names for package in _listed(guests, manifest, name)}
    return tuple(sorted(found, key=lambda each: (each.name, each.version)))


def _kernel(manifest: dict[str, Any]) -> DebianPackage:
    match = _KERNEL.fullmatch(manifest["kernel"])
    assert match is not None
    name = f"linux-image-{match['release']}"
    return DebianPackage(name=name, version=match["version"], architecture="amd64", sha256="")


def _listed(guests: Path, manifest: dict[str, Any], name: str) -> list[DebianPackage]:
    entry = manifest["images"][name]

    def make(folder: Path) -> None:
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            unpacked = Path(scratch) / "root"
            image = str(guests / entry["file"])
            command = ["fsck.erofs", f"--extract={unpacked}", "--no-preserve", image]
            subprocess.run(command, check=True, capture_output=True)
            status = unpacked / _STATUS
            (folder / "status").write_text(status.read_text() if status.exists() else "")

    key = cache.key([entry["sha256"], Path(__file__)])
    folder = cache.entry("guest-packages", key, make, announce=f"reading what image {name} is made of")
    paragraphs = (folder / "status").read_text().split("\n\n")
    return [_package(dict(_fields(each))) for each in paragraphs if each.strip()]


def _fields(paragraph: str) -> list[tuple[str, str]]:
    return re.findall(r"^(\S+): (.*)$", paragraph, re.MULTILINE)


def _package(fields: dict[str, str]) -> DebianPackage:
    return DebianPackage(
        name=fields["Package"],
        version=fields["Version"],
        architecture=fields["Architecture"],
        sha256="",
    )
