"""The control plane's programs: one file built from `dev/cluster`, under as many names as it has parts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from forktree_dev import cache, golang
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
_VERSIONS = "k8s.io/component-base/version"
"""The package in which Kubernetes keeps its own version; left alone it calls itself 0.0.0."""


def directory() -> Path:
    """The folder that holds the programs by their usual names. Built when missing: 5 minutes on two cores."""
    go, version = golang.toolchain()
    build = ("build", "-trimpath", "-buildvcs=false", f"-ldflags=-s -w {_version_flags()}")
    inputs = (_SOURCE / "main.go", _SOURCE / "go.mod", _SOURCE / "go.sum", version, *build, *COMPONENTS)
    return cache.entry(
        "cluster",
        cache.key(inputs),
        lambda place: _build(go, build, place),
        announce="building the development control plane (about 5 minutes on 2 cores, once)",
    )


def _version_flags() -> str:
    """What tells the programs which release they are: helm and kubectl ask a server for it."""
    wanted = re.search(
        r"^\s*k8s\.io/kubernetes (v(\d+)\.(\d+)\.\d+)", (_SOURCE / "go.mod").read_text(), re.MULTILINE
    )
    assert wanted is not None
    values = {"gitVersion": wanted[1], "gitMajor": wanted[2], "gitMinor": wanted[3]}
    return " ".join(f"-X {_VERSIONS}.{name}={value}" for name, value in values.items())


def _build(go: Path, build: Sequence[str], place: Path) -> None:
    env = {"GOFLAGS": "-mod=readonly"}
    golang.run(go, *build, "-o", str(place / "cluster"), ".", folder=_SOURCE, env=env)
    for name in COMPONENTS:
        (place / name).symlink_to("cluster")


if __name__ == "__main__":
    directory()
