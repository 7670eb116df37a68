"""Prometheus' own programs, out of Debian's package: its files alone, so nothing is installed or started."""

from __future__ import annotations

import platform
import shutil
from pathlib import Path

from forktree_dev import cache
from forktree_dev.images import debian

_PACKAGE = "prometheus"


def folder() -> Path:
    """Where `prometheus` and `promtool` are."""
    key = cache.key([_PACKAGE, debian.version(_PACKAGE), platform.machine()])
    place = cache.entry(_PACKAGE, key, _make, announce="unpacking Prometheus (19 MB, some seconds, once)")
    return place / "bin"


def _make(place: Path) -> None:
    whole = place / "whole"
    debian.unpack(_PACKAGE, whole)
    (place / "bin").mkdir()
    for name in ("prometheus", "promtool"):
        (whole / "usr" / "bin" / name).rename(place / "bin" / name)
    shutil.rmtree(whole)


if __name__ == "__main__":
    folder()
