"""Children of an instant: admitted, written down, started, and let run from it."""

from __future__ import annotations

import asyncio
import secrets
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forktree_agent.engine.contract import ChildOrder, Command, ForkFailed, MachineGone, TreeLimits
from forktree_agent.engine.microvm.admission import in_mib, machine_bytes
from forktree_agent.engine.microvm.endings import all_of
from forktree_agent.engine.microvm.guest import Identity
from forktree_agent.engine.microvm.hooks import POST_FORK, run_hook
from forktree_agent.engine.microvm.monitor import MonitorError
from forktree_agent.engine.microvm.records import Build, LayerRecord, MachineRecord, PointRecord
from forktree_agent.engine.microvm.shim import ShimError
from forktree_agent.engine.microvm.vmms import Group, Vmm, VmmOrder, tree_group
from forktree_agent.journal import JournalError

if TYPE_CHECKING:
    from forktree_agent.engine.microvm.resources import Resources
    from forktree_agent.engine.microvm.store import FileStore

ENTROPY_BYTES = 32


@dataclass(frozen=True, slots=True)
class Origin:
    """What children start from: all that their parent, or the instant, was made of."""

    baseline: str
    chain: tuple[str, ...]
    build: Build


@dataclass(frozen=True, slots=True)
class Waiting:
    """A child that waits for its device state, all of its memory but the last layer in place."""

    record: MachineRecord
    order: ChildOrder
    vmm: Vmm


@dataclass(frozen=True, slots=True)
class Born:
    """When the last child ran, and when the last had answered its identity (monotonic seconds)."""

    running_at: float
    ready_at: float


def names_for(orders: Sequence[ChildOrder]) -> tuple[str, ...]:
    return tuple(f"m-{uuid.uuid4().hex[:12]}" for _ in orders)


async def prepare_children(
    resources: Resources,
    names: Sequence[str],
    orders: Sequence[ChildOrder],
    origin: Origin,
    limits: TreeLimits,
    *,
    deadline: float,
) -> list[Waiting]:
    """Admit, write down and start the children's QEMUs, each with all of `origin`'s memory in place.

    Every reservation stands before the first process starts. After a failure the caller's batch undoes it.
    """
    each_bytes = machine_bytes(origin.build.memory_bytes)
    resources.ledger.admit(len(names) * each_bytes, limits, f"{len(names)} machines of {in_mib(each_bytes)}")
    for name in names:
        resources.ledger.reserve(name, each_bytes, limits)
    group = Group(tree_group(limits.tree), limits.memory_bytes)
    turns = asyncio.Semaphore(resources.settings.start_concurrency)

    async def prepare(name: str, order: ChildOrder) -> Waiting:
        uid = resources.vmms.take_uid()
        record = MachineRecord(
            id=name,
            owner=order.owner,
            tree=limits.tree,
            baseline=origin.baseline,
            generation=str(uuid.uuid4()),
            uid=uid,
            chain=origin.chain,
            build=origin.build,
        )
        try:
            resources.register(record)
        except JournalError:
            resources.vmms.give_back_uid(uid)  # No record says that this machine had it.
            raise
        async with turns:
            await resources.vmms.join(group, name, deadline=deadline)
            return await _start(resources, record, order, group.name, deadline=deadline)

    try:
        return await all_of(*(prepare(name, order) for name, order in zip(names, orders, strict=True)))
    except (MachineGone, MonitorError, ShimError) as err:
        # A QEMU that ended before it ran is a failed fork, not a lost machine: it never was one.
        raise ForkFailed(f"a child could not be started: {err}") from err


async def _start(
    resources: Resources, record: MachineRecord, order: ChildOrder, group: str, *, deadline: float
) -> Waiting:
    base, *layers = record.chain
    store = resources.store
    vmm = await resources.vmms.wait_for_state(
        VmmOrder(name=record.id, uid=record.uid, build=record.build, ram=store.descriptor(base), group=group),
        deadline=deadline,
    )
    async with resources.vmms.unborn(record.id):
        for name in layers:  # Oldest first: a later layer's page covers an earlier one's.
            await _map(vmm, store, store.layer(name), deadline=deadline)
    return Waiting(record, order, vmm)


async def run_children(
    resources: Resources,
    children: Sequence[Waiting],
    point: PointRecord,
    post_fork: Command | None,
    *,
    last_layer: LayerRecord | None,
    deadline: float,
) -> Born:
    """Let waiting children go on from `point`. `last_layer` is what they do not have mapped yet.

    Raises `ForkFailed` when one does not run or does not answer its identity, `HookFailed` when `post_fork`
    fails in one; the caller ends them all.
    """
    store = resources.store
    state_fd = store.descriptor(point.state_file)
    turns = asyncio.Semaphore(resources.settings.start_concurrency)

    async def run(child: Waiting) -> float:
        async with turns, resources.vmms.unborn(child.record.id):
            if last_layer is not None:
                await _map(child.vmm, store, last_layer, deadline=deadline)
            # The guest reads this before anything else when it wakes up.
            child.vmm.guest.queue_identity(_identity(child))
            await child.vmm.monitor.give_state(state_fd)
            await child.vmm.monitor.load_and_run()
            return time.monotonic()

    async def answer(child: Waiting) -> float:
        guest, generation = child.vmm.guest, child.record.generation
        async with resources.vmms.unborn(child.record.id):
            await guest.identified(generation, deadline=deadline)
            await run_hook(POST_FORK, post_fork, guest, generation, deadline=deadline)
        return time.monotonic()

    try:
        running = await all_of(*(run(child) for child in children))
        answered = await all_of(*(answer(child) for child in children))
    except (MachineGone, MonitorError, ShimError) as err:
        raise ForkFailed(f"a child did not come up: {err}") from err
    now = time.monotonic()
    return Born(max(running, default=now), max(answered, default=now))


def _identity(child: Waiting) -> Identity:
    return Identity(
        generation=child.record.generation,
        hostname=child.order.hostname,
        unix_ns=time.time_ns(),
        entropy=secrets.token_bytes(ENTROPY_BYTES),
        env=dict(child.order.env),
    )


async def _map(vmm: Vmm, store: FileStore, layer: LayerRecord, *, deadline: float) -> None:
    if layer.runs == 0:
        return
    await vmm.shim.map_layer(store.descriptor(layer.id), layer.table_offset, layer.runs, deadline=deadline)
