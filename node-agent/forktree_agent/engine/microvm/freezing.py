"""Freezing: copy what is a running machine's own, and its device state, at one instant."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forktree_agent.engine.contract import ForkFailed, MachineGone, ParentLost
from forktree_agent.engine.microvm import stillness
from forktree_agent.engine.microvm.answering import NotAnswering
from forktree_agent.engine.microvm.endings import each_to_its_end, to_the_end
from forktree_agent.engine.microvm.layers import PAGE_BYTES, RUN_BYTES, TARGET_RUNS, Run, short_runs
from forktree_agent.engine.microvm.monitor import MonitorError
from forktree_agent.engine.microvm.pace import over_budget
from forktree_agent.engine.microvm.records import LayerRecord
from forktree_agent.engine.microvm.shim import ShimError
from forktree_agent.engine.microvm.tracking import NO_MARK

if TYPE_CHECKING:
    from forktree_agent.engine.microvm.shim import Dump
    from forktree_agent.engine.microvm.vmms import Vmm

log = logging.getLogger(__name__)

GAP_PAGES = 4
"""Clean pages copied to join two runs: a page costs the parent 0.4-0.9 us, a run costs each child 4.4 us."""
FREEZE_SECONDS = 600.0
"""A freeze takes milliseconds. Each command has a time of its own; this is for all that the shim does."""
ARMED_SECONDS = 0.02
"""A guest reads little in less, and to look again takes half a millisecond."""
PREPARE_MARGIN = 1.25
PREPARE_EXTRA_BYTES = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class NextLayer:
    """The file that a freeze fills, and what with."""

    id: str
    fd: int
    size_bytes: int
    """What it is expected to need."""
    tree: str
    since: int
    """Mark of the dump that it is to be a difference to."""
    mark: int
    """Of this dump."""
    prepared: bool = False
    """The parent's shim has it ready."""


@dataclass(frozen=True, slots=True)
class Instant:
    """A frozen moment of a parent, in seconds of the monotonic clock.

    With several vCPUs it begins when the programs are told to stop, and ends when they go on.
    """

    layer: LayerRecord
    stopped_at: float
    running_at: float
    copied: tuple[float, float]
    """From and until when its pages were copied."""


async def written_bytes(parent: Vmm, since: int, *, deadline: float) -> int:
    """How much `parent` wrote since a dump. Makes ready for a freeze, as far as that can be done ahead."""
    pages = await parent.answering.to(
        parent.shim.arm(since, deadline=deadline), "the shim's ARM", work_bytes=parent.build.memory_bytes
    )
    return pages * PAGE_BYTES


def room_for(parent: Vmm, written: int) -> int:
    """What a layer needs for so much, and for what may be added until it is made."""
    return min(parent.build.memory_bytes, int(written * PREPARE_MARGIN) + PREPARE_EXTRA_BYTES)


def check_budget(parent: Vmm, written: int, budget_ms: float | None) -> None:
    """Raises `PauseOverBudget` where `parent` would stand still for too long if it were frozen now."""
    refusal = over_budget(parent.name, parent.pace, written, budget_ms, now=time.monotonic())
    if refusal is not None:
        raise refusal


async def freeze(
    parent: Vmm,
    layer: NextLayer,
    state_fd: int,
    frozen: asyncio.Future[LayerRecord],
    *,
    after: asyncio.Future[Any],
    paused: bool,
    budget_ms: float | None,
    deadline: float,
) -> Instant:
    """Copy what is the parent's own, and its device state, at one instant, once `after` is done. Afterwards
    it runs again, unless it is meant to stand still.

    Where `after` fails or is cancelled, so is this, and nothing was copied. `frozen` is told as soon as the
    parent runs: what was copied can be read from then on, and nobody writes to it any more, but only when
    this returns is the parent rid of it. Not cut short by a cancellation: a stopped parent is worse than a
    late one. Raises `PauseOverBudget`, `ParentLost`, `NotStill`, `DeadlineExceeded` where its guest says
    nothing until then, and `NotAnswering` when it has to be ended.
    """
    try:
        return await to_the_end(
            _freeze(
                parent,
                layer,
                state_fd,
                frozen,
                after=after,
                paused=paused,
                budget_ms=None if paused else budget_ms,
                until=deadline,
            ),
            f"freeze-{parent.name}",
        )
    except NotAnswering:
        raise
    except MachineGone as err:
        raise ParentLost(f"the parent ended while it was forked: {err}") from err
    except (MonitorError, ShimError) as err:
        raise ForkFailed(f"the parent could not be frozen: {err}") from err


