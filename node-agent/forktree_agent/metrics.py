"""What an agent tells Prometheus: one object, handed to whoever has something to say.

What happens is recorded where it happens, in two or three microseconds. What only is, machines and bytes, is
read when somebody scrapes.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager

from forktree.metrics import table
from forktree.metrics.instruments import Instruments
from forktree.metrics.table import Program, Road, Stage, SweepEnd, Swept
from forktree.models.reasons import Mode, Reason, SessionPhase
from forktree_agent.engine.contract import Counts, ExecOutcome, ForkClocks, Usage

LOOK_SECONDS = 1.0
"""Between two looks at how late the event loop is."""


class Metrics:
    """One agent's."""

    def __init__(self) -> None:
        made = self.instruments = Instruments(Program.AGENT)
        self._fork_seconds = made.histogram(table.FORK_SECONDS)
        self._fork_failures = made.counter(table.FORK_FAILURES)
        self._at_capacity = made.counter(table.AT_CAPACITY)
        self._machines_lost = made.counter(table.MACHINES_LOST)
        self._sweeps = made.counter(table.SWEEPS)
        self._swept = made.counter(table.SWEPT)
        self._execs_ended = made.counter(table.EXECS_ENDED)
        self._http_requests = made.counter(table.HTTP_REQUESTS)
        self._http_seconds = made.histogram(table.HTTP_SECONDS)
        self._loop_lag = made.histogram(table.LOOP_LAG)
        self._told: Counter[ExecOutcome] = Counter()

    # Forks ------------------------------------------------------------------------------------------------

    def forked(self, road: Road, mode: Mode, clocks: ForkClocks) -> None:
        """Machines run: a fork of this node, or a root."""
        for stage, milliseconds in (
            (Stage.PAUSE, clocks.pause_ms),
            (Stage.FORK, clocks.fork_ms),
            (Stage.READY, clocks.ready_ms),
        ):
            if milliseconds is not None:
                self.fork_took(road, mode, stage, milliseconds)

    def fork_took(self, road: Road, mode: Mode, stage: Stage, milliseconds: float) -> None:
        """One clock of a fork that is known later than the others."""
        self._fork_seconds.labels(stage, mode, road).observe(milliseconds / 1000)

    def fork_failed(self, reason: Reason) -> None:
        """For good."""
        self._fork_failures.labels(reason).inc()

    def had_no_room(self, road: Road) -> None:
        """It may be tried again."""
        self._at_capacity.labels(road).inc()

    # The node ---------------------------------------------------------------------------------------------

    def machine_lost(self) -> None:
        """It ended although nobody asked for it."""
        self._machines_lost.inc()

    def probed(self, *, passed: bool) -> None:
        self.instruments.gauge(table.CANARY_PASSED).set(passed)

    def sweep_over(self, end: SweepEnd) -> None:
        self._sweeps.labels(end).inc()

    def swept(self, what: Swept, count: int) -> None:
        """What a sweep ended."""
        self._swept.labels(what).inc(count)

    def node_is(
        self, counts: Counts, usage: Usage, *, phases: Iterable[SessionPhase], unrecorded: int
    ) -> None:
        """How the node stands, at a scrape. `phases`: of all its sessions."""
        gauge = self.instruments.gauge
        gauge(table.MACHINES).set(counts.machines)
        gauge(table.POINTS).set(counts.points)
        gauge(table.POINT_BYTES).set(counts.point_bytes)
        gauge(table.STANDBY).set(counts.standby)
        gauge(table.EXECS_RUNNING).set(counts.execs_running)
        gauge(table.CAPACITY_BYTES).set(usage.capacity_bytes)
        gauge(table.RESERVED_BYTES).set(usage.reserved_bytes)
        gauge(table.UNRECORDED).set(unrecorded)
        there = Counter(phases)
        for phase in table.LIVE_PHASES:
            gauge(table.SESSIONS).labels(phase).set(there[phase])
        for outcome, count in counts.execs_ended.items():
            self._execs_ended.labels(outcome).inc(count - self._told[outcome])
            self._told[outcome] = count

    # HTTP and the loop ------------------------------------------------------------------------------------

    def answered(self, method: str, route: str, status: int | None, seconds: float) -> None:
        """A request is over. `route` is a pattern; no `status`: its caller went away."""
        known = method if method in table.METHODS else "other"
        self._http_requests.labels(
            known, route, "abandoned" if status is None else f"{status // 100}xx"
        ).inc()
        self._http_seconds.labels(known, route).observe(seconds)

    @asynccontextmanager
    async def watching_the_loop(self) -> AsyncGenerator[None]:
        """Look, inside the block, how late the event loop is."""
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(self._watch_the_loop(), name="loop-lag")
            yield
            watching.cancel()

    async def _watch_the_loop(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + LOOK_SECONDS
            await asyncio.sleep(LOOK_SECONDS)
            self._loop_lag.observe(max(0.0, loop.time() - due))
