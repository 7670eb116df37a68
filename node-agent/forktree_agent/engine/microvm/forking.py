"""The fork: freeze an instant of a running machine and start children from it, all or nothing."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from forktree_agent.engine.contract import (
    ChildOrder,
    ForkClocks,
    HookFailed,
    Hooks,
    MachineGone,
    Owner,
    ParentLost,
    TreeLimits,
)
from forktree_agent.engine.microvm.answering import NotAnswering
from forktree_agent.engine.microvm.children import Origin, Waiting, names_for, prepare_children, run_children
from forktree_agent.engine.microvm.freezing import Instant, expected_bytes, freeze
from forktree_agent.engine.microvm.hooks import PRE_FORK, run_hook
from forktree_agent.engine.microvm.records import BatchRecord, MachineRecord, PointRecord
from forktree_agent.engine.microvm.resources import POINT_KIND, Resources
from forktree_agent.typed_records import to_journal

if TYPE_CHECKING:
    from forktree_agent.engine.microvm.vmms import Vmm

MILLISECONDS = 1000.0


@dataclass(slots=True)
class Live:
    """A machine that answered its identity, and its turn to be forked, paused or resumed: one at a time."""

    record: MachineRecord
    vmm: Vmm
    forking: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass(frozen=True, slots=True)
class Forked:
    """An instant and its children, all of them running and known by their own identity."""

    point: PointRecord
    children: tuple[Waiting, ...]
    clocks: ForkClocks


async def fork(
    resources: Resources,
    live: Live,
    owner: Owner,
    orders: Sequence[ChildOrder],
    limits: TreeLimits,
    *,
    hooks: Hooks,
    deadline: float,
) -> Forked:
    """Fork a machine. The caller sees to it that one parent is frozen by one fork at a time.

    Raises what `Engine.fork` promises, and `NotAnswering` when the parent has to be ended.
    """
    parent, vmm = live.record, live.vmm
    if parent.paused and hooks.pre is not None:
        raise HookFailed(f"the parent is paused and cannot run the {PRE_FORK} hook: resume it to fork it")
    try:
        size_bytes = await expected_bytes(vmm, deadline=deadline)
    except NotAnswering:
        raise
    except MachineGone as err:
        raise ParentLost(f"the parent ended before it was forked: {err}") from err
    point_id, layer = f"p-{uuid.uuid4().hex[:12]}", f"layer-{uuid.uuid4().hex[:12]}"
    point = PointRecord(
        id=point_id,
        owner=owner,
        tree=limits.tree,
        baseline=parent.baseline,
        chain=(*parent.chain, layer),
        own_bytes=size_bytes,
        build=parent.build,
    )
    names = names_for(orders)
    batch_record = BatchRecord(machines=names, files=(layer, point.state_file), points=(point_id,))
    async with resources.begun(batch_record) as batch:
        resources.ledger.reserve(point_id, size_bytes, limits)
        layer_fd = await resources.store.create(layer)
        state_fd = await resources.store.create(point.state_file)
        waiting = await prepare_children(
            resources,
            names,
            orders,
            Origin(parent.baseline, parent.chain, parent.build),
            limits,
            deadline=deadline,
        )
        await _pre_fork(live, hooks, deadline=deadline)
        instant = await freeze(vmm, layer, layer_fd, state_fd, size_bytes, paused=parent.paused)
        point = _hold(resources, point, instant)
        children = tuple(_with_layer(resources, child, layer) for child in waiting)
        born = await run_children(
            resources, children, point, hooks.post, last_layer=instant.layer, deadline=deadline
        )
        batch.commit()
    paused = instant.running_at - instant.stopped_at
    return Forked(
        point,
        children,
        ForkClocks(
            pause_ms=None if parent.paused else paused * MILLISECONDS,
            fork_ms=(born.running_at - instant.stopped_at if children else paused) * MILLISECONDS,
            ready_ms=(born.ready_at - instant.stopped_at if children else paused) * MILLISECONDS,
        ),
    )


async def branch(
    resources: Resources,
    point: PointRecord,
    orders: Sequence[ChildOrder],
    limits: TreeLimits,
    *,
    hooks: Hooks,
    deadline: float,
) -> Forked:
    """Start children from an instant that is held already. Nothing is stopped."""
    names = names_for(orders)
    async with resources.begun(BatchRecord(machines=names)) as batch:
        origin = Origin(point.baseline, point.chain, point.build)
        children = await prepare_children(resources, names, orders, origin, limits, deadline=deadline)
        released_at = time.monotonic()
        born = await run_children(resources, children, point, hooks.post, last_layer=None, deadline=deadline)
        batch.commit()
    return Forked(
        point,
        tuple(children),
        ForkClocks(
            pause_ms=None,
            fork_ms=(born.running_at - released_at) * MILLISECONDS,
            ready_ms=(born.ready_at - released_at) * MILLISECONDS,
        ),
    )


async def _pre_fork(live: Live, hooks: Hooks, *, deadline: float) -> None:
    try:
        await run_hook(PRE_FORK, hooks.pre, live.vmm.guest, live.record.generation, deadline=deadline)
    except MachineGone as err:
        raise ParentLost(f"the parent ended before it was forked: {err}") from err


def _hold(resources: Resources, point: PointRecord, instant: Instant) -> PointRecord:
    """Make the frozen instant immutable and write it down, with what it really takes."""
    layer = instant.layer
    resources.store.seal(layer.id)
    resources.store.seal(point.state_file)
    held = point.sized(layer.bytes)
    # Before it uses its layers: undoing finds by the record which ones it is to leave.
    resources.journal.put(POINT_KIND, held.id, to_journal(held))
    resources.store.add_layer(layer, user=held.id)
    resources.store.use(held.id, held.chain)
    resources.ledger.record(held.id, held.own_bytes, held.tree)
    return held


def _with_layer(resources: Resources, child: Waiting, layer: str) -> Waiting:
    """The child as it will be: born of the instant that was just frozen."""
    record = child.record.grown(layer)
    resources.register(record)
    return Waiting(record, child.order, child.vmm)