async def _freeze(
    parent: Vmm,
    layer: NextLayer,
    state_fd: int,
    frozen: asyncio.Future[LayerRecord],
    *,
    after: asyncio.Future[Any],
    paused: bool,
    budget_ms: float | None,
    until: float,
) -> Instant:
    began = time.monotonic()
    deadline = asyncio.get_running_loop().time() + FREEZE_SECONDS
    monitor, shim, answer = parent.monitor, parent.shim, parent.answering
    all_bytes = parent.build.memory_bytes
    if not layer.prepared:
        await _prepare(parent, layer, deadline=deadline)
    try:
        await answer.to(monitor.offer_state_file(state_fd), "add-fd")
    except BaseException:
        await answer.to(shim.finish(deadline=deadline), "the shim's FINISH")
        raise
    try:
        await _done(after)
        deadline = asyncio.get_running_loop().time() + FREEZE_SECONDS
        is_late = layer.mark != NO_MARK and time.monotonic() - began > ARMED_SECONDS
        if is_late or budget_ms is not None:
            # Again: much may have been read since, and would be copied as if it were new.
            check_budget(parent, await written_bytes(parent, layer.since, deadline=deadline), budget_ms)
        stopped_at = time.monotonic()
        if not paused:  # One that is has its programs standing still.
            await stillness.hold(parent, deadline=until)
        try:
            (dump, copying), _ = await asyncio.gather(
                _stop_and_dump(parent, layer, deadline=deadline),
                # QEMU takes one command after the other, so this one waits there for the stop.
                answer.to(monitor.save_state(), "xen-save-devices-state", work_bytes=all_bytes),
            )
        finally:
            going = None
            if not paused:
                going = stillness.let_go(parent)  # It waits for it in its channel.
                await answer.to(monitor.cont(), "cont")
        running_at = time.monotonic()
        copied = _record(parent, layer, dump)
        if not frozen.done():  # Whoever waited for it may have been cancelled.
            frozen.set_result(copied)
            await asyncio.sleep(0)  # Whoever waited for it goes first: what is left here can wait.
        if going is not None:
            await stillness.gone_on(parent, going, deadline=until)
            running_at = time.monotonic()
        parent.pace.stopped(copied.bytes, running_at - stopped_at, now=running_at)
        instant = Instant(copied, stopped_at, running_at, copying)
    finally:
        await each_to_its_end(
            answer.to(monitor.withdraw_state_file(), "remove-fd"),
            answer.to(shim.finish(deadline=deadline), "the shim's FINISH"),
        )
    return instant


async def _done(work: asyncio.Future[Any]) -> None:
    """Fails as `work` does. A cancellation of this is none of it."""
    await asyncio.wait((work,))
    if work.cancelled():
        raise asyncio.CancelledError
    if (failure := work.exception()) is not None:
        raise failure


async def _stop_and_dump(
    parent: Vmm, layer: NextLayer, *, deadline: float
) -> tuple[Dump, tuple[float, float]]:
    await parent.answering.to(parent.monitor.stop(), "stop")
    return await _dump(parent, layer, deadline=deadline)


async def _prepare(parent: Vmm, layer: NextLayer, *, deadline: float) -> None:
    await parent.answering.to(
        parent.shim.prepare(layer.fd, layer.size_bytes, deadline=deadline),
        "the shim's PREPARE",
        work_bytes=parent.build.memory_bytes,
    )


async def _dump(parent: Vmm, layer: NextLayer, *, deadline: float) -> tuple[Dump, tuple[float, float]]:
    """What was copied, and from and until when (monotonic seconds)."""
    began = time.monotonic()
    dump = await parent.answering.to(
        parent.shim.dump(GAP_PAGES, since=layer.since, mark=layer.mark, deadline=deadline),
        "the shim's DUMP",
        work_bytes=parent.build.memory_bytes,
    )
    now = time.monotonic()
    parent.pace.copied(dump.bytes, now - began, now=now)
    return dump, (began, now)


async def copy_running(parent: Vmm, layer: NextLayer) -> LayerRecord:
    """Copy what the parent wrote since a dump while it runs. Not an instant: see `precopying`.

    Raises `ForkFailed`, `MachineGone`, and `NotAnswering` when the parent has to be ended.
    """
    deadline = asyncio.get_running_loop().time() + FREEZE_SECONDS
    try:
        await _prepare(parent, layer, deadline=deadline)
        try:
            dump, _ = await _dump(parent, layer, deadline=deadline)
        finally:
            await parent.answering.to(parent.shim.finish(deadline=deadline), "the shim's FINISH")
    except ShimError as err:
        raise ForkFailed(f"the parent's memory could not be copied: {err}") from err
    return _record(parent, layer, dump, ahead=True)


def _record(parent: Vmm, layer: NextLayer, dump: Dump, *, ahead: bool = False) -> LayerRecord:
    if dump.since != layer.since:
        log.warning("layer_lost machine=%s copied_bytes=%d", parent.name, dump.bytes)
    copied_runs = 0
    if dump.runs > TARGET_RUNS:  # Seldom: the table is read for nothing else here.
        table = os.pread(layer.fd, dump.runs * RUN_BYTES, dump.table_offset)
        copied_runs = short_runs(Run.decode_table(table))
    return LayerRecord(
        id=layer.id,
        bytes=dump.bytes,
        pages=dump.pages,
        runs=dump.runs,
        table_offset=dump.table_offset,
        copied_runs=copied_runs,
        tree=layer.tree,
        ahead=ahead,
    )
