"""The microVM engine: every operation of the contract, over QEMU processes that the keeper holds."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Self, TypeVar

from forktree.models.reasons import Level, Mode
from forktree_agent.engine.contract import (
    NO_HOOKS,
    Adoption,
    BakeFailed,
    Baseline,
    BaselineId,
    Capability,
    ChildOrder,
    Command,
    Counts,
    ExecReader,
    ExecResult,
    ExecState,
    ForkResult,
    Hooks,
    Machine,
    MachineExit,
    MachineGone,
    MachineId,
    MachinePaused,
    MemoryUse,
    NetworkLost,
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
from forktree_agent.engine.microvm.admission import Ledger
from forktree_agent.engine.microvm.adoption import Survivors, adopt
from forktree_agent.engine.microvm.answering import NotAnswering
from forktree_agent.engine.microvm.baking import BASELINE_KIND, bake
from forktree_agent.engine.microvm.branching import Forked, branch
from forktree_agent.engine.microvm.calm import Calm
from forktree_agent.engine.microvm.canary import find_accelerator
from forktree_agent.engine.microvm.endings import to_the_end, until
from forktree_agent.engine.microvm.forking import Live, fork
from forktree_agent.engine.microvm.hearing import Hearing
from forktree_agent.engine.microvm.host_clock import counter_kilohertz
from forktree_agent.engine.microvm.images import GuestDirectory, shape_digest
from forktree_agent.engine.microvm.merging import Merger
from forktree_agent.engine.microvm.pausing import Change, pause, resume
from forktree_agent.engine.microvm.prepared import Preparer, discard
from forktree_agent.engine.microvm.records import BaselineRecord, MachineRecord, PointRecord, disk_file
from forktree_agent.engine.microvm.resources import Resources
from forktree_agent.engine.microvm.standby import Source, Standbys
from forktree_agent.engine.microvm.store import FileStore
from forktree_agent.engine.microvm.vmms import Group, Vmms, tree_group
from forktree_agent.engine.microvm.waiting import Origin
from forktree_agent.keeper_client import CompanionExit

if TYPE_CHECKING:
    from forktree_agent.engine.microvm.arguments import Accelerator
    from forktree_agent.engine.microvm.settings import EngineSettings
    from forktree_agent.journal import Journal
    from forktree_agent.keeper_client import Keeper

log = logging.getLogger(__name__)

ENGINE_NAME = "microvm"
ADOPTED_SECONDS = 60.0
"""For a child that had not answered yet when an agent died: it does at once, or never."""
Key = TypeVar("Key")
Thing = TypeVar("Thing")


class MicroVmEngine:
    """Implements `Engine`. Leaving `running()` lets go of the machines; they run on for the next agent."""

    def __init__(self, resources: Resources, keeper: Keeper, tasks: asyncio.TaskGroup) -> None:
        self._resources = resources
        self._keeper = keeper
        self._live: dict[MachineId, Live] = {}
        self._points: dict[PointId, PointRecord] = {}
        self._baselines: dict[str, BaselineRecord] = {}
        self._baking: dict[str, asyncio.Lock] = {}
        self._baking_disks: Counter[str] = Counter()
        self._accelerator: Accelerator | None = None
        self._exits: asyncio.Queue[MachineExit | NetworkLost] = asyncio.Queue()
        self._calm = Calm()
        self._standbys = Standbys(resources, self._calm, tasks)
        self._preparer = Preparer(resources, self._live, self._calm, tasks)
        self._hearing = Hearing(resources, self._live, self._calm, tasks, self._lost)
        self._merger = Merger(resources, self._live, self._points, self._standbys, self._calm)

    @classmethod
    @asynccontextmanager
    async def running(
        cls, settings: EngineSettings, *, keeper: Keeper, journal: Journal
    ) -> AsyncGenerator[Self]:
        """The engine, until left. Raises `ImageNotFound` for an unusable guest directory."""
        guest = GuestDirectory.read(settings.guest_directory)
        version = await _qemu_version(settings.qemu_binary)
        counter_khz = await asyncio.to_thread(counter_kilohertz)
        ledger = Ledger(settings.memory_limit_bytes)
        store = FileStore(keeper, journal, ledger)
        async with asyncio.TaskGroup() as tasks:
            vmms = Vmms(settings, guest, keeper, tasks, counter_khz=counter_khz)
            engine = cls(Resources(settings, guest, version, journal, store, vmms, ledger), keeper, tasks)
            watch = tasks.create_task(engine._watch_exits(), name="machine-exits")
            ahead = [
                tasks.create_task(engine._merger.run(), name="merging"),
                tasks.create_task(engine._standbys.run(), name="standbys"),
                tasks.create_task(engine._preparer.run(), name="preparing"),
            ]
            try:
                yield engine
            finally:
                watch.cancel()
                for task in ahead:
                    task.cancel()
                await asyncio.wait(ahead)  # They use files and channels that are about to be closed.
                await engine._hearing.close()
                await engine._standbys.close()
                await engine._preparer.close()
                vmms.close()
                store.close()

    async def adopt(self, *, deadline: float) -> Adoption:
        await self._resources.vmms.raise_wall(deadline=deadline)
        survivors: Survivors = await adopt(self._resources, self._keeper, deadline=deadline)
        for record, vmm in survivors.machines:
            live = self._live[MachineId(record.id)] = Live(record, vmm)
            if vmm.network_lost is not None:
                self._exits.put_nowait(_network_lost(record, vmm.network_lost))
            if record.unanswered is not None:
                self._hearing.adopted(live, deadline=asyncio.get_running_loop().time() + ADOPTED_SECONDS)
        self._points.update({PointId(record.id): record for record in survivors.points})
        self._baselines = {record.shape_digest: record for record in survivors.baselines}
        for ended in survivors.exits:
            self._exits.put_nowait(ended)
        return Adoption(
            machines=self.machines(),
            points=self.points(),
            baselines=tuple(record.view() for record in survivors.baselines),
        )

    async def probe(self, *, deadline: float) -> Capability:
        found = await find_accelerator(self, self._resources, deadline=deadline)
        self._accelerator = found.accelerator
        return Capability(
            passed=found.passed,
            engine=ENGINE_NAME,
            accelerator=found.accelerator,
            reason=found.reason,
            message=found.message,
            boot_ms=found.boot_ms,
            fork_ms=found.fork_ms,
            egress=self._resources.vmms.no_egress is None,
        )

    async def bake(self, shape: Shape, *, deadline: float) -> Baseline:
        if self._accelerator is None:
            raise BakeFailed("this node has not proved yet that it can run machines")
        return await self.bake_with(shape, self._accelerator, deadline=deadline)

    async def bake_with(self, shape: Shape, accelerator: Accelerator, *, deadline: float) -> Baseline:
        """`bake` under an accelerator that need not be proved: the canary's own way in."""
        digest = shape_digest(shape, accelerator)
        lock = self._baking.setdefault(digest, asyncio.Lock())
        async with until(deadline, f"another bake of {shape.image}"):
            await lock.acquire()
        try:
            baseline = self._baselines.get(digest)
            if baseline is None:
                # Watches the deadline itself, and says what it was waiting for.
                with self._baking_disk(shape):
                    baseline, point = await bake(
                        self._resources, shape, digest, accelerator, deadline=deadline
                    )
                    self._baselines[digest] = baseline
                    self._points[PointId(point.id)] = point
            return baseline.view()
        finally:
            lock.release()

    @contextmanager
    def _baking_disk(self, shape: Shape) -> Generator[None]:
        """The disk of `shape` is in use as long as this is held."""
        digests = () if shape.disk is None else (shape.disk.digest,)
        self._baking_disks.update(digests)
        try:
            yield
        finally:
            self._baking_disks.subtract(digests)
            self._baking_disks += Counter()  # Without those that have come to zero.

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
        live = self._live.get(parent)
        if live is None:
            raise ParentLost(f"machine {parent} does not run")
        try:
            await self._hearing.answered(live, deadline=deadline)
        except MachineGone as err:
            raise ParentLost(f"machine {parent} does not run: {err}") from err
        try:
            with self._calm.broken():
                async with until(deadline, "the fork"), live.forking:
                    result = await self._fork(
                        live, owner, orders, limits, hooks, answered=answered, deadline=deadline
                    )
        finally:  # Also of a fork that failed its parent can have a layer more.
            self._merger.consider((parent,), limits)
            self._preparer.consider(parent, limits)
        self._keep_ready(parent, len(orders), limits)
        self._merger.consider((child.id for child in result.children), limits)
        return result

    async def _fork(
        self,
        live: Live,
        owner: Owner,
        orders: Sequence[ChildOrder],
        limits: TreeLimits,
        hooks: Hooks,
        *,
        answered: bool,
        deadline: float,
    ) -> ForkResult:
        try:
            forked = await fork(
                self._resources,
                live,
                owner,
                orders,
                limits,
                unchanged=None if live.unchanged_since is None else self._points.get(live.unchanged_since),
                standbys=self._standbys,
                hooks=hooks,
                answered=answered,
                deadline=deadline,
            )
        except NotAnswering as err:
            await to_the_end(self._give_up(live, err), f"give-up-{live.record.id}")
            raise ParentLost(f"the parent was lost while it was forked: {err}") from err
        result = self._enter(forked)
        if live.record.paused:
            live.unchanged_since = result.point.id
        for child in () if answered else result.children:
            self._hearing.born(
                self._live[child.id], hooks.post, stopped_at=forked.stopped_at, deadline=deadline
            )
        return result

    async def branch(
        self,
        point: PointId,
        orders: Sequence[ChildOrder],
        limits: TreeLimits,
        *,
        hooks: Hooks = NO_HOOKS,
        deadline: float,
    ) -> ForkResult:
        record = self._points.get(point)
        if record is None:
            raise PointLost(f"instant {point} is not held any more")
        with self._calm.broken():
            async with until(deadline, "starting children"):
                return self._enter(
                    await branch(
                        self._resources,
                        record,
                        orders,
                        limits,
                        standbys=self._standbys,
                        hooks=hooks,
                        deadline=deadline,
                    )
                )

    def keep_ready(self, baseline: BaselineId, count: int) -> None:
        record = next((each for each in self._baselines.values() if each.id == baseline), None)
        if record is None:
            return
        point = PointId(record.point)
        source = Source(
            origin=lambda: _origin(self._points.get(point)), group=Group(f"ready-{point}", None), limits=None
        )
        self._standbys.keep(point, source, min(count, self._resources.settings.standbys_per_node))

    def in_wait(self) -> frozenset[str]:
        """Names, with the keeper, of the VMMs that wait for a fork."""
        return self._standbys.names()

    def _keep_ready(self, parent: MachineId, children: int, limits: TreeLimits) -> None:
        """As many as the last fork had children may be needed for the next."""
        size = min(children, self._resources.settings.standbys_per_parent)
        if size == 0 or parent not in self._live:
            return

        def origin() -> Origin | None:
            live = self._live.get(parent)
            return _origin(live.record if live is not None else None)

        group = Group(tree_group(limits.tree), limits.memory_bytes)
        self._standbys.keep(parent, Source(origin=origin, group=group, limits=limits), size)

    async def exec(self, machine: MachineId, command: Command, *, deadline: float) -> ExecResult:
        live = await self._moving(machine, deadline=deadline)
        return await live.vmm.guest.exec(command, live.record.generation, deadline=deadline)

    async def begin(self, machine: MachineId, command: Command, *, deadline: float) -> str:
        live = await self._moving(machine, deadline=deadline)
        guest = live.vmm.guest
        exec_id = guest.new_id(command)
        await guest.kept.begin(command, exec_id, live.record.generation, deadline=deadline)
        return exec_id

    @asynccontextmanager
    async def streaming(
        self, machine: MachineId, command: Command, *, deadline: float
    ) -> AsyncGenerator[ExecReader]:
        live = await self._moving(machine, deadline=deadline)
        guest = live.vmm.guest
        begun = guest.kept.streaming(
            command, guest.new_id(command), live.record.generation, deadline=deadline
        )
        async with begun as reader:
            yield reader

    @asynccontextmanager
    async def reading(
        self, machine: MachineId, exec_id: str, *, stdout_offset: int, stderr_offset: int, deadline: float
    ) -> AsyncGenerator[ExecReader]:
        guest = (await self._heard(machine, deadline=deadline)).vmm.guest
        guest.must_be_kept(exec_id)
        found = guest.kept.reading(
            exec_id, stdout_offset=stdout_offset, stderr_offset=stderr_offset, deadline=deadline
        )
        async with found as reader:
            yield reader

    async def write(
        self, machine: MachineId, exec_id: str, data: bytes, *, end: bool, deadline: float
    ) -> None:
        guest = (await self._moving(machine, deadline=deadline)).vmm.guest
        guest.must_be_kept(exec_id)
        await guest.kept.write(exec_id, data, end=end, deadline=deadline)

    async def resize(self, machine: MachineId, exec_id: str, size: TerminalSize) -> None:
        self._running(machine).vmm.guest.kept.resize(exec_id, size)

    async def kill_exec(self, machine: MachineId, exec_id: str, *, deadline: float) -> bool:
        live = await self._moving(machine, deadline=deadline)
        return await live.vmm.guest.kill(exec_id, deadline=deadline)

    def execs(self, machine: MachineId) -> tuple[ExecState, ...]:
        return self._running(machine).vmm.guest.execs()

    async def execs_told(self, machine: MachineId, *, deadline: float) -> tuple[ExecState, ...]:
        guest = (await self._heard(machine, deadline=deadline)).vmm.guest
        await guest.kept.told(deadline=deadline)
        return guest.execs()

    async def attach(self, machine: MachineId, exec_id: str, *, deadline: float) -> ExecResult:
        live = await self._heard(machine, deadline=deadline)
        return await live.vmm.guest.attach(exec_id, deadline=deadline)

    async def pause(self, machine: MachineId, *, deadline: float) -> None:
        await self._set_paused(machine, pause, "pausing", deadline=deadline)

    async def resume(self, machine: MachineId, *, deadline: float) -> None:
        await self._set_paused(machine, resume, "resuming", deadline=deadline)

    async def _set_paused(self, machine: MachineId, change: Change, doing: str, *, deadline: float) -> None:
        live = await self._heard(machine, deadline=deadline)
        async with until(deadline, f"{doing} {machine}"), live.forking:
            self._running(machine)  # It may have been released meanwhile, and its record must stay away.
            try:
                await to_the_end(change(self._resources, live, deadline=deadline), f"{doing}-{machine}")
            except NotAnswering as err:
                await to_the_end(self._give_up(live, err), f"give-up-{machine}")
                raise

    async def answered(self, machine: MachineId, *, deadline: float) -> float | None:
        return await self._hearing.answered(self._running(machine), deadline=deadline)

    def give(self, owners: Mapping[Owner, Owner]) -> None:
        for live in self._live.values():
            new = owners.get(Owner(live.record.owner))
            if new is not None:
                live.record = self._resources.note_owner(live.record, new)
        for point, record in self._points.items():
            new = owners.get(Owner(record.owner))
            if new is not None:
                self._points[point] = self._resources.note_owner(record, new)

    async def _heard(self, machine: MachineId, *, deadline: float) -> Live:
        """A machine, once it has answered its identity: nothing may be asked of it before."""
        live = self._running(machine)
        await self._hearing.answered(live, deadline=deadline)
        return live

    async def _moving(self, machine: MachineId, *, deadline: float) -> Live:
        """The same, and it does not stand still."""
        live = await self._heard(machine, deadline=deadline)
        if live.record.paused:
            raise MachinePaused(f"machine {machine} is paused, and nothing can be run in it")
        return live

    def _running(self, machine: MachineId) -> Live:
        live = self._live.get(machine)
        if live is None:
            raise MachineGone(f"machine {machine} does not run")
        return live

    async def release(self, machine: MachineId) -> None:
        # Out of the table first: whoever sees its process end from here on knows that it was meant to.
        with _taken_from(self._live, machine) as live:
            await to_the_end(self._end(machine, live), f"release-{machine}")

    async def _end(self, machine: str, live: Live | None) -> None:
        """End a machine that is out of the table, and all that was made ahead of its next fork."""
        await asyncio.gather(self._standbys.end(machine), self._resources.end_machine(machine))
        if live is not None:
            await discard(self._resources, live)

    async def drop_point(self, point: PointId) -> None:
        with _taken_from(self._points, point):
            await to_the_end(self._standbys.end(point), f"end-ready-{point}")
            await to_the_end(self._resources.end_point(point), f"drop-{point}")

    async def drop_baseline(self, baseline: BaselineId) -> None:
        for digest, record in list(self._baselines.items()):
            if record.id == baseline:
                del self._baselines[digest]
                self._resources.journal.remove(BASELINE_KIND, digest)
                await self.drop_point(PointId(record.point))

    async def free_image(self, digest: str) -> bool:
        held = (record.build.image_sha256 for record in self._points.values())
        if digest in self._baking_disks or digest in self._resources.vmms.disks() or digest in held:
            return False
        await self._resources.store.drop(disk_file(digest))
        return True

    def machines(self) -> tuple[Machine, ...]:
        return tuple(live.record.view(Mode.FORK, Level.MEMORY) for live in self._live.values())

    def machine_of(self, owner: Owner) -> Machine | None:
        live = next((each for each in self._live.values() if each.record.owner == owner), None)
        return None if live is None else live.record.view(Mode.FORK, Level.MEMORY)

    def points(self) -> tuple[Point, ...]:
        return tuple(record.view() for record in self._points.values())

    def point_of(self, owner: Owner) -> Point | None:
        record = next((each for each in self._points.values() if each.owner == owner), None)
        return None if record is None else record.view()

    def holds(self, point: PointId) -> bool:
        return point in self._points

    async def exits(self) -> AsyncIterator[MachineExit | NetworkLost]:
        while True:
            yield await self._exits.get()

    def usage(self) -> Usage:
        return self._resources.ledger.usage()

    def counts(self) -> Counts:
        return Counts(
            machines=len(self._live),
            points=len(self._points),
            point_bytes=sum(record.own_bytes for record in self._points.values()),
            standby=len(self.in_wait()),
            execs_running=sum(live.vmm.guest.running_execs() for live in self._live.values()),
            execs_ended=dict(self._resources.vmms.exec_tally),
        )

    async def memory(self, machine: MachineId, *, deadline: float) -> MemoryUse:
        self._running(machine)
        async with until(deadline, f"weighing {machine}"):
            unique_bytes = await self._resources.vmms.own_bytes(machine)
        store, shared_bytes = self._resources.store, 0
        nobody = {machine, *self.in_wait()}  # What waits for a fork of it goes with it.
        for layer in self._running(machine).record.chain:
            if store.users(layer) <= nobody:
                unique_bytes += store.taken_bytes(layer)
            else:
                shared_bytes += store.taken_bytes(layer)
        return MemoryUse(unique_bytes=unique_bytes, shared_bytes=shared_bytes)

    def _enter(self, forked: Forked) -> ForkResult:
        """Take a finished fork into the tables. No await: what is committed is known at once."""
        self._points[PointId(forked.point.id)] = forked.point
        for child in forked.children:
            self._live[MachineId(child.record.id)] = Live(child.record, child.vmm)
        return ForkResult(
            point=forked.point.view(),
            children=tuple(child.record.view(Mode.FORK, Level.MEMORY) for child in forked.children),
            clocks=forked.clocks,
        )

    async def _watch_exits(self) -> None:
        async for ended in self._keeper.exits():
            if isinstance(ended, CompanionExit):
                self._lose_network(ended)
                continue
            live = self._live.pop(MachineId(ended.machine), None)
            if live is None:  # Released, or not born yet: whoever starts or ends it sees that for itself.
                self._standbys.lost(ended.machine)
                continue
            await self._lost(live, await self._resources.vmms.autopsy(ended.machine))

    def _lose_network(self, ended: CompanionExit) -> None:
        """A machine that nobody has yet is not used; any other runs on, and whoever listens is told."""
        self._resources.vmms.lose_network(ended.machine, ended.text)
        live = self._live.get(MachineId(ended.machine))
        if live is None:
            self._standbys.lost(ended.machine)
        else:
            self._exits.put_nowait(_network_lost(live.record, ended.text))

    async def _give_up(self, live: Live, err: NotAnswering) -> None:
        """End a machine whose QEMU stands still. It is lost like one that ended by itself."""
        if self._live.pop(MachineId(live.record.id), None) is None:
            return  # Released or dead meanwhile.
        said = self._resources.vmms.last_words(live.record.id)
        await self._lost(live, f"{err} and was ended" + (f"; it said: {said}" if said else ""))

    async def _lost(self, live: Live, text: str) -> None:
        """Free what is left of a machine that is out of the table, and tell whoever listens."""
        record = live.record
        log.error("machine_lost machine=%s owner=%s text=%r", record.id, record.owner, text)
        await self._end(record.id, live)
        self._exits.put_nowait(
            MachineExit(machine=MachineId(record.id), owner=Owner(record.owner), text=text)
        )


def _network_lost(record: MachineRecord, text: str) -> NetworkLost:
    return NetworkLost(machine=MachineId(record.id), owner=Owner(record.owner), text=text)


def _origin(record: MachineRecord | PointRecord | None) -> Origin | None:
    return None if record is None else Origin(record.baseline, record.chain, record.build)


@contextmanager
def _taken_from(table: dict[Key, Thing], key: Key) -> Generator[Thing | None]:
    """Out of the table at once; back again where its end fails: whoever asks once more must find it."""
    thing = table.pop(key, None)
    try:
        yield thing
    except Exception:
        if thing is not None:
            table[key] = thing
        raise


async def _qemu_version(binary: str) -> str:
    """The first line of `--version`. Raises `BakeFailed` where there is no QEMU."""
    try:
        process = await asyncio.create_subprocess_exec(
            binary, "--version", stdout=asyncio.subprocess.PIPE, stdin=asyncio.subprocess.DEVNULL
        )
        output, _ = await process.communicate()
    except OSError as err:
        raise BakeFailed(f"{binary} cannot be started ({err.strerror}); install qemu-system-x86") from err
    return output.decode(errors="replace").partition("\n")[0].strip()
