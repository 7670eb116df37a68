"""An engine without machines, for tests of what control decides.

It keeps the promises of the `Engine` contract that control builds on: owners are unique, all or nothing, what
was only begun is gone after `adopt`. A `FakeHost` stands for what survives an agent: keeper and machines.
"""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from forktree.models import Level, Mode
from forktree_agent.engine.contract import (
    NO_HOOKS,
    Adoption,
    AtCapacity,
    Baseline,
    BaselineId,
    Capability,
    ChildOrder,
    Command,
    CommandRefused,
    Counts,
    EngineError,
    ExecChunk,
    ExecEnd,
    ExecNotFound,
    ExecReader,
    ExecResult,
    ExecState,
    ExecStream,
    ForkClocks,
    ForkResult,
    Hooks,
    Machine,
    MachineExit,
    MachineGone,
    MachineId,
    MachinePaused,
    MemoryLimit,
    MemoryUse,
    NetworkLost,
    Owner,
    ParentLost,
    PauseOverBudget,
    Point,
    PointId,
    PointLost,
    Shape,
    TerminalSize,
    TreeId,
    TreeLimits,
    Usage,
)

MACHINE_BYTES = 100
PAUSE_MS = 2.0


@dataclass
class FakeHost:
    """Machines, instants and baselines: what an agent's death does not touch."""

    machines: dict[MachineId, Machine] = field(default_factory=dict[MachineId, Machine])
    points: dict[PointId, Point] = field(default_factory=dict[PointId, Point])
    baselines: dict[BaselineId, Baseline] = field(default_factory=dict[BaselineId, Baseline])
    orders: list[ChildOrder] = field(default_factory=list[ChildOrder])
    """Every machine that was ever started, in order."""
    ran: list[tuple[Owner, tuple[str, ...]]] = field(default_factory=list[tuple[Owner, tuple[str, ...]]])
    """Every command that was ever started, in order."""
    hooks: list[Hooks] = field(default_factory=list[Hooks])
    """Those of every fork and branch, in order."""
    execs: dict[MachineId, dict[str, ExecResult]] = field(
        default_factory=dict[MachineId, dict[str, ExecResult]]
    )
    """Commands that can be attached to, all of them ended."""
    under_way: dict[Owner, str] = field(default_factory=dict[Owner, str])
    """A command that runs in a machine and never ends, by its machine's owner."""
    given: dict[Owner, Owner] = field(default_factory=dict[Owner, Owner])
    """What machines that were given away were called before."""
    exits: list[MachineExit] = field(default_factory=list[MachineExit])
    """Of machines that ended while no agent ran."""
    numbers: itertools.count[int] = field(default_factory=itertools.count)


def _no_hook(_: str) -> None:
    return


async def _nothing_said(_: Owner, __: Command) -> ExecResult:
    return ExecResult(stdout=b"", stderr=b"", exit_code=0, timed_out=False, truncated=False)


class FakeReader:
    """Implements `ExecReader` for a command that has ended."""

    def __init__(self, exec_id: str, result: ExecResult, stdout_offset: int, stderr_offset: int) -> None:
        self.id = exec_id
        parts = (
            (ExecStream.STDOUT, stdout_offset, result.stdout),
            (ExecStream.STDERR, stderr_offset, result.stderr),
        )
        self._chunks = [
            ExecChunk(stream=stream, offset=at, data=data[at:]) for stream, at, data in parts if data[at:]
        ]
        self._end = ExecEnd(exit_code=result.exit_code, timed_out=result.timed_out)

    async def next(self, *, deadline: float) -> ExecChunk | ExecEnd | None:
        return self._chunks.pop(0) if self._chunks else self._end


