"""Children of an instant that is held already. Nothing is stopped, and nothing of the memory is copied."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from forktree_agent.engine.contract import ChildOrder, ForkClocks, Hooks, Owner, TreeId, TreeLimits
from forktree_agent.engine.microvm.children import (
    Waiting,
    identify_children,
    names_for,
    prepare_children,
    run_children,
)
from forktree_agent.engine.microvm.records import BatchRecord, HookRecord, PointRecord, Unanswered
from forktree_agent.engine.microvm.resources import POINT_KIND, Resources
from forktree_agent.engine.microvm.waiting import Origin
from forktree_agent.typed_records import to_journal

if TYPE_CHECKING:
    from forktree_agent.engine.microvm.standby import Standbys
    from forktree_agent.engine.microvm.waiting import Standby

MILLISECONDS = 1000.0


@dataclass(frozen=True, slots=True)
class Forked:
    """An instant and its children, all of them running and, but for those whose record says so, known by
    their own identity."""

    point: PointRecord
    children: tuple[Waiting, ...]
    clocks: ForkClocks
    stopped_at: float
    """What the clocks begin with, in monotonic seconds."""


async def branch(
    resources: Resources,
    point: PointRecord,
    orders: Sequence[ChildOrder],
    limits: TreeLimits,
    *,
    standbys: Standbys,
    hooks: Hooks,
    deadline: float,
) -> Forked:
    """Start children from an instant that is held already."""
    # What waits for roots is in no tree's group, and a tree's limit holds for what is in its group.
    usable = len(orders) if point.tree is None and limits.memory_bytes is None else 0
    async with (
        _places(standbys, point.id, point.chain, orders, tree=None, usable=usable) as (ready, names),
        resources.begun(BatchRecord(machines=names)) as batch,
    ):
        forked = await _children_of(
            resources,
            point,
            names,
            orders,
            limits,
            ready=ready,
            hooks=hooks,
            answered=True,
            deadline=deadline,
        )
        batch.commit()
    return forked


async def branch_again(
    resources: Resources,
    unchanged: PointRecord,
    owner: Owner,
    orders: Sequence[ChildOrder],
    limits: TreeLimits,
    *,
    parent: str,
    standbys: Standbys,
    hooks: Hooks,
    answered: bool,
    deadline: float,
) -> Forked:
    """Fork a paused machine that has stood still since its instant `unchanged`: the same memory, as another
    instant, which lives on when that one is dropped."""
    point = PointRecord(
        id=f"p-{uuid.uuid4().hex[:12]}",
        owner=owner,
        tree=limits.tree,
        baseline=unchanged.baseline,
        chain=unchanged.chain,
        own_bytes=_state_bytes(resources, unchanged),
        build=unchanged.build,
    )
    places = _places(standbys, parent, point.chain, orders, tree=limits.tree, usable=len(orders))
    async with places as (ready, names):
        batch_record = BatchRecord(machines=names, files=(point.state_file,), points=(point.id,))
        async with resources.begun(batch_record) as batch:
            await _hold_again(resources, unchanged, point)
            forked = await _children_of(
                resources,
                point,
                names,
                orders,
                limits,
                ready=ready,
                hooks=hooks,
                answered=answered,
                deadline=deadline,
            )
            batch.commit()
    return forked


@asynccontextmanager
async def _places(
    standbys: Standbys,
    of: str,
    chain: tuple[str, ...],
    orders: Sequence[ChildOrder],
    *,
    tree: TreeId | None,
    usable: int,
) -> AsyncGenerator[tuple[Sequence[Standby], tuple[str, ...]]]:
    """At most `usable` QEMUs that wait for children of `of`, and the names of all that are to be children."""
    async with standbys.taken(of, tree, chain, usable) as ready:
        await standbys.leave_out_the_dead(ready)
        yield ready, (*(each.name for each in ready), *names_for(orders[len(ready) :]))


def _state_bytes(resources: Resources, point: PointRecord) -> int:
    """Raises `PointLost`."""
    return os.fstat(resources.store.descriptor(point.state_file)).st_size


async def _hold_again(resources: Resources, unchanged: PointRecord, point: PointRecord) -> None:
    """Write `point` down, with a device state of its own: a copy of some 10 KB.

    Raises `PointLost` where the other was dropped meanwhile.
    """
    store = resources.store
    state = os.pread(store.descriptor(unchanged.state_file), _state_bytes(resources, unchanged), 0)
    os.pwrite(store.make(point.state_file), state, 0)
    store.seal(point.state_file)
    # Before it uses its layers: undoing finds by the record which ones it is to leave.
    resources.journal.put(POINT_KIND, point.id, to_journal(point))
    store.use(point.id, point.chain)
    await store.hold(point.state_file)


async def _children_of(
    resources: Resources,
    point: PointRecord,
    names: Sequence[str],
    orders: Sequence[ChildOrder],
    limits: TreeLimits,
    *,
    ready: Sequence[Standby],
    hooks: Hooks,
    answered: bool,
    deadline: float,
) -> Forked:
    waiting = await prepare_children(
        resources,
        names,
        orders,
        Origin(point.baseline, point.chain, point.build),
        limits,
        state_fd=resources.store.descriptor(point.state_file),
        ready=ready,
        deadline=deadline,
    )
    released_at = time.monotonic()
    running_at = await run_children(resources, waiting, last_layer=None, deadline=deadline)
    children = tuple(waiting if answered else (_unheard(resources, child, hooks) for child in waiting))
    ready_at: float | None = None
    if answered:
        ready_at = await identify_children(resources, children, hooks.post, deadline=deadline)
    clocks = ForkClocks(
        pause_ms=None,
        fork_ms=(running_at - released_at) * MILLISECONDS,
        ready_ms=milliseconds(ready_at, released_at),
        began_at=released_at,
    )
    return Forked(point, children, clocks, released_at)


def _unheard(resources: Resources, child: Waiting, hooks: Hooks) -> Waiting:
    record = msgspec.structs.replace(child.record, unanswered=unanswered_of(hooks))
    resources.register(record)
    return Waiting(record, child.order, child.vmm)


def unanswered_of(hooks: Hooks) -> Unanswered:
    """What is still to come of a child that runs and was not waited for."""
    post = hooks.post
    if post is None:
        return Unanswered()
    return Unanswered(post_fork=HookRecord(argv=post.argv, timeout_seconds=post.timeout_seconds))


def milliseconds(at: float | None, since: float) -> float | None:
    return None if at is None else (at - since) * MILLISECONDS
