"""Debian packages as files: which ones a list needs, and a folder with their content."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from forktree_dev.container_images.recipes import UNUSED

_NOTHING_INSTALLED = (
    *("-o", "Dir::State::status=/dev/null"),
    *("-o", "APT::Install-Recommends=false"),
    *("-o", "Debug::NoLocking=true"),
    *("-o", "Acquire::ForceHash=SHA256"),
)
_URI = re.compile(r"'(?P<uri>[^']+)' (?P<file>\S+) \d+ SHA256:(?P<sha256>[0-9a-f]{64})")
_MERGED = {"bin": "usr/bin", "sbin": "usr/sbin", "lib": "usr/lib", "lib64": "usr/lib64"}
"""Debian's own links since its release 12, which no package of the base system carries."""
_NEEDLESS = (
    *(
        "usr/share/man",
        "usr/share/info",
        "usr/share/locale",
        "usr/share/lintian",
        "usr/share/bash-completion",
    ),
    *("usr/share/doc-base", "usr/share/applications", "usr/share/icons", "usr/share/pixmaps"),
    *("usr/lib/python3/dist-packages", "usr/share/bug", "usr/share/gdb", "usr/share/python3"),
)
_ACCOUNTS = {
    "etc/passwd": "root:x:0:0:root:/root:/usr/sbin/nologin\n"
    "forktree:x:65532:65532:forktree:/nonexistent:/usr/sbin/nologin\n"
    "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
    "etc/group": "root:x:0:\nforktree:x:65532:\nnogroup:x:65534:\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DebianPackage:
    """One package, as apt would download it now."""

    name: str
    version: str
    architecture: str
    sha256: str

    @property
    def wanted(self) -> str:
        """As apt is asked for exactly this one."""
        return (
            f"{self.name}:{self.architecture}={self.version}"
            if self.architecture != "all"
            else (f"{self.name}={self.version}")
        )


def closure(names: Sequence[str]) -> tuple[DebianPackage, ...]:
    """These packages and all that they depend on, but for what is never used here; in order of name."""
    printed = _apt(*_NOTHING_INSTALLED, "--quiet=2", "--print-uris", "install", *names)
    found = [_package(match) for match in _URI.finditer(printed)]
    if not found:
        raise ValueError(f"apt names no files for {', '.join(names)}: {printed[:500]}")
    return tuple(sorted((each for each in found if each.name not in UNUSED), key=lambda each: each.name))


def lay_out(packages: Iterable[DebianPackage], root: Path) -> None:
    """Put the packages' files under `root`, as installed; none of their scripts run.

    What a scanner of images looks for is there: `os-release`, licences, and the list of packages.
    """
    for link, target in _MERGED.items():
        (root / target).mkdir(parents=True, exist_ok=True)
        (root / link).symlink_to(target)
    listed = root / "var/lib/dpkg/status.d"
    listed.mkdir(parents=True)
    with tempfile.TemporaryDirectory(dir=root.parent) as scratch:
        # A download by another user, which is apt's default, could not write here.
        _apt(
            "-q", "-o", "APT::Sandbox::User=root", "download", *(each.wanted for each in packages), at=scratch
        )
        for archive in sorted(Path(scratch).glob("*.deb")):
            _unpack(archive, root)
            control = _run("dpkg-deb", "--field", str(archive))
            name = re.search(r"^Package: (\S+)$", control, re.MULTILINE)
            assert name is not None
            (listed / name[1]).write_text(control)
    _strip(root)


def add_accounts(root: Path) -> None:
    """Users, groups and the folders that every image has."""
    for path, text in _ACCOUNTS.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    for folder in ("tmp", "var/tmp"):
        (root / folder).mkdir(parents=True, exist_ok=True)
        (root / folder).chmod(0o1777)


def _unpack(archive: Path, root: Path) -> None:
    # Not `dpkg-deb --extract`: it would put a folder in the place of the link `lib`.
    content = subprocess.Popen(["dpkg-deb", "--fsys-tarfile", str(archive)], stdout=subprocess.PIPE)
    with content:
        command = ["tar", "--extract", "--keep-directory-symlink", "--file=-", f"--directory={root}"]
        subprocess.run(command, check=True, stdin=content.stdout)
    if content.returncode != 0:
        raise subprocess.CalledProcessError(content.returncode, content.args)


def _strip(root: Path) -> None:
    """Remove what is for people at a terminal; licences stay."""
    for path in _NEEDLESS:
        subprocess.run(["rm", "-rf", str(root / path)], check=True)
    for file in sorted((root / "usr/share/doc").rglob("*"), reverse=True):
        if file.is_dir() and not file.is_symlink():
            if not any(file.iterdir()):
                file.rmdir()
        elif file.name != "copyright" and not file.is_symlink():
            file.unlink()


def _package(match: re.Match[str]) -> DebianPackage:
    name, version, rest = match["file"].split("_", 2)
    return DebianPackage(
        name=name,
        version=unquote(version),
        architecture=rest.removesuffix(".deb"),
        sha256=match["sha256"],
    )


def _apt(*arguments: str, at: str | None = None) -> str:
    return _run("apt-get", *arguments, at=at)


def _run(*command: str, at: str | None = None) -> str:
    return subprocess.run(command, check=True, cwd=at, stdout=subprocess.PIPE, text=True).stdout
