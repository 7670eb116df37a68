"""Children of an instant: admitted, written down, started, and let run from it."""

from __future__ import annotations

import asyncio
import secrets
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forktree_agent.engine.contract import (
    ChildOrder,
    Command,
    ForkFailed,
    MachineGone,
    TreeId,
    TreeLimits,
)
from forktree_agent.engine.microvm.admission import in_mib
from forktree_agent.engine.microvm.endings import all_of
from forktree_agent.engine.microvm.guest import Identity
from forktree_agent.engine.microvm.hooks import POST_FORK, run_hook
from forktree_agent.engine.microvm.monitor import MonitorError
from forktree_agent.engine.microvm.records import LayerRecord, MachineRecord
from forktree_agent.engine.microvm.shim import ShimError
from forktree_agent.engine.microvm.vmms import Group, Vmm, tree_group
from forktree_agent.engine.microvm.waiting import Origin, Standby, map_layer, map_layers, start_waiting
from forktree_agent.journal import JournalError

if TYPE_CHECKING:
    from forktree_agent.engine.microvm.resources import Resources

ENTROPY_BYTES = 32


@dataclass(frozen=True, slots=True)
class Waiting:
    """A child that waits for its device state, all of its memory but the last layer in place."""

    record: MachineRecord
    order: ChildOrder
    vmm: Vmm


def names_for(orders: Sequence[ChildOrder]) -> tuple[str, ...]:
    return tuple(f"m-{uuid.uuid4().hex[:12]}" for _ in orders)


async def prepare_children(
    resources: Resources,
    names: Sequence[str],
    orders: Sequence[ChildOrder],
    origin: Origin,
    limits: TreeLimits,
    *,
    state_fd: int,
    ready: Sequence[Standby] = (),
    deadline: float,
) -> list[Waiting]:
    """Admit, write down and start the children's QEMUs, each with all of `origin`'s memory in place.

    They have the file `state_fd` in hand, which need not have their state yet.
    The first `names` are those of `ready`, which only lack the newest of the layers, if any.
    Every reservation stands before the first process starts. After a failure the caller's batch undoes it.
    """
    each_bytes = origin.build.admitted_bytes
    resources.ledger.admit(len(names) * each_bytes, limits, f"{len(names)} machines of {in_mib(each_bytes)}")
    for name in names:
        resources.ledger.reserve(name, each_bytes, limits)
    group = Group(tree_group(limits.tree), limits.memory_bytes)
    turns = asyncio.Semaphore(resources.settings.start_concurrency)

    # All of them before anything is waited for: from here on nobody can drop a layer of `origin`.
    started = {standby.name: standby for standby in ready}
    records = [
        _register(resources, name, order, origin, limits.tree, standby=started.get(name))
        for name, order in zip(names, orders, strict=True)
    ]

    async def prepare(record: MachineRecord, order: ChildOrder) -> Waiting:
        async with turns:
            standby = started.get(record.id)
            if standby is not None:
                missing = record.chain[len(standby.record.chain) :]
                await map_layers(resources, standby.vmm, missing, deadline=deadline)
                vmm = standby.vmm
            else:
                await resources.vmms.join(group, record.id, deadline=deadline)
                vmm = await start_waiting(resources, record, group.name, deadline=deadline)
            async with resources.vmms.unborn(record.id):
                await vmm.monitor.give_state(state_fd)
            return Waiting(record, order, vmm)

    try:
        return await all_of(*(prepare(record, order) for record, order in zip(records, orders, strict=True)))
    except (MachineGone, MonitorError, ShimError) as err:
        # A QEMU that ended before it ran is a failed fork, not a lost machine: it never was one.
        raise ForkFailed(f"a child could not be started: {err}") from err


def _register(
    resources: Resources,
    name: str,
    order: ChildOrder,
    origin: Origin,
    tree: TreeId,
    *,
    standby: Standby | None,
) -> MachineRecord:
    uid = standby.record.uid if standby is not None else resources.vmms.take_uid()
    record = MachineRecord(
        id=name,
        owner=order.owner,
        tree=tree,
        baseline=origin.baseline,
        generation=str(uuid.uuid4()),
        uid=uid,
        chain=origin.chain,
        build=origin.build,
    )
    try:
        resources.register(record)
    except JournalError:
        if standby is None:
            resources.vmms.give_back_uid(uid)  # No record says that this machine had it.
        raise
    return record


async def run_children(
    resources: Resources, children: Sequence[Waiting], *, last_layer: LayerRecord | None, deadline: float
) -> float:
    """Let waiting children go on from the state they were given. `last_layer` is what they do not have
    mapped yet. Returns when the last one ran (monotonic seconds).

    Raises `ForkFailed` when one does not run; the caller ends them all.
    """
    store = resources.store
    turns = asyncio.Semaphore(resources.settings.run_concurrency)

    async def run(child: Waiting) -> float:
        async with turns, resources.vmms.unborn(child.record.id):
            if last_layer is not None:
                await map_layer(child.vmm, store, last_layer, deadline=deadline)
            # The guest reads this before anything else when it wakes up.
            child.vmm.guest.queue_identity(_identity(child))
            await child.vmm.monitor.load_and_run()
            return time.monotonic()

    try:
        running = await all_of(*(run(child) for child in children))
    except (MachineGone, MonitorError, ShimError) as err:
        raise ForkFailed(f"a child did not come up: {err}") from err
    finally:
        for child in children:
            child.vmm.vcpus.take_part()
    return max(running, default=time.monotonic())


async def identify_children(
    resources: Resources, children: Sequence[Waiting], post_fork: Command | None, *, deadline: float
) -> float:
    """Wait until all have taken their identity and run `post_fork`. Returns when the last had.

    Raises `ForkFailed` when one does not answer, `HookFailed` when `post_fork` fails in one; the caller ends
    them all.
    """

    async def answer(child: Waiting) -> float:
        return await answer_of(resources, child.record, child.vmm, post_fork, deadline=deadline)

    try:
        answered = await all_of(*(answer(child) for child in children))
    except (MachineGone, MonitorError, ShimError) as err:
        raise ForkFailed(f"a child did not come up: {err}") from err
    return max(answered, default=time.monotonic())


async def answer_of(
    resources: Resources, record: MachineRecord, vmm: Vmm, post_fork: Command | None, *, deadline: float
) -> float:
    """When a child that runs had answered its identity, and done `post_fork` (monotonic seconds).

    Raises `MachineGone`, `DeadlineExceeded`, `HookFailed`.
    """
    async with resources.vmms.unborn(record.id):
        await vmm.guest.identified(record.generation, deadline=deadline)
        await run_hook(POST_FORK, post_fork, vmm.guest, record.generation, deadline=deadline)
    vmm.check_network()
    return time.monotonic()


def _identity(child: Waiting) -> Identity:
    return Identity(
        generation=child.record.generation,
        hostname=child.order.hostname,
        unix_ns=time.time_ns(),
        entropy=secrets.token_bytes(ENTROPY_BYTES),
        env=dict(child.order.env),
    )
