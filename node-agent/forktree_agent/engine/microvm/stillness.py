"""Programs that stand still before their machine does: of machines with several vCPUs, for forks and pauses.

On the only vCPU of a child guest init comes before everything else, so nothing is to be stopped for a fork.
With more of them a program would run on another before init has read who it is. So the programs are stopped
in the parent, by its init, and then the machine is: whoever starts from that instant is born with programs
that stand still, becomes itself, and only then lets them go on.

The same holds for a machine that is paused, from which children may be started: its programs stand still from
before its record says that it is paused until it is resumed.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

from forktree_agent.engine.contract import DeadlineExceeded, MachineGone, NotStill

if TYPE_CHECKING:
    from forktree_agent.engine.microvm.guest_frames import Thawed
    from forktree_agent.engine.microvm.records import Build
    from forktree_agent.engine.microvm.vmms import Vmm

STILL_SECONDS = 30.0
"""For what takes a guest some milliseconds. It gives up by itself after five seconds of its own time; beyond
this it is taken to say nothing at all."""


def is_needed(build: Build) -> bool:
    return build.vcpus > 1


async def hold(vmm: Vmm, *, deadline: float) -> None:
    """Have the programs of a running machine stand still, where that is needed.

    Raises `NotStill`, and `MachineGone`; they run on then, as far as anything does.
    """
    if not is_needed(vmm.build):
        return
    latest = asyncio.get_running_loop().time() + STILL_SECONDS
    try:
        await vmm.guest.asking.freeze(deadline=min(deadline, latest))
    except BaseException as err:
        let_go(vmm)  # It may have done it and be late in telling.
        if isinstance(err, DeadlineExceeded):
            raise NotStill(err.message) from err
        raise


def let_go(vmm: Vmm) -> asyncio.Future[Thawed] | None:
    """Have the programs go on, whether they stand still or not. What this returns is for `gone_on`."""
    if not is_needed(vmm.build):
        return None
    with suppress(MachineGone):  # Then nothing is left that could.
        return vmm.guest.asking.queue_thaw()
    return None


async def gone_on(vmm: Vmm, going: asyncio.Future[Thawed], *, deadline: float) -> None:
    """Until the programs go on. Raises `MachineGone`, `DeadlineExceeded`."""
    latest = asyncio.get_running_loop().time() + STILL_SECONDS
    await vmm.guest.asking.thawed(going, deadline=min(deadline, latest))
