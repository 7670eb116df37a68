"""Machines that stand still because somebody wants them to, over restarts of the agent too.

The record says what a machine is meant to be: it is written before the machine stands still and before it
goes on, so that no agent lets one go on by mistake. Where programs have to stand still for that, see
`stillness`, they do so before the record is written: a machine that is paused by its record can be forked.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

from forktree_agent.engine.microvm import stillness

if TYPE_CHECKING:
    from forktree_agent.engine.microvm.forking import Live
    from forktree_agent.engine.microvm.resources import Resources


class Change(Protocol):
    """`pause` or `resume`."""

    async def __call__(self, resources: Resources, live: Live, *, deadline: float) -> None: ...


async def pause(resources: Resources, live: Live, *, deadline: float) -> None:
    """Have a machine stand still. Idempotent. Nobody may fork it meanwhile.

    Raises `NotStill`, `JournalError`, after which it runs on; `MachineGone`, and `NotAnswering` when it has
    to be ended.
    """
    vmm = live.vmm
    if not live.record.paused:
        await stillness.hold(vmm, deadline=deadline)
        try:
            live.record = resources.note_paused(live.record, paused=True)
        except BaseException:
            stillness.let_go(vmm)
            raise
    await vmm.answering.to(vmm.monitor.stop(), "stop")


async def resume(resources: Resources, live: Live, *, deadline: float) -> None:
    """Let a machine go on, its clock set to now. Idempotent. Raises as `pause`, but for `NotStill`."""
    vmm = live.vmm
    live.unchanged_since = None
    if live.record.paused:
        live.record = resources.note_paused(live.record, paused=False)
    # Queued first: the guest reads it before anything else when it wakes up.
    vmm.guest.set_clock(time.time_ns())
    going = stillness.let_go(vmm)
    await vmm.answering.to(vmm.monitor.cont(), "cont")
    if going is not None:
        await stillness.gone_on(vmm, going, deadline=deadline)
