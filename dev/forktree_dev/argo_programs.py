"""Argo Workflows for a real node, from its Go module: controller, executor, resource definitions."""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from forktree_dev import cache, golang

_MODULE = "github.com/argoproj/argo-workflows/v4"
_VERSION = "v4.0.5"
_COMMANDS = ("workflow-controller", "argoexec")
_DEFINITIONS = Path("manifests", "base", "crds", "minimal")
"""Argo's own "full" ones take an API server most of a gigabyte."""
_NOT_BUILT = ("ui", "docs", "examples", "test", "sdks")


@dataclass(frozen=True, slots=True)
class ArgoPrograms:
    controller: Path
    executor: Path
    definitions: Path
    """A folder of manifests."""


def argo_programs() -> ArgoPrograms:
    go, version = golang.toolchain()
    build = ("build", "-trimpath", "-buildvcs=false", f"-ldflags=-s -w -X {_MODULE}.version={_VERSION}")

    def make(place: Path) -> None:
        with tempfile.TemporaryDirectory(prefix="forktree-argo-") as folder:
            source = Path(folder, "source")
            _copy_source(go, source)
            packages = [f"./cmd/{name}" for name in _COMMANDS]
            golang.run(go, *build, f"-o={place}/", *packages, folder=source, env={"GOFLAGS": ""})
            (place / "crds").mkdir()
            for manifest in (source / _DEFINITIONS).glob("argoproj.io_*.yaml"):
                shutil.copy(manifest, place / "crds")

    place = cache.entry(
        "argo",
        cache.key([_MODULE, _VERSION, version, *build, *_COMMANDS, str(_DEFINITIONS)]),
        make,
        announce="building Argo Workflows (about 6 minutes on 2 cores, once)",
    )
    return ArgoPrograms(
        controller=place / "workflow-controller", executor=place / "argoexec", definitions=place / "crds"
    )


def _copy_source(go: Path, source: Path) -> None:
    """The module with the one file put back that its archive lacks.

    Upstream `signal_linux.go` is a symbolic link to the other Unix's file, and a module's archive holds no
    links. The module cache is read-only and may not be overlaid, hence a copy.
    """
    with tempfile.TemporaryDirectory(prefix="forktree-argo-") as outside_of_modules:
        told = golang.run(
            go, "mod", "download", "-json", f"{_MODULE}@{_VERSION}", folder=Path(outside_of_modules)
        )
    module = Path(json.loads(told)["Dir"])
    # Contents only: the module cache has no file that its owner may write.
    shutil.copytree(module, source, copy_function=shutil.copyfile, ignore=shutil.ignore_patterns(*_NOT_BUILT))
    signals = source / "workflow" / "executor" / "osspecific"
    shutil.copyfile(signals / "signal_darwin.go", signals / "signal_linux.go")


if __name__ == "__main__":
    argo_programs()
