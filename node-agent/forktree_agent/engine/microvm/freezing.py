"""Freezing: copy what is a running machine's own, and its device state, at one instant."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forktree_agent.engine.contract import ForkFailed, MachineGone, ParentLost
from forktree_agent.engine.microvm.answering import NotAnswering
from forktree_agent.engine.microvm.endings import to_the_end
from forktree_agent.engine.microvm.layers import PAGE_BYTES
from forktree_agent.engine.microvm.monitor import MonitorError
from forktree_agent.engine.microvm.records import LayerRecord
from forktree_agent.engine.microvm.shim import ShimError

if TYPE_CHECKING:
    from forktree_agent.engine.microvm.vmms import Vmm

GAP_PAGES = 4
"""Clean pages copied to join two runs: a page costs the parent 0.4-0.9 us, a run costs each child 4.4 us."""
FREEZE_SECONDS = 600.0
"""A freeze takes milliseconds. Each command has a time of its own; this is for all that the shim does."""
PREPARE_MARGIN = 1.25
PREPARE_EXTRA_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Instant:
    """A frozen moment of a parent, in seconds of the monotonic clock."""

    layer: LayerRecord
    stopped_at: float
    running_at: float


async def expected_bytes(parent: Vmm, *, deadline: float) -> int:
    """How much a freeze of `parent` is going to copy: what is private to it now, and what it may add."""
    stat = await parent.answering.to(parent.shim.stat(deadline=deadline), "the shim's STAT")
    private = stat.private_pages * PAGE_BYTES
    return min(parent.build.memory_bytes, int(private * PREPARE_MARGIN) + PREPARE_EXTRA_BYTES)


async def freeze(
    parent: Vmm, layer_id: str, layer_fd: int, state_fd: int, size_bytes: int, *, paused: bool
) -> Instant:
    """Copy what is the parent's own, and its device state, at one instant. Afterwards it runs again, unless
    it is meant to stand still.

    Not cut short by a cancellation: a stopped parent is worse than a late one. Raises `ParentLost`, and
    `NotAnswering` when it has to be ended.
    """
    try:
        return await to_the_end(
            _freeze(parent, layer_id, layer_fd, state_fd, size_bytes, paused=paused),
            f"freeze-{parent.name}",
        )
    except NotAnswering:
        raise
    except MachineGone as err:
        raise ParentLost(f"the parent ended while it was forked: {err}") from err
    except (MonitorError, ShimError) as err:
        raise ForkFailed(f"the parent could not be frozen: {err}") from err


async def _freeze(
    parent: Vmm, layer_id: str, layer_fd: int, state_fd: int, size_bytes: int, *, paused: bool
) -> Instant:
    deadline = asyncio.get_running_loop().time() + FREEZE_SECONDS
    monitor, shim, answer = parent.monitor, parent.shim, parent.answering
    all_bytes = parent.build.memory_bytes
    await answer.to(
        shim.prepare(layer_fd, size_bytes, deadline=deadline), "the shim's PREPARE", work_bytes=all_bytes
    )
    try:
        await answer.to(monitor.offer_state_file(state_fd), "add-fd")
        try:
            stopped_at = time.monotonic()
            try:
                await answer.to(monitor.stop(), "stop")
                dumping = shim.dump(GAP_PAGES, deadline=deadline)
                dump, _ = await asyncio.gather(
                    answer.to(dumping, "the shim's DUMP", work_bytes=all_bytes),
                    answer.to(monitor.save_state(), "xen-save-devices-state", work_bytes=all_bytes),
                )
            finally:
                if not paused:
                    await answer.to(monitor.cont(), "cont")
            running_at = time.monotonic()
        finally:
            await answer.to(monitor.withdraw_state_file(), "remove-fd")
    finally:
        await answer.to(shim.finish(deadline=deadline), "the shim's FINISH")
    layer = LayerRecord(
        id=layer_id,
        bytes=dump.bytes,
        pages=dump.pages,
        runs=dump.runs,
        table_offset=dump.table_offset,
    )
    return Instant(layer, stopped_at, running_at)
