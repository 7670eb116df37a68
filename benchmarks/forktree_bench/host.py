"""Processes as the kernel shows them: memory, mappings, descriptors, processor time."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_TICK_MS = 1000 / os.sysconf("SC_CLK_TCK")
_LOOK_SECONDS = 0.05
_IDLE_SHARE = 0.1
"""Of one core. Below this, what is done in the background no longer disturbs."""
_SETTLE_SECONDS = 3.0
"""Wait no longer for quiet: an environment that never rests is measured as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """MiB of one process, from /proc/PID/smaps_rollup."""

    anonymous: float
    """Nobody else's: heap, stacks, and pages that were copied because they were written to."""
    pss: float
    """Shared pages in parts: over all processes this adds up to what is used."""
    rss: float


def memory(pid: int) -> Memory:
    """Raises `OSError` when the process is gone."""
    fields = {
        name: int(rest.split()[0]) / 1024
        for name, colon, rest in (
            line.partition(":") for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
        )
        if colon
    }
    return Memory(anonymous=fields["Anonymous"], pss=fields["Pss"], rss=fields["Rss"])


def shared_memory() -> float:
    """MiB of files in memory and shared memory, of the whole machine."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("Shmem:"))


def mappings(pid: int) -> int:
    with Path(f"/proc/{pid}/maps").open() as lines:
        return sum(1 for _ in lines)


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH208 (names are all that is wanted)


def cpu_ms(pids: Iterable[int]) -> float:
    """Processor time that these have taken since they began, user and system. One that is gone counts 0."""
    ticks = 0
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        ticks += int(fields[11]) + int(fields[12])
    return ticks * _TICK_MS


def children(pid: int) -> list[int]:
    """Processes that it started; of a keeper all its machines. None of one that is gone."""
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
        return [int(each) for thread in threads for each in (thread / "children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def in_group(pid: int, name: str) -> bool:
    """Whether the process is in a control group of this name, in any hierarchy."""
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return any(name in line.split(":", 2)[2].split("/") for line in lines)


async def settled(*roots: int) -> None:
    """Wait until we, these processes and all that they started are at rest: what was asked for is done.

    Looks at ours alone, so that what else the machine does cannot keep it waiting. Bounded: see above.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + _SETTLE_SECONDS
    while loop.time() < deadline:
        pids = [os.getpid(), *roots, *(child for root in roots for child in children(root))]
        before, began = cpu_ms(pids), loop.time()
        await asyncio.sleep(_LOOK_SECONDS)
        if cpu_ms(pids) - before <= _IDLE_SHARE * (loop.time() - began) * 1000:
            return
