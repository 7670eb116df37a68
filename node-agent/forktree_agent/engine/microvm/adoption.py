"""Taking over from an agent that died: keep what was finished, undo what was only begun."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forktree_agent.engine.contract import EngineError, MachineExit, MachineId, Owner, PointLost
from forktree_agent.engine.microvm import stillness
from forktree_agent.engine.microvm.baking import BASELINE_KIND
from forktree_agent.engine.microvm.endings import all_of, until
from forktree_agent.engine.microvm.keeping import asking
from forktree_agent.engine.microvm.records import (
    BaselineRecord,
    BatchRecord,
    MachineRecord,
    PointRecord,
)
from forktree_agent.engine.microvm.resources import BATCH_KIND, MACHINE_KIND, POINT_KIND, Resources
from forktree_agent.engine.microvm.vmms import tree_group
from forktree_agent.typed_records import load_all

if TYPE_CHECKING:
    from forktree_agent.engine.microvm.vmms import Vmm
    from forktree_agent.keeper_client import Keeper, Listing

log = logging.getLogger(__name__)

ANSWER_SECONDS = 10.0
"""A machine that does not answer its new agent in this time is beyond use."""
AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class Survivors:
    machines: tuple[tuple[MachineRecord, Vmm], ...]
    points: tuple[PointRecord, ...]
    baselines: tuple[BaselineRecord, ...]
    exits: tuple[MachineExit, ...]
    """Machines that the journal knows and that run no more."""


async def adopt(resources: Resources, keeper: Keeper, *, deadline: float) -> Survivors:
    """Bring journal, keeper and this agent to one view. Afterwards each names exactly the same things."""
    records = _machine_records(resources)
    # Of dead machines too, and before any is ended: a group goes with the last machine that is in it. And
    # before the listing: what is lost of a machine from then on is told, and noted for those in a group.
    for record in records.values():
        resources.vmms.note_group(tree_group(record.tree), (record.id,))
    with asking("taking over"):
        listing = await keeper.listing(deadline=deadline)
    await resources.store.adopt(listing.files)
    points, lost = _points(resources)
    machines, exits = await _machines(resources, records, listing, deadline=deadline)
    # Only now that whoever lives is known to use its layers: those of a lost instant are others' too.
    for point in lost:
        await resources.end_point(point.id)
    for key, batch in load_all(resources.journal, BATCH_KIND, BatchRecord).items():
        log.info("undoing_unfinished machines=%d points=%d", len(batch.machines), len(batch.points))
        await resources.undo(key, batch)
        machines = [(record, vmm) for record, vmm in machines if record.id not in batch.machines]
        exits = [each for each in exits if each.machine not in batch.machines]
        points = [point for point in points if point.id not in batch.points]
    for ended in exits:
        await resources.end_machine(ended.machine)
    await _end_waiting(resources)
    await _end_strangers(resources, listing, {record.id for record, _ in machines})
    baselines = _baselines(resources, {point.id for point in points})
    builds = [*(point.build for point in points), *(record.build for record, _ in machines)]
    wanted = {point.state_file for point in points} | {build.disk_file for build in builds}
    await resources.store.drop_all_but(wanted)
    log.info("adopted machines=%d points=%d baselines=%d", len(machines), len(points), len(baselines))
    return Survivors(tuple(machines), tuple(points), baselines, tuple(exits))


def _points(resources: Resources) -> tuple[list[PointRecord], list[PointRecord]]:
    """Those that are held, and those of which something is gone."""
    kept: list[PointRecord] = []
    lost: list[PointRecord] = []
    for record in load_all(resources.journal, POINT_KIND, PointRecord).values():
        try:
            resources.store.descriptor(record.state_file)
            resources.store.use(record.id, record.chain)
        except PointLost as err:
            log.warning("point_lost point=%s owner=%s message=%r", record.id, record.owner, str(err))
            lost.append(record)
        else:
            kept.append(record)
    return kept, lost


def _machine_records(resources: Resources) -> dict[str, MachineRecord]:
    """Of machines that somebody has."""
    records = load_all(resources.journal, MACHINE_KIND, MachineRecord)
    return {name: record for name, record in records.items() if not record.waiting}


async def _machines(
    resources: Resources, records: dict[str, MachineRecord], listing: Listing, *, deadline: float
) -> tuple[list[tuple[MachineRecord, Vmm]], list[MachineExit]]:
    running = {entry.machine for entry in listing.machines if entry.exit is None}
    texts = {entry.machine: entry.exit.text for entry in listing.machines if entry.exit is not None}
    for entry in listing.machines:
        if entry.cgroup is not None:
            resources.vmms.note_group(entry.cgroup, (entry.machine,))
    turns = asyncio.Semaphore(AT_ONCE)

    async def take(record: MachineRecord) -> tuple[MachineRecord, Vmm] | MachineExit:
        if record.id not in running:
            text = texts.get(record.id, "ended together with its keeper")
            return MachineExit(machine=MachineId(record.id), owner=Owner(record.owner), text=f"QEMU {text}")
        async with turns:
            try:
                vmm = await _resume(resources, record, deadline=deadline)
            except EngineError as err:
                log.warning("adoption_failed machine=%s message=%r", record.id, str(err))
                text = f"it did not answer after a restart of the agent: {err}"
                return MachineExit(machine=MachineId(record.id), owner=Owner(record.owner), text=text)
        if (how := lost_networks.get(record.id)) is not None:
            resources.vmms.lose_network(record.id, how)
        return record, vmm

    lost_networks = {entry.machine: entry.companion_lost for entry in listing.machines}
    taken = await all_of(*(take(record) for record in records.values()))
    machines = [each for each in taken if not isinstance(each, MachineExit)]
    return machines, [each for each in taken if isinstance(each, MachineExit)]


async def _resume(resources: Resources, record: MachineRecord, *, deadline: float) -> Vmm:
    resources.store.use(record.id, record.chain)
    resources.vmms.keep_uid(record.uid)
    resources.ledger.record(record.id, record.build.admitted_bytes, record.tree)
    soon = min(deadline, asyncio.get_running_loop().time() + ANSWER_SECONDS)
    vmm = await resources.vmms.resume(record.id, record.uid, record.build, deadline=soon)
    async with until(soon, f"taking over {record.id}"):
        await vmm.monitor.settle(paused=record.paused)
    if not record.paused and record.unanswered is None:  # One that has not answered lets go by itself.
        stillness.let_go(vmm)  # The agent before us may have died in the midst of a fork.
    vmm.guest.take_over()
    return vmm


async def _end_waiting(resources: Resources) -> None:
    """Those in wait for a fork were nobody's machines; what they waited for is not known any more."""
    for name, record in load_all(resources.journal, MACHINE_KIND, MachineRecord).items():
        if record.waiting:
            await resources.end_machine(name)


async def _end_strangers(resources: Resources, listing: Listing, known: set[str]) -> None:
    """Machines in no record cannot be: records are written first. Should one be, nobody can reach it."""
    for entry in listing.machines:
        if entry.machine not in known:
            if entry.exit is None and resources.journal.get(MACHINE_KIND, entry.machine) is None:
                log.warning("stranger_ended machine=%s pid=%d", entry.machine, entry.pid)
            await resources.end_machine(entry.machine)


def _baselines(resources: Resources, points: set[str]) -> tuple[BaselineRecord, ...]:
    kept: list[BaselineRecord] = []
    for digest, record in load_all(resources.journal, BASELINE_KIND, BaselineRecord).items():
        if record.point in points:
            kept.append(record)
        else:
            resources.journal.remove(BASELINE_KIND, digest)
    return tuple(kept)
