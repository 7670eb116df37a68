"""Copying ahead: most of a large layer while the parent still runs, so that it stands still for little.

The layer made ahead is no instant: of a page written meanwhile it has something or other. But that page
counts as written since, so the layer of the instant, a difference to it, has it as it was.
"""

from __future__ import annotations

import logging
import time
import uuid
from typing import TYPE_CHECKING

from forktree_agent.engine.contract import MachineGone, ParentLost
from forktree_agent.engine.microvm.answering import NotAnswering
from forktree_agent.engine.microvm.endings import to_the_end
from forktree_agent.engine.microvm.freezing import (
    NextLayer,
    check_budget,
    copy_running,
    room_for,
    written_bytes,
)
from forktree_agent.engine.microvm.pace import over_budget
from forktree_agent.engine.microvm.prepared import discard
from forktree_agent.engine.microvm.records import BatchRecord
from forktree_agent.engine.microvm.tracking import NO_MARK, new_mark
from forktree_agent.journal import JournalError

if TYPE_CHECKING:
    from forktree_agent.engine.contract import TreeLimits
    from forktree_agent.engine.microvm.forking import Live
    from forktree_agent.engine.microvm.resources import Resources

log = logging.getLogger(__name__)

PRECOPY_BYTES = 32 << 20
"""A layer that is expected to be larger is copied ahead. Up to here a stop takes some milliseconds; for less
another layer, and its mappings in each child, are not worth it."""
MOST_COPIES = 4
"""Of one fork, where its tree has a pause budget: a machine that writes faster than that is not caught up."""


async def copy_ahead(resources: Resources, live: Live, limits: TreeLimits, *, deadline: float) -> int:
    """Copy ahead what is worth it. Returns how many bytes the layer of the instant is then expected to need.

    What was copied is the parent's own layer from here on, whatever becomes of the fork. Raises `AtCapacity`,
    `MemoryLimit`, `PauseOverBudget`, `ParentLost`, and `NotAnswering` when the parent has to be ended.
    """
    try:
        copies = 0
        while True:
            since = live.record.mark if live.vmm.tracked else NO_MARK
            written = await written_bytes(live.vmm, since, deadline=deadline)
            size_bytes = room_for(live.vmm, written)
            # One that stands still can be copied as slowly as it likes.
            if live.record.paused or not _is_worth_it(live, written, copies, limits):
                return size_bytes
            await _copy(resources, live, size_bytes, limits)
            copies += 1
    except NotAnswering:
        raise
    except MachineGone as err:
        raise ParentLost(f"the parent ended before it was forked: {err}") from err


def _is_worth_it(live: Live, written: int, copies: int, limits: TreeLimits) -> bool:
    """Whether one copy ahead, after so many, makes the stop short enough. Raises `PauseOverBudget`."""
    vmm, budget_ms = live.vmm, limits.pause_budget_ms
    refusal = over_budget(vmm.name, vmm.pace, written, budget_ms, now=time.monotonic())
    if refusal is None:
        return copies == 0 and vmm.tracked and room_for(vmm, written) > PRECOPY_BYTES
    check_budget(vmm, 0, budget_ms)  # Whatever is copied ahead.
    if copies == MOST_COPIES or not vmm.tracked:
        raise refusal
    return True


async def _copy(resources: Resources, live: Live, size_bytes: int, limits: TreeLimits) -> None:
    name = f"layer-{uuid.uuid4().hex[:12]}"
    await discard(resources, live)
    async with resources.begun(BatchRecord(machines=(), files=(name,))) as batch:
        resources.ledger.reserve(name, size_bytes, limits)
        layer = NextLayer(
            id=name,
            fd=await resources.store.create(name),
            size_bytes=size_bytes,
            tree=limits.tree,
            since=live.record.mark,
            mark=new_mark(),
        )
        await to_the_end(_take(resources, live, layer), f"ahead-{name}")
        batch.commit()


async def _take(resources: Resources, live: Live, layer: NextLayer) -> None:
    """Copy, and write down whose it is, in one: see `forking`."""
    record = await copy_running(live.vmm, layer)
    if live.vmm.closing.is_set():
        raise MachineGone(f"machine {live.record.id} was released")
    resources.store.seal(layer.id)
    resources.store.add_layer(record, user=live.record.id)
    try:
        live.record = resources.note_dumped(live.record, record, layer.mark)
    except JournalError:
        await resources.store.leave(live.record.id, (layer.id,))  # It is in no chain.
        raise
    log.debug("copied_ahead machine=%s bytes=%d", live.record.id, record.bytes)
