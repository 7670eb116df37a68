"""Forks of one live parent, measured at the engine's contract: no cluster, no HTTP.

A run is: have the parent dirty so much memory, wait until nothing of ours works any more, fork, run a first
program in every child, end the children, and measure the floor of as many bytes.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from forktree_agent.engine.contract import ForkResult, Machine
from forktree_bench import host, machines
from forktree_bench.figures import Figure, Series, median, ratios
from forktree_bench.floor import COPY, FLOOR, LOAD, SAVE, Floor
from forktree_bench.machines import Node
from forktree_bench.plots import Plot
from forktree_bench.report import Report
from forktree_bench.suite import Scope, Suite

PAUSE = Figure(name="pause", clock="parent stopped → parent runs again; agent's")
FORK = Figure(name="fork", clock="parent stopped → every child runs; agent's")
READY = Figure(name="ready", clock="parent stopped → every child answered to its identity; agent's")
TOTAL = Figure(name="total", clock="fork called → engine answers, children's start included; caller's")
FIRST_EXEC = Figure(
    name="first_exec",
    clock="fork called → first program of every child, one that its parent had run, has ended; caller's",
)
COPIED = Figure(name="copied", unit="MB", clock="none: what the fork's own layers and device state hold")
PAUSE_RATIO = Figure(name="pause/floor", unit="x", clock="pause to the floor of the same run")
COPY_RATIO = Figure(name="pause/floor_copy", unit="x", clock="pause to the plain copy of the same run")
FORK_RATIO = Figure(name="fork/floor", unit="x", clock="fork to the floor of the same run")
DEPTH_RATIO = Figure(name="fork/depth_1", unit="x", clock="median fork to that at depth 1, same dirty bytes")
REPEAT_RATIO = Figure(name="fork/1st", unit="x", clock="last fork of one parent to its first")
UNIQUE = Figure(name="unique", unit="MiB", clock="none: anonymous memory of a fresh child, smaps_rollup")
PSS = Figure(name="pss", unit="MiB", clock="none: shared pages in parts, smaps_rollup")
STANDBY = Figure(name="unique_standby", unit="MiB", clock="none: anonymous memory of a process in wait")
ABOVE = Figure(name="unique_above_standby", unit="MiB", clock="none: a fresh child's less a standby's")

SMALL_MB, LARGE_MB = 256, 1024
USUAL_KIB = 4 << 10
FIRST_PROGRAM = ("/bin/echo", "hello")
BYTES_PER_MB = 1 << 20
FANS = ((1, 25), (3, 15), (8, 9), (32, 4), (100, 3))
"""Children, and so many runs."""
DIRTY_KIB = (512, 16 << 10, 64 << 10)
DEPTHS = (1, 2, 4, 8, 16, 32)
AGE = 20
"""Forks of one parent, one after the other."""


@dataclass(frozen=True, slots=True)
class Parent:
    machine: Machine
    by_itself_kib: int
    """What a fork copies of it besides what its worker was told to dirty."""

    def told(self, dirty_kib: int) -> str:
        """What the worker has to dirty for a fork to copy `dirty_kib` in all."""
        return str(max(0, dirty_kib - self.by_itself_kib))


class Bench:
    """Runs of one parent after the other, on one node."""

    def __init__(self, node: Node, floor: Floor, report: Report) -> None:
        self.node = node
        self.floor = floor
        self.report = report

    @asynccontextmanager
    async def parent(self, memory_mb: int = SMALL_MB) -> AsyncGenerator[Parent]:
        """A fresh root. Its first fork, which copies what waking up has dirtied, is not measured."""
        root = await self.node.root(memory_mb)
        try:
            await self.node.end(await self.node.fork(root, 1))
            yield await self.calibrated(root)
        finally:
            await self.node.release(root)

    async def calibrated(self, machine: Machine) -> Parent:
        """`machine`, and what a fork of it copies although its worker was told to dirty nothing: guests dirty
        memory of their own, and the command that tells the worker does too."""
        await self.node.run(machine, *FIRST_PROGRAM)
        await self.node.ask(machine, "dirty", "0")
        forked = await self.node.fork(machine, 0)
        await self.node.end(forked)
        return Parent(machine, forked.point.bytes // 1024)

    async def runs(self, parent: Parent, count: int, *, children: int, dirty_kib: int) -> Series:
        series = Series()
        for _ in range(count):
            forked = await self.run(series, parent, children=children, dirty_kib=dirty_kib)
            await self.node.end(forked)
            sample = await self.floor.sample(forked.point.bytes)
            for figure, value in ((COPY, sample.copy), (SAVE, sample.save), (LOAD, sample.load)):
                series.add(figure, value)
            series.add(FLOOR, sample.whole)
        for ratio, figure, to in (
            (PAUSE_RATIO, PAUSE, FLOOR),
            (COPY_RATIO, PAUSE, COPY),
            (FORK_RATIO, FORK, FLOOR),
        ):
            for value in ratios(series.of(figure), series.of(to)):
                series.add(ratio, value)
        return series

    async def run(self, series: Series, parent: Parent, *, children: int, dirty_kib: int) -> ForkResult:
        """One fork and its first programs. The children are left to the caller."""
        await self.node.ask(parent.machine, "dirty", parent.told(dirty_kib))
        await self.node.settled()
        began = time.monotonic()
        forked = await self.node.fork(parent.machine, children)
        answered = time.monotonic()
        await self.node.run_in_all(forked.children, *FIRST_PROGRAM)
        ended = time.monotonic()
        series.add(PAUSE, forked.clocks.pause_ms)
        series.add(FORK, forked.clocks.fork_ms)
        series.add(READY, forked.clocks.ready_ms)
        series.add(TOTAL, (answered - began) * 1000)
        series.add(FIRST_EXEC, (ended - began) * 1000)
        series.add(COPIED, forked.point.bytes / BYTES_PER_MB)
        return forked


async def run(report: Report, scope: Scope) -> None:
    with TemporaryDirectory(prefix="forktree-bench-", dir="/dev/shm") as folder:
        async with (
            machines.running(Path(folder)) as node,
            Floor.running(Path(folder), memory_mb=SMALL_MB) as floor,
        ):
            report.accelerator = node.capability.accelerator
            bench = Bench(node, floor, report)
            await _fans(bench, scope)
            await _dirty(bench, scope)
            await _large(bench, scope)
            await _unique(bench, scope)
            await _depth(bench, scope)
            await _age(bench, scope)
            await _busy(bench, scope)


async def _fans(bench: Bench, scope: Scope) -> None:
    for children, many in FANS:
        if children <= 8 or not scope.quick:
            await _fan(bench, children, scope.runs(many, few=1 if children > 3 else 2))


async def _fan(bench: Bench, children: int, runs: int) -> None:
    params = {"children": children, "dirty_mb": USUAL_KIB / 1024, "guest_mb": SMALL_MB, "depth": 1}
    async with bench.report.part(f"{children} children", FORK, **params), bench.parent() as parent:
        series = await bench.runs(parent, runs, children=children, dirty_kib=USUAL_KIB)
        bench.report.add_all(series, **params)


async def _dirty(bench: Bench, scope: Scope) -> None:
    for kib in DIRTY_KIB:
        params = {"children": 1, "dirty_mb": kib / 1024, "guest_mb": SMALL_MB, "depth": 1}
        async with bench.report.part(f"{kib / 1024:g} MB dirty", FORK, **params), bench.parent() as parent:
            series = await bench.runs(parent, scope.runs(15), children=1, dirty_kib=kib)
            bench.report.add_all(series, **params)


async def _busy(bench: Bench, scope: Scope) -> None:
    """The same fork of a parent that works on all the time, and what it saw of the fork from inside."""
    late = Figure(name="step_late", clock="a step's start behind its time, the worst in each run; guest's")
    params = {"children": 1, "dirty_mb": USUAL_KIB / 1024, "guest_mb": SMALL_MB, "parent_step_ms": 5}
    async with bench.report.part("a parent that works", PAUSE, **params), bench.parent() as parent:
        series = Series()
        await bench.node.ask(parent.machine, "pace", "5")
        for _ in range(scope.runs(10)):
            await bench.node.steps(parent.machine)
            forked = await bench.run(series, parent, children=1, dirty_kib=USUAL_KIB)
            steps = await bench.node.steps(parent.machine)
            series.add(late, max(steps["late"], default=0.0))
            await bench.node.end(forked)
        bench.report.add_all(series, **params)


async def _large(bench: Bench, scope: Scope) -> None:
    params = {"children": 1, "dirty_mb": USUAL_KIB / 1024, "guest_mb": LARGE_MB, "depth": 1}
    async with bench.report.part("a guest of 1 GiB", FORK, **params), bench.parent(LARGE_MB) as parent:
        series = await bench.runs(parent, scope.runs(15), children=1, dirty_kib=USUAL_KIB)
        bench.report.add_all(series, **params)


async def _age(bench: Bench, scope: Scope) -> None:
    """One parent forked again and again, with the same bytes dirtied before each fork."""
    age = 3 if scope.quick else AGE
    fixed = {"children": 1, "dirty_mb": USUAL_KIB / 1024, "guest_mb": SMALL_MB}
    async with bench.report.part(f"{age} forks of one parent", REPEAT_RATIO, **fixed):
        by_turn = [Series() for _ in range(age)]
        for _ in range(scope.runs(4, few=1)):
            async with bench.parent() as parent:
                for series in by_turn:
                    forked = await bench.run(series, parent, children=1, dirty_kib=USUAL_KIB)
                    await bench.node.end(forked)
        for turn in (0, age // 2, age - 1):
            for figure in (PAUSE, FORK, COPIED):
                bench.report.add(figure, by_turn[turn].of(figure), nth_fork=turn + 1, **fixed)
        bench.report.add(REPEAT_RATIO, ratios(by_turn[-1].of(FORK), by_turn[0].of(FORK)), **fixed)


async def _unique(bench: Bench, scope: Scope) -> None:
    """What a child takes that nobody else has: fresh, before anything was run in it."""
    children = 4
    params = {"children": children, "dirty_mb": USUAL_KIB / 1024, "guest_mb": SMALL_MB}
    node = bench.node
    async with bench.report.part("memory of a child", UNIQUE, **params), bench.parent() as parent:
        series = Series()
        for _ in range(scope.runs(4, few=1)):
            await node.ask(parent.machine, "dirty", parent.told(USUAL_KIB))
            await node.settled()
            waiting = _in_wait(node, await node.pids())
            forked = await node.fork(parent.machine, children)
            pids = await node.pids()
            seen = [host.memory(pids[child.id]) for child in forked.children]
            await node.end(forked)
            for each in seen:
                series.add(UNIQUE, each.anonymous)
                series.add(PSS, each.pss)
                if waiting:
                    series.add(ABOVE, each.anonymous - median(waiting))
            for anonymous in waiting:
                series.add(STANDBY, anonymous)
        bench.report.add_all(series, **params)
        if not series.of(STANDBY):
            bench.report.notes.append("No process waited for a fork before children's memory was looked at.")


def _in_wait(node: Node, pids: Mapping[str, int]) -> list[float]:
    """Anonymous MiB of the keeper's processes that are no machines (yet)."""
    known = {machine.id for machine in node.engine.machines()}
    found: list[float] = []
    for name, pid in pids.items():
        if name not in known:
            with suppress(OSError):  # It has ended, or its place in the list is all that is left of it.
                found.append(host.memory(pid).anonymous)
    return found


