"""What a real node and its users run beside Kubernetes itself: containerd, and helm.

runc, the CNI plugins and the packet filter's tools are Debian packages (`dev/setup.sh node`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from forktree_dev import cache, golang

_CONTAINERD = "v2.2.9"
_HELM = "v3.22.0"
_KUBERNETES = ("1", "36")
"""What helm believes a cluster to be that it was told nothing of."""


def containerd() -> Path:
    """The folder that holds `containerd`, its shim for runc, and `ctr`."""
    names = ("containerd", "containerd-shim-runc-v2", "ctr")
    packages = [f"github.com/containerd/containerd/v2/cmd/{name}@{_CONTAINERD}" for name in names]
    return _installed("containerd", packages, "", "building containerd (about 2 minutes on 2 cores, once)")


def helm() -> Path:
    """The program."""
    packages = [f"helm.sh/helm/v3/cmd/helm@{_HELM}"]
    variables = zip(("Major", "Minor"), _KUBERNETES, strict=True)
    known = " ".join(
        f"-X helm.sh/helm/v3/pkg/chartutil.k8sVersion{name}={value}" for name, value in variables
    )
    announce = "building helm (about 2 minutes on 2 cores, once)"
    return _installed("helm", packages, known, announce) / "helm"


def _installed(kind: str, packages: Sequence[str], linker_flags: str, announce: str) -> Path:
    go, version = golang.toolchain()
    build = ("install", "-trimpath", "-buildvcs=false", f"-ldflags=-s -w {linker_flags}".strip())

    def make(place: Path) -> None:
        # Not GOBIN of the user's own; outside any module, so that these alone say what is built.
        golang.run(go, *build, *packages, folder=place, env={"GOBIN": str(place), "GOFLAGS": ""})

    return cache.entry(kind, cache.key([*packages, version, *build]), make, announce=announce)


if __name__ == "__main__":
    containerd()
    helm()
