"""Root file systems: folders made from Debian packages and wheels, packed as read-only erofs images."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from forktree_dev import cache
from forktree_dev.images import atari as games
from forktree_dev.images import debian
from forktree_dev.images import gym as guest

_SUITE = "bookworm"
_PYTHON_PACKAGES = ("python3", "python3-numpy")
_WHEEL_PACKAGES = ("python3", "libstdc++6")
"""NumPy's and the emulator's wheels bring all their libraries but the C++ one."""
_BROWSER_PACKAGES = ("chromium-headless-shell", "python3")
_WHEELS = "usr/local/lib/python3.11/dist-packages"
"""Where Debian's Python looks for what does not come from Debian."""
_WHEEL_PLATFORM = ("--python-version=3.11", "--implementation=cp", "--platform=manylinux_2_28_x86_64")
_WHEEL_NEEDLESS = ("**/tests", "**/include", "**/*.pyi", "**/*.pxd", "bin", "numpy/f2py", "numpy/distutils")
"""In the wheels: what is for building against them and for testing them."""
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
    inputs = _debian_inputs(_PYTHON_PACKAGES)
    return _image("python", inputs, _make_python, "making image python (a minute)")


def gym() -> Path:
    """Debian's Python with Gymnasium and NumPy, and an environment program that can be asked by a command."""
    inputs = [*_debian_inputs(_WHEEL_PACKAGES), guest.REQUIREMENTS, *guest.PROGRAMS.values()]
    return _image("gym", inputs, _make_gym, "making image gym (a minute)")


def atari() -> Path:
    """Debian's Python with the Arcade Learning Environment and its games."""
    inputs = [*_debian_inputs(_WHEEL_PACKAGES), games.REQUIREMENTS]
    return _image("atari", inputs, _make_atari, "making image atari (a minute)")


def browser() -> Path:
    """Chromium without a screen, and Python."""
    inputs = _debian_inputs(_BROWSER_PACKAGES)
    return _image("browser", inputs, _make_browser, "making image browser (2 minutes, half a gigabyte)")


def _debian_inputs(packages: Sequence[str]) -> list[str | Path]:
    return [*packages, *(debian.version(package) for package in (*packages, "base-files", "libc6", "bash"))]


def _image(name: str, inputs: Sequence[str | Path], fill: Callable[[Path], None], announce: str) -> Path:
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
    _bootstrap(root, _PYTHON_PACKAGES)
    _finish(root)


def _make_gym(root: Path) -> None:
    _bootstrap(root, _WHEEL_PACKAGES)
    _install_wheels(root, guest.REQUIREMENTS)
    for command, source in guest.PROGRAMS.items():
        shutil.copyfile(source, root / "usr/local/bin" / command)
        (root / "usr/local/bin" / command).chmod(0o755)
    _finish(root, f"/{_WHEELS}")


def _make_atari(root: Path) -> None:
    _bootstrap(root, _WHEEL_PACKAGES)
    _install_wheels(root, games.REQUIREMENTS)
    _finish(root, f"/{_WHEELS}")


def _make_browser(root: Path) -> None:
    _bootstrap(root, _BROWSER_PACKAGES)
    _finish(root)


def _install_wheels(root: Path, requirements: Path) -> None:
    libraries = root / _WHEELS
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--root-user-action=ignore", "--no-compile"]
    # All are named, with their hashes: nothing is looked for, and nothing else can come.
    pinned = ["--no-deps", "--only-binary=:all:", "--require-hashes", f"--requirement={requirements}"]
    subprocess.run([*install, *pinned, *_WHEEL_PLATFORM, f"--target={libraries}"], check=True)
    for pattern in _WHEEL_NEEDLESS:
        for path in list(libraries.glob(pattern)):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _bootstrap(root: Path, packages: Sequence[str]) -> None:
    """Fill `root` with Debian's essential packages and these."""
    exclude = [f"--dpkgopt=path-exclude={pattern}" for pattern in _NEEDLESS]
    sources = [str(path) for path in debian.source_files()]
    subprocess.run(
        [
            "mmdebstrap",
            "--quiet",
            "--variant=essential",
            f"--include={','.join(packages)}",
            *exclude,
            _SUITE,
            str(root),
            *sources,
        ],
        check=True,
        env={**os.environ, "SOURCE_DATE_EPOCH": _EPOCH},
    )


def _finish(root: Path, *libraries: str) -> None:
    """Compile what can be imported, also from `libraries`, and remove what the builder left."""
    # By default compiled files are bound to the time of their source, which is changed below.
    compile_all = ["python3", "-m", "compileall", "-q", "-f", "--invalidation-mode", "checked-hash"]
    folders = ["/usr/lib/python3", "/usr/lib/python3.11", *libraries]
    subprocess.run(["chroot", str(root), *compile_all, *folders], check=True)
    for path in ("var/lib/apt", "var/cache", "var/log", "etc/apt"):
        shutil.rmtree(root / path, ignore_errors=True)
    # Two of these were copied from the machine that builds.
    for path in ("etc/hosts", "etc/hostname", "etc/resolv.conf"):
        (root / path).write_text(_TINY_FILES[path])
