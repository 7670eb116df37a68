"""What the measurements ran on, and how quiet it was: a figure without this cannot be compared."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from forktree_dev.checkout import CHECKOUT

QUIET_PERCENT = 5.0
"""Of all cores. Somebody else's work above this shows in the figures."""
_LOOK_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Does not change while a suite runs."""

    cpu: str
    cores: int
    memory_mb: int
    kernel: str
    qemu: str
    python: str
    commit: str
    """Of this checkout; `+` where files differ from it."""
    at: str
    """When it was looked at, UTC."""

    @classmethod
    def here(cls) -> Machine:
        """Asks git and QEMU, which takes a moment."""
        info = Path("/proc/cpuinfo").read_text()
        cpu = next(
            (line.partition(":")[2].strip() for line in info.splitlines() if "model name" in line), "?"
        )
        pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        changed = "+" if _said("git", "status", "--porcelain", "--untracked-files=no") else ""
        return cls(
            cpu=cpu,
            cores=len(os.sched_getaffinity(0)),
            memory_mb=pages >> 20,
            kernel=platform.release(),
            qemu=_said("qemu-system-x86_64", "--version").partition("\n")[0],
            python=platform.python_version(),
            commit=_said("git", "rev-parse", "--short=12", "HEAD") + changed,
            at=datetime.now(UTC).isoformat(timespec="seconds"),
        )

    def to_json(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How busy the machine was at one moment."""

    average_1min: float
    busy_percent: float
    """Of all cores, over the second before."""

    @classmethod
    def now(cls) -> Load:
        """Looks for a second. Nothing of ours should run meanwhile."""
        before = _ticks()
        time.sleep(_LOOK_SECONDS)
        after = _ticks()
        busy, total = (late - early for late, early in zip(after, before, strict=True))
        return cls(
            average_1min=round(os.getloadavg()[0], 2), busy_percent=round(100 * busy / max(1, total), 1)
        )

    @property
    def quiet(self) -> bool:
        return self.busy_percent <= QUIET_PERCENT

    def to_json(self) -> dict[str, object]:
        return asdict(self)


def _ticks() -> tuple[int, int]:
    """Of all cores: busy, and in all."""
    fields = [int(each) for each in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    idle = fields[3] + fields[4]
    return sum(fields) - idle, sum(fields)


def _said(*argv: str) -> str:
    """What a program prints; empty where it cannot be asked."""
    try:
        return subprocess.run(argv, capture_output=True, text=True, check=True, cwd=CHECKOUT).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