async def _depth(bench: Bench, scope: Scope) -> None:
    """A chain of forks of forks. At some depths the machine there is forked several times."""
    deepest = 4 if scope.quick else DEPTHS[-1]
    fixed = {"children": 1, "dirty_mb": USUAL_KIB / 1024, "guest_mb": SMALL_MB}
    chain: list[ForkResult] = []
    forks: dict[int, list[float]] = {}
    async with bench.report.part("forks of forks", FORK, **fixed), bench.parent() as root:
        try:
            parent = root
            for depth in range(1, deepest + 1):
                if depth in DEPTHS:
                    series = await bench.runs(parent, scope.runs(7), children=1, dirty_kib=USUAL_KIB)
                    bench.report.add_all(series, depth=depth, **fixed)
                    forks[depth] = series.of(FORK)
                chain.append(await bench.run(Series(), parent, children=1, dirty_kib=USUAL_KIB))
                parent = await bench.calibrated(chain[-1].children[0])
        finally:
            for forked in reversed(chain):
                await bench.node.end(forked)
        shallow = median(forks[1])
        bench.report.add(DEPTH_RATIO, [median(forks[max(forks)]) / shallow], depth=max(forks), **fixed)


SUITE = Suite(
    name="engine",
    measures="forks of a live parent: pause, fork, first program, memory, against the floor",
    run=run,
    seconds=360,
    plots=(
        Plot(
            name="engine-children",
            title="A live parent forked into N children (4 MB dirty, 256 MiB guest)",
            figures=("pause", "fork", "ready", "first_exec", "floor"),
            x="children",
            y_label="ms, median",
            where={"dirty_mb": 4.0, "guest_mb": SMALL_MB, "depth": 1},
            logarithmic=True,
        ),
        Plot(
            name="engine-dirty",
            title="One child, by what the parent had dirtied (256 MiB guest)",
            figures=("pause", "fork", "floor_copy", "floor"),
            x="dirty_mb",
            y_label="ms, median",
            where={"children": 1, "guest_mb": SMALL_MB, "depth": 1},
            logarithmic=True,
        ),
        Plot(
            name="engine-depth",
            title="One child, by the depth of its parent (4 MB dirty, 256 MiB guest)",
            figures=("pause", "fork", "ready", "floor"),
            x="depth",
            y_label="ms, median",
            where={"children": 1, "dirty_mb": 4.0, "guest_mb": SMALL_MB},
        ),
    ),
)
