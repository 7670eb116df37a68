"""Root file systems: folders made from Debian packages, packed as read-only erofs images."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from forktree_dev import cache
from forktree_dev.images import debian

_SUITE = "bookworm"
_PYTHON_PACKAGES = ("python3", "python3-numpy")
_EPOCH = "1767225600"
"""What the time of every file is, seconds since 1970, so that equal input gives equal bytes."""
_UUID = "7f0c2a52-6c2f-4f0e-9d6c-2b5d1f0a9e11"
"""Of every image, for the same reason. Nothing mounts by it."""
_NEEDLESS = (
    "/usr/share/doc/*",
    "/usr/share/man/*",
    "/usr/share/info/*",
    "/usr/share/locale/*",
    "/usr/share/lintian/*",
)

_TINY_FILES = {
    "etc/passwd": "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n",
    "etc/group": "root:x:0:\ntty:x:5:\nnogroup:x:65534:\n",
    "etc/hosts": "127.0.0.1 localhost\n::1 localhost\n",
    "etc/hostname": "localhost\n",
    "etc/resolv.conf": "",
}
_TINY_FOLDERS = (
    "bin",
    "dev",
    "etc",
    "proc",
    "root",
    "run",
    "sbin",
    "sys",
    "tmp",
    "usr/bin",
    "usr/sbin",
    "var/tmp",
)


def tiny() -> Path:
    """busybox and nothing else: boots fastest, for tests of everything but programs."""
    return _image("tiny", [debian.version("busybox-static")], _make_tiny, "packing image tiny")


def python() -> Path:
    """Debian's essential packages, Python with its whole standard library, and NumPy."""
    versions = [debian.version(package) for package in (*_PYTHON_PACKAGES, "base-files", "libc6", "bash")]
    return _image("python", [*_PYTHON_PACKAGES, *versions], _make_python, "making image python (a minute)")


def _image(name: str, inputs: list[str], fill: Callable[[Path], None], announce: str) -> Path:
    make = partial(_pack, name=name, fill=fill)
    entry_key = cache.key([name, *inputs, Path(__file__)])
    return cache.entry("images", f"{name}-{entry_key}", make, announce=announce) / f"{name}.erofs"


def _pack(folder: Path, *, name: str, fill: Callable[[Path], None]) -> None:
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        content = Path(scratch) / "root"
        fill(content)
        options = ["-zlz4", "--quiet", "-T", _EPOCH, "-U", _UUID]
        subprocess.run(["mkfs.erofs", *options, str(folder / f"{name}.erofs"), str(content)], check=True)


def _make_tiny(root: Path) -> None:
    for path in _TINY_FOLDERS:
        (root / path).mkdir(parents=True)
    for path, text in _TINY_FILES.items():
        (root / path).write_text(text)
    package = root.with_name("busybox")
    debian.unpack("busybox-static", package)
    busybox = root / "bin" / "busybox"
    shutil.copy(package / "bin" / "busybox", busybox)
    listed = subprocess.run([str(busybox), "--list-full"], check=True, capture_output=True, text=True).stdout
    for applet in sorted(set(listed.split()) - {"bin/busybox"}):
        (root / applet).symlink_to("/bin/busybox")


def _make_python(root: Path) -> None:
    exclude = [f"--dpkgopt=path-exclude={pattern}" for pattern in _NEEDLESS]
    include = ",".join(_PYTHON_PACKAGES)
    sources = [str(path) for path in debian.source_files()]
    subprocess.run(
        [
            "mmdebstrap",
            "--quiet",
            "--variant=essential",
            f"--include={include}",
            *exclude,
            _SUITE,
            str(root),
            *sources,
        ],
        check=True,
        env={**os.environ, "SOURCE_DATE_EPOCH": _EPOCH},
    )
    # By default compiled files are bound to the time of their source, which is changed below.
    compile_all = ["python3", "-m", "compileall", "-q", "-f", "--invalidation-mode", "checked-hash"]
    subprocess.run(["chroot", str(root), *compile_all, "/usr/lib/python3", "/usr/lib/python3.11"], check=True)
    for path in ("var/lib/apt", "var/cache", "var/log", "etc/apt"):
        shutil.rmtree(root / path, ignore_errors=True)
    # Two of these were copied from the machine that builds.
    for path in ("etc/hosts", "etc/hostname", "etc/resolv.conf"):
        (root / path).write_text(_TINY_FILES[path])
