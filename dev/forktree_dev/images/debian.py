"""Debian packages, by way of the apt that this machine has."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from functools import cache as once
from pathlib import Path

from forktree_dev import cache


@once
def version(package: str) -> str:
    """The version that apt would download now."""
    shown = _apt_cache("show", "--no-all-versions", package)
    return next(line.removeprefix("Version: ") for line in shown.splitlines() if line.startswith("Version: "))


@once
def kernel_package() -> str:
    """The package of the current kernel for virtual machines, by way of the one that always depends on it."""
    depends = _apt_cache("depends", "linux-image-cloud-amd64").split()
    return next(
        word for word in depends if word.startswith("linux-image-") and word != "linux-image-cloud-amd64"
    )


def unpack(package: str, folder: Path) -> None:
    """Download `package` and put its files under `folder`. None of its scripts run."""
    folder.mkdir()
    # A download by another user, which is apt's default, could not write here.
    download = ["apt-get", "-q", "-o", "APT::Sandbox::User=root", "download", package]
    try:
        _run(download, cwd=folder)
    except subprocess.CalledProcessError:
        # The package lists may be older than what the mirror still holds.
        _run(["apt-get", "-q", "update"])
        _run(download, cwd=folder)
    (archive,) = folder.glob("*.deb")
    _run(["dpkg-deb", "--extract", str(archive), str(folder)])
    archive.unlink()


def source_files() -> list[Path]:
    """The files that say where this machine's apt gets its packages."""
    folder = Path("/etc/apt")
    candidates = [folder / "sources.list", *sorted((folder / "sources.list.d").glob("*"))]
    return [path for path in candidates if path.suffix in {".list", ".sources"} and path.is_file()]


def _apt_cache(*arguments: str) -> str:
    """Ask apt. Container images tell it to keep no index of its lists; each question then costs a second."""
    index = cache.root() / "apt"
    index.mkdir(parents=True, exist_ok=True)
    kept = [f"Dir::Cache::{name}={index / name}.bin" for name in ("pkgcache", "srcpkgcache")]
    return _run(["apt-cache", *(word for option in kept for word in ("-o", option)), *arguments])


def _run(command: Sequence[str], *, cwd: Path | None = None) -> str:
    return subprocess.run(command, check=True, cwd=cwd, stdout=subprocess.PIPE, text=True).stdout