class FakeEngine:
    """Implements `Engine` over a `FakeHost`. `hook` is called at each step, and may raise to die there."""

    def __init__(
        self, host: FakeHost, *, capacity: int = 1000, hook: Callable[[str], None] = _no_hook
    ) -> None:
        self.host = host
        self.capacity = capacity
        """Machines that fit."""
        self.hook = hook
        self.commands: Callable[[Owner, Command], Awaitable[ExecResult]] = _nothing_said
        """What comes of a command, by its machine's owner."""
        self.bake_error: EngineError | None = None
        self.fork_error: Exception | None = None
        self.bakes = 0
        self.shapes: list[Shape] = []
        """Of every bake that was asked for."""
        self.ready: dict[BaselineId, int] = {}
        """What was last asked to be kept ready for roots."""
        self.go_on = asyncio.Event()
        """Cleared, forks and bakes wait in their midst."""
        self.go_on.set()
        self.identities = asyncio.Event()
        """Cleared, no child of a fork that did not wait for it answers its identity."""
        self.identities.set()
        self.mute: set[str] = set()
        """Host names of children that never do, and are ended for it."""
        self.waiting = asyncio.Event()
        """A fork or bake waits for `go_on`."""
        self._exits: asyncio.Queue[MachineExit | NetworkLost] = asyncio.Queue()

    async def adopt(self, *, deadline: float) -> Adoption:
        for ended in self.host.exits:
            self._exits.put_nowait(ended)
        self.host.exits.clear()
        return Adoption(
            machines=self.machines(), points=self.points(), baselines=tuple(self.host.baselines.values())
        )

    async def probe(self, *, deadline: float) -> Capability:
        return Capability(
            passed=True,
            engine="fake",
            accelerator="tcg",
            reason="CanaryPassed",
            message="nothing was tried",
            boot_ms=1.0,
            fork_ms=1.0,
        )

    async def bake(self, shape: Shape, *, deadline: float) -> Baseline:
        self.shapes.append(shape)
        self.hook("bake")
        await self._pause()
        if self.bake_error is not None:
            raise self.bake_error
        identity = BaselineId(f"baseline-of-{shape.image}")
        held = self.host.baselines.get(identity)
        if held is not None:
            return held
        self.bakes += 1
        point = Point(id=self._new(PointId), owner=Owner(f"baseline-{shape.image}"), tree=None, bytes=7)
        baseline = Baseline(id=identity, point=point.id, boot_ms=12.5)
        self.host.points[point.id] = point
        self.host.baselines[identity] = baseline
        self.hook("baked")
        return baseline

    async def fork(
        self,
        parent: MachineId,
        owner: Owner,
        orders: Sequence[ChildOrder],
        limits: TreeLimits,
        *,
        hooks: Hooks = NO_HOOKS,
        answered: bool = True,
        deadline: float,
    ) -> ForkResult:
        self.host.hooks.append(hooks)
        source = self._running(parent)
        self._admit(orders, limits)
        if limits.pause_budget_ms is not None and limits.pause_budget_ms < PAUSE_MS:
            raise PauseOverBudget(f"{parent} would stand still for about {PAUSE_MS} ms")
        self.hook("fork")
        await self._pause()
        source = self._running(parent)
        assert all(each.owner != owner for each in self.host.points.values()), f"{owner} has a point already"
        point = Point(id=self._new(PointId), owner=owner, tree=limits.tree, bytes=4096)
        children = self._start(orders, limits, source.baseline)
        self.host.points[point.id] = point
        self.hook("forked")
        ready_ms = 9.0 if answered else None
        return ForkResult(
            point=point,
            children=children,
            clocks=ForkClocks(pause_ms=PAUSE_MS, fork_ms=4.0, ready_ms=ready_ms),
        )

    async def answered(self, machine: MachineId, *, deadline: float) -> float | None:
        hostname = self._hostname(self._there(machine).owner)
        async with asyncio.timeout_at(deadline):
            await self.identities.wait()
        if hostname in self.mute and machine in self.host.machines:
            self.kill(self._there(machine).owner, "it did not answer to its identity")
            raise MachineGone("it did not answer to its identity")
        self._there(machine)
        return 9.0

    def give(self, owners: Mapping[Owner, Owner]) -> None:
        self.hook("give")
        for machine in self.machines():
            if machine.owner in owners:
                self.host.machines[machine.id] = replace(machine, owner=owners[machine.owner])
                self.host.given[owners[machine.owner]] = machine.owner
                self.hook("given")
        for point in self.points():
            if point.owner in owners:
                self.host.points[point.id] = replace(point, owner=owners[point.owner])

    async def branch(
        self,
        point: PointId,
        orders: Sequence[ChildOrder],
        limits: TreeLimits,
        *,
        hooks: Hooks = NO_HOOKS,
        deadline: float,
    ) -> ForkResult:
        self.host.hooks.append(hooks)
        self._held(point)
        self._admit(orders, limits)
        self.hook("branch")
        await self._pause()
        held = self._held(point)
        baseline = next((each.id for each in self.host.baselines.values()), BaselineId("gone"))
        children = self._start(orders, limits, baseline)
        self.hook("branched")
        return ForkResult(
            point=held, children=children, clocks=ForkClocks(pause_ms=None, fork_ms=3.0, ready_ms=8.0)
        )

    def keep_ready(self, baseline: BaselineId, count: int) -> None:
        self.ready[baseline] = count

    async def exec(self, machine: MachineId, command: Command, *, deadline: float) -> ExecResult:
        await self.answered(machine, deadline=deadline)
        owner = self._there(machine).owner
        if self._there(machine).paused:
            raise MachinePaused(f"machine {machine} is paused")
        self.hook("exec")
        self.host.ran.append((owner, command.argv))
        result = await self.commands(owner, command)
        self.hook("execed")
        return result

    async def begin(self, machine: MachineId, command: Command, *, deadline: float) -> str:
        exec_id = command.id or f"e{next(self.host.numbers)}"
        result = await self.exec(machine, command, deadline=deadline)
        self.host.execs.setdefault(machine, {})[exec_id] = result
        return exec_id

    @asynccontextmanager
    async def streaming(
        self, machine: MachineId, command: Command, *, deadline: float
    ) -> AsyncGenerator[ExecReader]:
        exec_id = await self.begin(machine, command, deadline=deadline)
        yield FakeReader(exec_id, self._exec(machine, exec_id), 0, 0)

    @asynccontextmanager
    async def reading(
        self, machine: MachineId, exec_id: str, *, stdout_offset: int, stderr_offset: int, deadline: float
    ) -> AsyncGenerator[ExecReader]:
        yield FakeReader(exec_id, self._exec(machine, exec_id), stdout_offset, stderr_offset)

    async def write(
        self, machine: MachineId, exec_id: str, data: bytes, *, end: bool, deadline: float
    ) -> None:
        self._exec(machine, exec_id)
        raise CommandRefused(f"command {exec_id} has ended and takes no input")

    async def resize(self, machine: MachineId, exec_id: str, size: TerminalSize) -> None:
        self._exec(machine, exec_id)

    async def kill_exec(self, machine: MachineId, exec_id: str, *, deadline: float) -> bool:
        self._exec(machine, exec_id)
        return False

    async def execs_told(self, machine: MachineId, *, deadline: float) -> tuple[ExecState, ...]:
        return self.execs(machine)

    def execs(self, machine: MachineId) -> tuple[ExecState, ...]:
        owner = self._there(machine).owner
        under_way = self.host.under_way.get(self.host.given.get(owner, owner))
        running = () if under_way is None else (under_way,)
        return tuple(
            ExecState(id=exec_id, ended=False, end=None, age_seconds=1.0, stdout_bytes=0, stderr_bytes=0)
            for exec_id in running
        ) + tuple(
            ExecState(
                id=exec_id,
                ended=True,
                end=ExecEnd(exit_code=result.exit_code, timed_out=result.timed_out),
                age_seconds=None,
                stdout_bytes=len(result.stdout),
                stderr_bytes=len(result.stderr),
            )
            for exec_id, result in self.host.execs.get(machine, {}).items()
        )

    async def attach(self, machine: MachineId, exec_id: str, *, deadline: float) -> ExecResult:
        return self._exec(machine, exec_id)

    def _exec(self, machine: MachineId, exec_id: str) -> ExecResult:
        self._there(machine)
        try:
            return self.host.execs[machine][exec_id]
        except KeyError:
            raise ExecNotFound(f"machine {machine} knows of no command {exec_id}") from None

    async def pause(self, machine: MachineId, *, deadline: float) -> None:
        self.hook("pause")
        self.host.machines[machine] = replace(self._there(machine), paused=True)

    async def resume(self, machine: MachineId, *, deadline: float) -> None:
        self.hook("resume")
        self.host.machines[machine] = replace(self._there(machine), paused=False)

    async def release(self, machine: MachineId) -> None:
        self.hook("release")
        self.host.machines.pop(machine, None)
        self.hook("released")

    async def drop_point(self, point: PointId) -> None:
        self.hook("drop_point")
        self.host.points.pop(point, None)

    async def drop_baseline(self, baseline: BaselineId) -> None:
        held = self.host.baselines.pop(baseline, None)
        if held is not None:
            self.host.points.pop(held.point, None)

    async def free_image(self, digest: str) -> bool:
        return True

    def machines(self) -> tuple[Machine, ...]:
        return tuple(self.host.machines.values())

    def machine_of(self, owner: Owner) -> Machine | None:
        return next((each for each in self.machines() if each.owner == owner), None)

    def points(self) -> tuple[Point, ...]:
        return tuple(self.host.points.values())

    def point_of(self, owner: Owner) -> Point | None:
        return next((each for each in self.points() if each.owner == owner), None)

    def holds(self, point: PointId) -> bool:
        return point in self.host.points

    async def exits(self) -> AsyncIterator[MachineExit | NetworkLost]:
        while True:
            yield await self._exits.get()

    def usage(self) -> Usage:
        reserved = len(self.host.machines) * MACHINE_BYTES
        return Usage(capacity_bytes=self.capacity * MACHINE_BYTES, reserved_bytes=reserved)

    def counts(self) -> Counts:
        return Counts(
            machines=len(self.host.machines),
            points=len(self.host.points),
            point_bytes=sum(each.bytes for each in self.host.points.values()),
            standby=0,
            execs_running=0,
            execs_ended={},
        )

    async def memory(self, machine: MachineId, *, deadline: float) -> MemoryUse:
        if machine not in self.host.machines:
            raise MachineGone(f"no machine {machine}")
        return MemoryUse(unique_bytes=MACHINE_BYTES, shared_bytes=0)

    def kill(self, owner: Owner, text: str = "killed by signal 9 (SIGKILL)") -> None:
        """End a machine as if by itself."""
        machine = next(each for each in self.machines() if each.owner == owner)
        del self.host.machines[machine.id]
        self._exits.put_nowait(MachineExit(machine=machine.id, owner=owner, text=text))

    def lose_network(self, owner: Owner, text: str) -> None:
        """A machine's way to the outside ends by itself."""
        machine = next(each for each in self.machines() if each.owner == owner)
        self._exits.put_nowait(NetworkLost(machine=machine.id, owner=owner, text=text))

    def _hostname(self, owner: Owner) -> str | None:
        born_as = self.host.given.get(owner, owner)
        return next((each.hostname for each in self.host.orders if each.owner == born_as), None)

    async def _pause(self) -> None:
        if not self.go_on.is_set():
            self.waiting.set()
            await self.go_on.wait()

    def _new(self, kind: Callable[[str], PointId]) -> PointId:
        return kind(f"p{next(self.host.numbers)}")

    def _admit(self, orders: Sequence[ChildOrder], limits: TreeLimits) -> None:
        if self.fork_error is not None:
            raise self.fork_error
        if len(self.host.machines) + len(orders) > self.capacity:
            raise AtCapacity(f"{len(orders)} machines do not fit")
        of_tree = sum(each.tree == limits.tree for each in self.host.machines.values())
        if (
            limits.memory_bytes is not None
            and (of_tree + len(orders)) * MACHINE_BYTES * 1_000_000 > limits.memory_bytes
        ):
            raise MemoryLimit(f"the tree may take {limits.memory_bytes} bytes")

    def _there(self, machine: MachineId) -> Machine:
        try:
            return self.host.machines[machine]
        except KeyError:
            raise MachineGone(f"machine {machine} does not run") from None

    def _running(self, parent: MachineId) -> Machine:
        try:
            return self.host.machines[parent]
        except KeyError:
            raise ParentLost(f"machine {parent} does not run") from None

    def _held(self, point: PointId) -> Point:
        try:
            return self.host.points[point]
        except KeyError:
            raise PointLost(f"instant {point} is not held any more") from None

    def _start(
        self, orders: Sequence[ChildOrder], limits: TreeLimits, baseline: BaselineId
    ) -> tuple[Machine, ...]:
        """All at once: a real engine ends what it had only begun, so no other agent ever sees a part."""
        started: list[Machine] = []
        for order in orders:
            taken = [each.owner for each in self.host.machines.values()]
            assert order.owner not in taken, f"{order.owner} has a machine already"
            started.append(
                Machine(
                    id=MachineId(f"m{next(self.host.numbers)}"),
                    owner=order.owner,
                    tree=TreeId(limits.tree),
                    baseline=baseline,
                    generation=str(uuid.uuid4()),
                    mode=Mode.FORK,
                    level=Level.MEMORY,
                )
            )
        self.host.orders.extend(orders)
        self.host.machines.update({each.id: each for each in started})
        return tuple(started)
