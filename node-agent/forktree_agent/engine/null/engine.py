"""An engine without machines, named `null`: what is left of a node's work is what everything else costs.

It keeps the promises that control builds on: owners are unique, a fork is all or nothing, and after a crash
what was made is there and what was only begun is not. It claims nothing that it does not do: nodes show it as
engine `null` without an accelerator, its sessions have mode `Clean` and level `None`, and commands, hooks and
probes are refused.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import ClassVar

import msgspec

from forktree_agent.engine.contract import (
    NO_HOOKS,
    Adoption,
    AtCapacity,
    BakeFailed,
    Baseline,
    BaselineId,
    Capability,
    ChildOrder,
    Command,
    CommandRefused,
    Counts,
    ExecNotFound,
    ExecReader,
    ExecResult,
    ExecState,
    ForkClocks,
    ForkResult,
    HookFailed,
    Hooks,
    Machine,
    MachineExit,
    MachineGone,
    MachineId,
    MemoryLimit,
    MemoryUse,
    Owner,
    ParentLost,
    Point,
    PointId,
    PointLost,
    Shape,
    TerminalSize,
    TreeLimits,
    Usage,
)
from forktree_agent.engine.null.records import BaselineRecord, BegunRecord, MachineRecord, PointRecord
from forktree_agent.journal import Journal
from forktree_agent.typed_records import load_all, to_journal

NOTHING_RUNS = "the null engine runs nothing"


class NullEngine:
    """Implements `Engine` with records. Its clocks are zero, and it stops no parent."""

    NAME: ClassVar[str] = "null"
    MACHINE: ClassVar[str] = "null-machine"
    POINT: ClassVar[str] = "null-point"
    BASELINE: ClassVar[str] = "null-baseline"
    BEGUN: ClassVar[str] = "null-begun"

    def __init__(self, journal: Journal, *, capacity_bytes: int) -> None:
        self._journal = journal
        self._capacity_bytes = capacity_bytes
        self._machines: dict[MachineId, MachineRecord] = {}
        self._points: dict[PointId, PointRecord] = {}
        # A node of this engine has thousands of either, and is asked for one by its owner at every step.
        self._machine_of: dict[Owner, MachineId] = {}
        self._point_of: dict[Owner, PointId] = {}
        self._baselines: dict[BaselineId, BaselineRecord] = {}
        self._reserved_bytes = 0
        self._exits: asyncio.Queue[MachineExit] = asyncio.Queue()

    async def adopt(self, *, deadline: float) -> Adoption:
        for key, begun in load_all(self._journal, self.BEGUN, BegunRecord).items():
            self._take_back(key, begun)
        for machine in load_all(self._journal, self.MACHINE, MachineRecord).values():
            self._enter_machine(machine)
        for point in load_all(self._journal, self.POINT, PointRecord).values():
            self._enter_point(point)
        self._baselines = {
            BaselineId(key): record
            for key, record in load_all(self._journal, self.BASELINE, BaselineRecord).items()
        }
        self._reserved_bytes = sum(record.memory_bytes for record in self._machines.values())
        baselines = tuple(record.view() for record in self._baselines.values())
        return Adoption(machines=self.machines(), points=self.points(), baselines=baselines)

    async def probe(self, *, deadline: float) -> Capability:
        return Capability(
            passed=True,
            engine=self.NAME,
            accelerator="",
            reason="NullEngine",
            message="nothing was tried: this node pretends to have machines",
            boot_ms=0.0,
            fork_ms=0.0,
        )

    async def bake(self, shape: Shape, *, deadline: float) -> Baseline:
        if shape.command or shape.probe is not None or shape.pins:
            raise BakeFailed(f"{NOTHING_RUNS}: its templates have no command, probe or pins")
        secrets = [(each.name, each.version) for each in shape.secret_env]
        parts = (
            self.NAME,
            shape.disk.digest if shape.disk is not None else shape.image,
            shape.memory_bytes,
            shape.overlay_bytes,
            shape.env,
            secrets,
        )
        identity = BaselineId(hashlib.sha256(repr(parts).encode()).hexdigest())
        if identity not in self._baselines:
            # Named after the baseline, so that a bake which a crash cut short is done again in its place.
            point = PointRecord(
                id=f"p-{identity[:12]}",
                owner=f"baseline-{identity}",
                tree=None,
                baseline=identity,
                memory_bytes=shape.memory_bytes,
            )
            self._put(self.POINT, point.id, point)
            self._enter_point(point)
            baseline = BaselineRecord(id=identity, point=point.id)
            self._put(self.BASELINE, identity, baseline)
            self._baselines[identity] = baseline
        return self._baselines[identity].view()

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
        source = self._machines.get(parent)
        if source is None:
            raise ParentLost(f"machine {parent} does not run")
        point = PointRecord(
            id=_new("p"),
            owner=owner,
            tree=limits.tree,
            baseline=source.baseline,
            memory_bytes=source.memory_bytes,
        )
        return self._start(point, orders, limits, hooks, new_point=True)

    async def branch(
        self,
        point: PointId,
        orders: Sequence[ChildOrder],
        limits: TreeLimits,
        *,
        hooks: Hooks = NO_HOOKS,
        deadline: float,
    ) -> ForkResult:
        held = self._points.get(point)
        if held is None:
            raise PointLost(f"instant {point} is not held any more")
        return self._start(held, orders, limits, hooks, new_point=False)

    def keep_ready(self, baseline: BaselineId, count: int) -> None:
        """Its roots cannot start any sooner."""

    async def exec(self, machine: MachineId, command: Command, *, deadline: float) -> ExecResult:
        self._there(machine)
        raise CommandRefused(NOTHING_RUNS)

    async def begin(self, machine: MachineId, command: Command, *, deadline: float) -> str:
        self._there(machine)
        raise CommandRefused(NOTHING_RUNS)

    @asynccontextmanager
    async def streaming(
        self, machine: MachineId, command: Command, *, deadline: float
    ) -> AsyncGenerator[ExecReader]:
        self._there(machine)
        raise CommandRefused(NOTHING_RUNS)
        yield

    @asynccontextmanager
    async def reading(
        self, machine: MachineId, exec_id: str, *, stdout_offset: int, stderr_offset: int, deadline: float
    ) -> AsyncGenerator[ExecReader]:
        raise self._unknown(machine, exec_id)
        yield

    async def write(
        self, machine: MachineId, exec_id: str, data: bytes, *, end: bool, deadline: float
    ) -> None:
        raise self._unknown(machine, exec_id)

    async def resize(self, machine: MachineId, exec_id: str, size: TerminalSize) -> None:
        raise self._unknown(machine, exec_id)

    async def kill_exec(self, machine: MachineId, exec_id: str, *, deadline: float) -> bool:
        raise self._unknown(machine, exec_id)

    async def execs_told(self, machine: MachineId, *, deadline: float) -> tuple[ExecState, ...]:
        return self.execs(machine)

    def execs(self, machine: MachineId) -> tuple[ExecState, ...]:
        self._there(machine)
        return ()

    async def attach(self, machine: MachineId, exec_id: str, *, deadline: float) -> ExecResult:
        raise self._unknown(machine, exec_id)

    def _unknown(self, machine: MachineId, exec_id: str) -> ExecNotFound:
        self._there(machine)
        return ExecNotFound(f"machine {machine} knows of no command {exec_id}: {NOTHING_RUNS}")

    async def answered(self, machine: MachineId, *, deadline: float) -> float | None:
        self._there(machine)
        return 0.0  # There is nobody to wait for.

    def give(self, owners: Mapping[Owner, Owner]) -> None:
        for old, new in owners.items():
            machine, point = self._machine_of.get(old), self._point_of.get(old)
            if machine is not None:
                given = msgspec.structs.replace(self._machines[machine], owner=new)
                self._put(self.MACHINE, machine, given)
                del self._machine_of[old]
                self._enter_machine(given)
            if point is not None:
                held = msgspec.structs.replace(self._points[point], owner=new)
                self._put(self.POINT, point, held)
                del self._point_of[old]
                self._enter_point(held)

    async def pause(self, machine: MachineId, *, deadline: float) -> None:
        self._set_paused(machine, paused=True)

    async def resume(self, machine: MachineId, *, deadline: float) -> None:
        self._set_paused(machine, paused=False)

    async def release(self, machine: MachineId) -> None:
        record = self._machines.pop(machine, None)
        if record is not None:
            del self._machine_of[Owner(record.owner)]
            self._reserved_bytes -= record.memory_bytes
            self._journal.remove(self.MACHINE, machine)

    async def drop_point(self, point: PointId) -> None:
        record = self._points.pop(point, None)
        if record is not None:
            del self._point_of[Owner(record.owner)]
            self._journal.remove(self.POINT, point)

    async def drop_baseline(self, baseline: BaselineId) -> None:
        record = self._baselines.pop(baseline, None)
        if record is not None:
            self._journal.remove(self.BASELINE, baseline)
            await self.drop_point(PointId(record.point))

    async def free_image(self, digest: str) -> bool:
        return True  # Its machines have no disks.

    def machines(self) -> tuple[Machine, ...]:
        return tuple(record.view() for record in self._machines.values())

    def machine_of(self, owner: Owner) -> Machine | None:
        machine = self._machine_of.get(owner)
        return None if machine is None else self._machines[machine].view()

    def points(self) -> tuple[Point, ...]:
        return tuple(record.view() for record in self._points.values())

    def point_of(self, owner: Owner) -> Point | None:
        point = self._point_of.get(owner)
        return None if point is None else self._points[point].view()

    def holds(self, point: PointId) -> bool:
        return point in self._points

    async def exits(self) -> AsyncIterator[MachineExit]:
        while True:
            yield await self._exits.get()  # What does not run does not end.

    def usage(self) -> Usage:
        return Usage(capacity_bytes=self._capacity_bytes, reserved_bytes=self._reserved_bytes)

    def counts(self) -> Counts:
        return Counts(
            machines=len(self._machines),
            points=len(self._points),
            point_bytes=0,
            standby=0,
            execs_running=0,
            execs_ended={},
        )

    async def memory(self, machine: MachineId, *, deadline: float) -> MemoryUse:
        if machine not in self._machines:
            raise MachineGone(f"machine {machine} does not exist")
        return MemoryUse(unique_bytes=0, shared_bytes=0)

    def _start(
        self,
        point: PointRecord,
        orders: Sequence[ChildOrder],
        limits: TreeLimits,
        hooks: Hooks,
        *,
        new_point: bool,
    ) -> ForkResult:
        """Write all of a fork down. No await: nobody sees a part of it."""
        if hooks != NO_HOOKS:
            raise HookFailed(f"{NOTHING_RUNS}: its templates have no hooks")
        self._admit(len(orders) * point.memory_bytes, limits)
        records = [
            MachineRecord(
                id=_new("m"),
                owner=order.owner,
                tree=limits.tree,
                baseline=point.baseline,
                generation=str(uuid.uuid4()),
                memory_bytes=point.memory_bytes,
            )
            for order in orders
        ]
        key = _new("b")
        begun = BegunRecord(
            machines=tuple(record.id for record in records), points=(point.id,) if new_point else ()
        )
        self._put(self.BEGUN, key, begun)
        try:
            for record in records:
                self._put(self.MACHINE, record.id, record)
            if new_point:
                self._put(self.POINT, point.id, point)
        except BaseException:
            self._take_back(key, begun)
            raise
        self._journal.remove(self.BEGUN, key)
        for record in records:
            self._enter_machine(record)
        self._reserved_bytes += len(records) * point.memory_bytes
        if new_point:
            self._enter_point(point)
        clocks = ForkClocks(pause_ms=None, fork_ms=0.0, ready_ms=0.0, began_at=time.monotonic())
        return ForkResult(
            point=point.view(), children=tuple(record.view() for record in records), clocks=clocks
        )

    def _enter_machine(self, record: MachineRecord) -> None:
        self._machines[MachineId(record.id)] = record
        self._machine_of[Owner(record.owner)] = MachineId(record.id)

    def _enter_point(self, record: PointRecord) -> None:
        self._points[PointId(record.id)] = record
        self._point_of[Owner(record.owner)] = PointId(record.id)

    def _admit(self, size_bytes: int, limits: TreeLimits) -> None:
        free = self._capacity_bytes - self._reserved_bytes
        if size_bytes > free:
            raise AtCapacity(f"{size_bytes} bytes are asked for and {free} are free; delete sessions or wait")
        if limits.memory_bytes is not None:
            held = sum(each.memory_bytes for each in self._machines.values() if each.tree == limits.tree)
            if held + size_bytes > limits.memory_bytes:
                raise MemoryLimit(f"the tree may take {limits.memory_bytes} bytes and has {held}")

    def _set_paused(self, machine: MachineId, *, paused: bool) -> None:
        noted = msgspec.structs.replace(self._there(machine), paused=paused)
        self._put(self.MACHINE, machine, noted)
        self._machines[machine] = noted

    def _there(self, machine: MachineId) -> MachineRecord:
        try:
            return self._machines[machine]
        except KeyError:
            raise MachineGone(f"machine {machine} does not run") from None

    def _take_back(self, key: str, begun: BegunRecord) -> None:
        for machine in begun.machines:
            self._journal.remove(self.MACHINE, machine)
        for point in begun.points:
            self._journal.remove(self.POINT, point)
        self._journal.remove(self.BEGUN, key)

    def _put(self, kind: str, key: str, record: msgspec.Struct) -> None:
        self._journal.put(kind, key, to_journal(record))


def _new(kind: str) -> str:
    return f"{kind}-{uuid.uuid4().hex[:12]}"
