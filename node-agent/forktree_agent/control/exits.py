"""Machines that ended by themselves: noted at once, so that the session can say how, also after a restart."""

from __future__ import annotations

import logging

import msgspec

from forktree.errors import ForktreeError
from forktree_agent.control.owners import ChildMachine, meaning
from forktree_agent.control.world import World
from forktree_agent.engine.contract import MachineExit

log = logging.getLogger(__name__)


async def watch_exits(world: World) -> None:
    """Note every exit. Never ends by itself."""
    async for ended in world.engine.exits():
        world.metrics.machine_lost()
        log.error("machine_lost owner=%s machine=%s how=%r", ended.owner, ended.machine, ended.text)
        try:
            note(world, ended)
        except ForktreeError as err:  # Its session still fails, only without saying how.
            log.warning("exit_not_noted owner=%s error=%r", ended.owner, err.message)
        world.room_changed()


def note(world: World, ended: MachineExit) -> None:
    """Write down how a machine ended, and have its session looked at."""
    record = world.records.session(ended.owner)
    if record is not None:
        if not record.ended:
            world.records.put_session(msgspec.structs.replace(record, lost=ended.text))
        if record.uid is not None:
            world.session_work.poke(record.uid)
        return
    named = meaning(ended.owner)
    if not isinstance(named, ChildMachine):
        return
    fork = world.records.fork(named.fork)
    if fork is not None:  # Its object is not written yet. It will be, and will say this.
        lost = {**fork.lost, str(named.index): ended.text}
        world.records.put_fork(msgspec.structs.replace(fork, lost=lost))
        world.fork_work.poke(named.fork)
