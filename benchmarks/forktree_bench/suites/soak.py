"""One parent, forked and its children pruned for as long as it takes to see what grows.

A cycle is: dirty some memory, fork, run a program in each child, end the children, let go of the instant.
Between cycles the parent's worker is asked for nothing; before and after, how long its steps take.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeAlias

from forktree_agent.engine.contract import Machine
from forktree_bench import host, machines
from forktree_bench.figures import Figure, Params, Series, slope
from forktree_bench.machines import Node
from forktree_bench.report import Report
from forktree_bench.suite import Scope, Suite

CYCLES = Figure(name="cycles", unit="", clock="none: forks, each with its children run and pruned")
CYCLE = Figure(name="cycle", clock="dirty asked → children ended, instant let go; caller's")
PAUSE = Figure(name="pause", clock="parent stopped → parent runs again; agent's")
FORK = Figure(name="fork", clock="parent stopped → every child runs; agent's")
STEP = Figure(name="step", clock="one step of the parent's worker, of always the same work; guest's")
LATE = Figure(name="step_late", clock="a step's start behind its time; guest's")

MEMORY = Figure(name="memory", unit="MiB", clock="none: /proc, between cycles")
MEMORY_GROWTH = Figure(
    name="memory_growth",
    unit="MiB/1000 cycles",
    clock="none: least squares once a fifth of all cycles is over",
)
COUNT = Figure(name="count", unit="", clock="none: /proc and the keeper's list, between cycles")
COUNT_GROWTH = Figure(
    name="count_growth", unit="1/1000 cycles", clock="none: least squares once a fifth of all cycles is over"
)

CHILDREN = 2
DIRTY_KIB = 512
PACE_MS = 20
STEPS_SECONDS = 5.0
"""For how long the parent's steps are watched, with nothing else going on."""
SAMPLES = 40
"""In all: looking at a process's memory takes milliseconds."""
WARM = 0.2
"""Of the time. Until then caches fill, and what grows is not counted."""

Point: TypeAlias = tuple[float, float]
"""How many cycles were done, and what was seen then."""


@dataclass(frozen=True, slots=True)
class Look:
    """One number of one process, in MiB or counted."""

    what: str
    value: float
    mib: bool = False


async def run(report: Report, scope: Scope) -> None:
    seconds = 10.0 if scope.quick else SOAK_SECONDS + scope.more_seconds
    with TemporaryDirectory(prefix="forktree-bench-", dir="/dev/shm") as folder:
        async with machines.running(Path(folder)) as node:
            report.accelerator = node.capability.accelerator
            parent = await node.root(256)
            await _soak(node, parent, report, seconds, steps_seconds=1.0 if scope.quick else STEPS_SECONDS)


async def _soak(node: Node, parent: Machine, report: Report, seconds: float, *, steps_seconds: float) -> None:
    params: Params = {"children": CHILDREN, "dirty_mb": DIRTY_KIB / 1024, "guest_mb": 256}
    async with report.part("the parent's steps before", STEP, **params):
        await _steps(node, parent, report, params, when="before", seconds=steps_seconds)
    looks: dict[tuple[str, bool], list[Point]] = {}
    async with report.part(f"cycles for {seconds:g} s", CYCLES, **params):
        loop = asyncio.get_running_loop()
        began = look_at = loop.time()
        first, last = Series(), Series()
        done = 0
        while (so_far := (loop.time() - began) / seconds) < 1:
            await _cycle(node, parent, first if so_far < WARM else last)
            done += 1
            if loop.time() >= look_at:
                look_at = loop.time() + seconds / SAMPLES
                for look in await _look(node, parent):
                    looks.setdefault((look.what, look.mib), []).append((done, look.value))
        report.add(CYCLES, [done], **params)
        report.add_all(first, of=f"first {WARM:.0%} of the time", **params)
        report.add_all(last, of="the rest", **params)
    async with report.part("the parent's steps after", STEP, **params):
        await _steps(node, parent, report, params, when="after", seconds=steps_seconds)
    for (what, mib), points in looks.items():
        _add_growth(report, what, points, params, mib=mib)


async def _cycle(node: Node, parent: Machine, series: Series) -> None:
    began = asyncio.get_running_loop().time()
    await node.ask(parent, "dirty", str(DIRTY_KIB))
    forked = await node.fork(parent, CHILDREN)
    await node.run_in_all(forked.children, "/bin/true")
    await node.end(forked)
    series.add(CYCLE, (asyncio.get_running_loop().time() - began) * 1000)
    series.add(PAUSE, forked.clocks.pause_ms)
    series.add(FORK, forked.clocks.fork_ms)


async def _steps(
    node: Node, parent: Machine, report: Report, params: Params, *, when: str, seconds: float
) -> None:
    await node.settled()
    await node.ask(parent, "pace", str(PACE_MS))
    await node.steps(parent)  # Those until here are the question's own doing.
    await asyncio.sleep(seconds)
    seen = await node.steps(parent)
    await node.ask(parent, "pace", "0")
    # The last of them was overtaken by the question.
    report.add(STEP, seen["took"][:-1], when=when, pace_ms=PACE_MS, **params)
    report.add(LATE, seen["late"][:-1], when=when, pace_ms=PACE_MS, **params)


async def _look(node: Node, parent: Machine) -> list[Look]:
    """Of the parent's QEMU, of the keeper, and of this process, which holds the engine."""
    pid, us = await node.pid(parent), os.getpid()
    listing = await node.keeper.listing(deadline=asyncio.get_running_loop().time() + 60)
    qemu, keeper, engine = host.memory(pid), host.memory(node.keeper_pid), host.memory(us)
    return [
        Look("parent's QEMU, anonymous", qemu.anonymous, mib=True),
        Look("parent's QEMU, pss", qemu.pss, mib=True),
        Look("keeper, anonymous", keeper.anonymous, mib=True),
        Look("engine, anonymous", engine.anonymous, mib=True),
        Look("all of the machine, files in memory", host.shared_memory(), mib=True),
        Look("parent's QEMU, maps", host.mappings(pid)),
        Look("parent's QEMU, fds", host.descriptors(pid)),
        Look("keeper, fds", host.descriptors(node.keeper_pid)),
        Look("keeper, files held", len(listing.files)),
        Look("keeper, processes", len(listing.machines)),
        Look("engine, fds", host.descriptors(us)),
    ]


def _add_growth(report: Report, what: str, points: list[Point], params: Params, *, mib: bool) -> None:
    """What was seen between cycles, and how much more it is after a thousand further ones."""
    seen, growth = (MEMORY, MEMORY_GROWTH) if mib else (COUNT, COUNT_GROWTH)
    warm = [point for point in points if point[0] >= WARM * points[-1][0]]
    report.add(seen, [value for _, value in points], **params, of=what)
    report.add(growth, [slope(warm) * 1000], **params, of=what)


SOAK_SECONDS = 170.0
"""For the cycles. The steps before and after, and booting, come on top."""

SUITE = Suite(
    name="soak",
    measures="fork, exec, prune again and again: what grows?",
    run=run,
    seconds=SOAK_SECONDS + 70,
)
