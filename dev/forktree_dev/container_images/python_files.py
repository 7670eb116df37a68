"""Our own wheel and those that it needs, as a folder of modules.

What is needed is written down, with hashes, in `requirements.txt`: an image never holds what nobody tried.
`python -m forktree_dev.container_images lock` writes it anew.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from forktree_dev import cache
from forktree_dev.checkout import CHECKOUT

REQUIREMENTS = Path(__file__).with_name("requirements.txt")
EXTRAS = ("operator", "agent", "tracing")

_HEAD = "# From pyproject.toml, by `python -m forktree_dev.container_images lock`: wheels of Debian's Python."
_PLATFORM = (
    *("--python-version=3.11", "--implementation=cp", "--only-binary=:all:"),
    *("--platform=manylinux_2_28_x86_64", "--platform=manylinux_2_17_x86_64"),
    *("--platform=manylinux2014_x86_64", "--platform=manylinux_2_5_x86_64", "--platform=manylinux1_x86_64"),
)
"""Debian 12's Python."""
_PIP = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
_NEEDLESS = (
    "bin",
    "kubernetes/aio",
    "**/tests",
    "**/test",
    "**/*.pyi",
    "**/*.pxd",
    "**/*.c",
    "**/*.pyx",
    "**/*.h",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonPackage:
    """One line of the list."""

    name: str
    version: str
    sha256: str


def locked() -> tuple[PythonPackage, ...]:
    """What the list says."""
    pattern = re.compile(r"^(\S+)==(\S+) --hash=sha256:([0-9a-f]{64})$", re.MULTILINE)
    return tuple(
        PythonPackage(name=match[1], version=match[2], sha256=match[3])
        for match in pattern.finditer(REQUIREMENTS.read_text())
    )


def lock() -> None:
    """Write the list anew: the newest that `pyproject.toml` allows. Asks PyPI."""
    wanted = [str(each) for each in wanted_requirements()]
    report = _pip_output(
        "install",
        "--dry-run",
        "--ignore-installed",
        "--report=-",
        "--target=/nonexistent",
        *_PLATFORM,
        *wanted,
    )
    lines = sorted(_locked_line(each) for each in json.loads(report)["install"])
    REQUIREMENTS.write_text("\n".join([_HEAD, *lines, ""]))


def wanted_requirements() -> list[Requirement]:
    """What `pyproject.toml` asks for, of operator and agent together."""
    project: dict[str, Any] = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    found: list[Requirement] = []
    named = [*map(Requirement, project["dependencies"])]
    for extra in EXTRAS:
        named += map(Requirement, project["optional-dependencies"][extra])
    for each in named:
        if canonicalize_name(each.name) == project["name"]:  # One extra may name another.
            named += (
                Requirement(text) for extra in each.extras for text in project["optional-dependencies"][extra]
            )
        else:
            found.append(each)
    return found


def unmet() -> list[str]:
    """What `pyproject.toml` asks for and the list does not give: empty, unless the list is stale."""
    given = {canonicalize_name(each.name): each.version for each in locked()}
    return [
        str(each)
        for each in wanted_requirements()
        if not each.specifier.contains(given.get(canonicalize_name(each.name), "0"))
    ]


def wheel() -> Path:
    """Our own, built from this checkout."""
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())
    folders = [CHECKOUT / each for each in project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]]
    sources = sorted(
        path
        for folder in folders
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    )
    names = [str(path.relative_to(CHECKOUT)) for path in sources]
    entry_key = cache.key([*names, *sources, CHECKOUT / "pyproject.toml", CHECKOUT / "README.md"])

    def make(place: Path) -> None:
        build = ("wheel", "--no-deps", f"--wheel-dir={place}", str(CHECKOUT))
        subprocess.run([*_PIP, *build], check=True)

    (path,) = cache.entry("wheel", entry_key, make, announce="building the wheel").glob("*.whl")
    return path


def lay_out_locked(folder: Path) -> None:
    """Put all of the list into `folder`."""
    _install(folder, "--require-hashes", f"--requirement={REQUIREMENTS}")
    for pattern in _NEEDLESS:
        for path in list(folder.glob(pattern)):
            subprocess.run(["rm", "-rf", str(path)], check=True)


def lay_out_wheel(folder: Path) -> None:
    """Put our own wheel into `folder`."""
    _install(folder, str(wheel()))
    subprocess.run(["rm", "-rf", str(folder / "bin")], check=True)


def _install(folder: Path, *what: str) -> None:
    options = ("install", "--no-deps", "--no-compile", "--root-user-action=ignore", f"--target={folder}")
    subprocess.run([*_PIP, *options, *_PLATFORM, *what], check=True)


def compile_modules(root: Path, folder: str) -> None:
    """Compile all modules in `folder` of the system at `root`, by its own Python. Nobody could later."""
    # Not bound to the sources' times, which are the same everywhere.
    options = ("-q", "--invalidation-mode=unchecked-hash")
    subprocess.run(["chroot", str(root), "python3", "-m", "compileall", *options, folder], check=True)


def _locked_line(installed: dict[str, Any]) -> str:
    metadata, archive = installed["metadata"], installed["download_info"]["archive_info"]
    return f"{metadata['name'].lower()}=={metadata['version']} --hash=sha256:{archive['hashes']['sha256']}"


def _pip_output(*arguments: str) -> str:
    return subprocess.run([*_PIP, *arguments], check=True, stdout=subprocess.PIPE, text=True).stdout
