"""The fork: freeze an instant of a running machine and start children from it, all or nothing."""

from __future__ import annotations

import asyncio
import itertools
import os
import uuid
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from forktree_agent.engine.contract import (
    ChildOrder,
    ForkClocks,
    HookFailed,
    Hooks,
    MachineGone,
    Owner,
    ParentLost,
    PointId,
    TreeLimits,
)
from forktree_agent.engine.microvm.answering import NotAnswering
from forktree_agent.engine.microvm.branching import (
    MILLISECONDS,
    Forked,
    branch_again,
    milliseconds,
    unanswered_of,
)
from forktree_agent.engine.microvm.children import (
    Waiting,
    identify_children,
    names_for,
    prepare_children,
    run_children,
)
from forktree_agent.engine.microvm.endings import both, to_the_end
from forktree_agent.engine.microvm.freezing import PREPARE_EXTRA_BYTES, Instant, NextLayer, freeze
from forktree_agent.engine.microvm.hooks import PRE_FORK, run_hook
from forktree_agent.engine.microvm.precopying import copy_ahead
from forktree_agent.engine.microvm.prepared import Ahead, discard
from forktree_agent.engine.microvm.records import (
    BatchRecord,
    LayerRecord,
    MachineRecord,
    PointRecord,
    Unanswered,
)
from forktree_agent.engine.microvm.resources import POINT_KIND, Resources
from forktree_agent.engine.microvm.tracking import NO_MARK, new_mark
from forktree_agent.engine.microvm.waiting import Origin
from forktree_agent.typed_records import to_journal

if TYPE_CHECKING:
    from forktree_agent.engine.microvm.standby import Standbys
    from forktree_agent.engine.microvm.store import FileStore
    from forktree_agent.engine.microvm.vmms import Vmm


@dataclass(slots=True)
class Live:
    """A machine that answered its identity, and its turn to be forked, paused or resumed: one at a time."""

    record: MachineRecord
    vmm: Vmm
    forking: asyncio.Lock = field(default_factory=asyncio.Lock)
    ahead: Ahead = field(default_factory=Ahead)
    answering: asyncio.Future[float | None] | None = None
    """Of one whose answer its fork did not wait for: when it came; None: it was heard by then."""
    unchanged_since: PointId | None = None
    """The instant of its last fork, as long as it has stood still since before that."""


@dataclass(frozen=True, slots=True)
class Held:
    """An instant that is written down, and its children; the last ran at `running_at` (monotonic seconds)."""

    instant: Instant
    point: PointRecord
    children: tuple[Waiting, ...]
    running_at: float


async def fork(
    resources: Resources,
    live: Live,
    owner: Owner,
    orders: Sequence[ChildOrder],
    limits: TreeLimits,
    *,
    unchanged: PointRecord | None,
    standbys: Standbys,
    hooks: Hooks,
    answered: bool,
    deadline: float,
) -> Forked:
    """Fork a machine. `unchanged` is an instant since which it has stood still, if there is one.

    The caller sees to it that one parent is frozen by one fork at a time. Raises what `Engine.fork` promises,
    and `NotAnswering` when the parent has to be ended.
    """
    if live.record.paused and hooks.pre is not None:
        raise HookFailed(f"the parent is paused and cannot run the {PRE_FORK} hook: resume it to fork it")
    if unchanged is not None:
        return await branch_again(
            resources,
            unchanged,
            owner,
            orders,
            limits,
            parent=live.record.id,
            standbys=standbys,
            hooks=hooks,
            answered=answered,
            deadline=deadline,
        )
    size_bytes = await copy_ahead(resources, live, limits, deadline=deadline)
    parent = live.record
    prepared = live.ahead.fitting(size_bytes - PREPARE_EXTRA_BYTES)
    layer = prepared.id if prepared is not None else f"layer-{uuid.uuid4().hex[:12]}"
    point = PointRecord(
        id=f"p-{uuid.uuid4().hex[:12]}",
        owner=owner,
        tree=limits.tree,
        baseline=parent.baseline,
        chain=(*parent.chain, layer),
        own_bytes=size_bytes,
        build=parent.build,
    )
    async with standbys.taken(parent.id, limits.tree, parent.chain, len(orders)) as ready:
        await standbys.leave_out_the_dead(ready)
        names = (*(each.name for each in ready), *names_for(orders[len(ready) :]))
        batch_record = BatchRecord(machines=names, files=(layer, point.state_file), points=(point.id,))
        async with resources.begun(batch_record) as batch:
            next_layer = await _next_layer(resources, live, layer, size_bytes, limits)
            state_fd = resources.store.make(point.state_file)

            async def prepare() -> list[Waiting]:
                waiting, _ = await both(
                    prepare_children(
                        resources,
                        names,
                        orders,
                        Origin(parent.baseline, parent.chain, parent.build),
                        limits,
                        state_fd=state_fd,
                        ready=ready,
                        deadline=deadline,
                    ),
                    resources.store.hold(point.state_file),
                )
                await _pre_fork(live, hooks, deadline=deadline)
                return waiting

            held = await _freeze_and_run(
                resources,
                live,
                point,
                next_layer,
                prepare=prepare(),
                state_fd=state_fd,
                budget_ms=limits.pause_budget_ms,
                deadline=deadline,
            )
            instant, point = held.instant, held.point
            unanswered = None if answered else unanswered_of(hooks)
            children = tuple(_with_layer(resources, child, layer, unanswered) for child in held.children)
            ready_at: float | None = None
            if answered:
                ready_at = await identify_children(resources, children, hooks.post, deadline=deadline)
            batch.commit()
    paused = instant.running_at - instant.stopped_at
    return Forked(
        point,
        children,
        ForkClocks(
            pause_ms=None if parent.paused else paused * MILLISECONDS,
            fork_ms=(held.running_at - instant.stopped_at if children else paused) * MILLISECONDS,
            ready_ms=milliseconds(ready_at, instant.stopped_at) if children else paused * MILLISECONDS,
            began_at=instant.stopped_at,
            copied_ms=(
                (instant.copied[0] - instant.stopped_at) * MILLISECONDS,
                (instant.copied[1] - instant.stopped_at) * MILLISECONDS,
            ),
        ),
        instant.stopped_at,
    )


