"""Machines that ended by themselves, or lost their network: noted at once, so that the session can
say how, also after a restart."""

from __future__ import annotations

import logging

import msgspec

from forktree.errors import ForktreeError
from forktree_agent.control.owners import ChildMachine, meaning
from forktree_agent.control.world import World
from forktree_agent.engine.contract import MachineExit, NetworkLost

log = logging.getLogger(__name__)


async def watch_exits(world: World) -> None:
    """Note every exit. Never ends by itself."""
    async for ended in world.engine.exits():
        if isinstance(ended, NetworkLost):
            log.error("network_lost owner=%s machine=%s how=%r", ended.owner, ended.machine, ended.text)
            note_network(world, ended)
            continue
        world.metrics.machine_lost()
        log.error("machine_lost owner=%s machine=%s how=%r", ended.owner, ended.machine, ended.text)
        try:
            note(world, ended)
        except ForktreeError as err:  # Its session still fails, only without saying how.
            log.warning("exit_not_noted owner=%s error=%r", ended.owner, err.message)
        world.room_changed()


def note_network(world: World, lost: NetworkLost) -> None:
    """Write down that a machine does not reach the outside any more, and have its session say so.

    A child whose session is not there yet runs on without a word of it: it has not been given to anybody.
    """
    record = world.records.session(lost.owner)
    if record is None or record.ended:
        return
    try:
        world.records.put_session(msgspec.structs.replace(record, network_lost=lost.text))
    except ForktreeError as err:
        log.warning("network_lost_not_noted owner=%s error=%r", lost.owner, err.message)
    if record.uid is not None:
        world.session_work.poke(record.uid)


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