async def _next_layer(
    resources: Resources, live: Live, layer: str, size_bytes: int, limits: TreeLimits
) -> NextLayer:
    """The file `layer` for the coming dump: the one that was prepared, if it is that, or a new one."""
    prepared = live.ahead.layer if live.ahead.layer is not None and live.ahead.layer.id == layer else None
    if prepared is not None:
        live.ahead.layer = None
        size_bytes = max(size_bytes, prepared.size_bytes)
        resources.ledger.free(layer)
    else:
        await discard(resources, live)
    resources.ledger.reserve(layer, size_bytes, limits)
    tracked = live.vmm.tracked
    return NextLayer(
        id=layer,
        fd=prepared.fd if prepared is not None else await resources.store.create(layer),
        size_bytes=size_bytes,
        tree=limits.tree,
        since=live.record.mark if tracked else NO_MARK,
        mark=new_mark() if tracked else NO_MARK,
        prepared=prepared is not None,
    )


async def _pre_fork(live: Live, hooks: Hooks, *, deadline: float) -> None:
    try:
        await run_hook(PRE_FORK, hooks.pre, live.vmm.guest, live.record.generation, deadline=deadline)
    except MachineGone as err:
        raise ParentLost(f"the parent ended before it was forked: {err}") from err


async def _freeze_and_run(
    resources: Resources,
    live: Live,
    point: PointRecord,
    layer: NextLayer,
    *,
    prepare: Coroutine[Any, Any, list[Waiting]],
    state_fd: int,
    budget_ms: float | None,
    deadline: float,
) -> Held:
    """Have the children wait, which `prepare` does, and the parent ready; then freeze the parent, hold the
    instant, and beside that have the children run from it.

    The children do not wait until the instant is sealed and written down: should that fail, they are undone
    with all that the fork began.
    """
    frozen: asyncio.Future[LayerRecord] = asyncio.get_running_loop().create_future()

    async def hold() -> tuple[Instant, PointRecord]:
        # Both in one: a layer that is in no record would cost the next fork a full copy.
        instant = await freeze(
            live.vmm,
            layer,
            state_fd,
            frozen,
            after=preparing,
            paused=live.record.paused,
            budget_ms=budget_ms,
            deadline=deadline,
        )
        live.ahead.taken.append(instant.layer.bytes)
        return instant, _hold(resources, live, point, instant, layer.mark)

    async def run() -> float:
        last_layer = await frozen
        children = preparing.result()
        return await run_children(resources, children, last_layer=last_layer, deadline=deadline)

    try:
        async with asyncio.TaskGroup() as tasks:
            preparing = tasks.create_task(prepare)
            holding = tasks.create_task(to_the_end(hold(), f"hold-{point.id}"))
            running = tasks.create_task(run())
    except BaseExceptionGroup as failed:
        # One that means that the parent has to be ended must not hide behind another.
        raise next(
            (each for each in failed.exceptions if isinstance(each, NotAnswering)), failed.exceptions[0]
        ) from failed
    instant, held = holding.result()
    return Held(instant, held, tuple(preparing.result()), running.result())


def _hold(resources: Resources, live: Live, point: PointRecord, instant: Instant, mark: int) -> PointRecord:
    """Make the frozen instant immutable and write it down, with what it really takes."""
    resources.store.seal(instant.layer.id)
    resources.store.seal(point.state_file)
    state_bytes = os.fstat(resources.store.descriptor(point.state_file)).st_size
    ahead_bytes = _copied_ahead(resources.store, live.record.chain)
    held = point.sized(ahead_bytes + instant.layer.bytes + state_bytes)
    # Before it uses its layers: undoing finds by the record which ones it is to leave.
    resources.journal.put(POINT_KIND, held.id, to_journal(held))
    resources.store.add_layer(instant.layer, user=held.id)
    if mark != NO_MARK and not live.vmm.closing.is_set():
        # The next layer is a difference to this one, whatever becomes of this fork.
        live.record = resources.note_dumped(live.record, instant.layer, mark)
    resources.store.use(held.id, held.chain)
    return held


def _copied_ahead(store: FileStore, chain: Sequence[str]) -> int:
    """What was copied of a parent for the instant that comes next, also by a fork before that then failed."""
    layers = (store.layer(name) for name in reversed(chain))
    return sum(layer.bytes for layer in itertools.takewhile(lambda layer: layer.ahead, layers))


def _with_layer(resources: Resources, child: Waiting, layer: str, unanswered: Unanswered | None) -> Waiting:
    """The child as it will be: born of the instant that was just frozen."""
    record = msgspec.structs.replace(child.record.grown(layer), unanswered=unanswered)
    resources.register(record)
    return Waiting(record, child.order, child.vmm)
