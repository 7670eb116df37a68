"""The net under the watch: what vanished without our being told, and machines that no object stands for.

It ends only what was recorded before a consistent list began, is not in the list, and is answered "not
found" or "another uid" by name. A list that failed, or that held something unreadable, ends nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from forktree.errors import ForktreeError
from forktree.kube.client import decode
from forktree.kube.errors import NotFound, Unreadable
from forktree.metrics.table import SweepEnd, Swept
from forktree.models import Fork, ForkPhase, Session, Uid
from forktree_agent.control.objects import Store
from forktree_agent.control.owners import (
    ChildMachine,
    ForkPoint,
    RootMachine,
    is_early,
    meaning,
    owner_of,
)
from forktree_agent.control.prune import Pruner
from forktree_agent.control.reaping import reap
from forktree_agent.control.tree import Node, place_of
from forktree_agent.control.world import World, loop_now
from forktree_agent.engine.contract import Machine, Owner, Point

log = logging.getLogger(__name__)

SOONEST_SECONDS = 1.0
"""Between two sweeps that were asked for: a flood of hints must not become a flood of lists."""
GETS_AT_ONCE = 8


class _Meta(msgspec.Struct, rename="camel"):
    uid: str
    resource_version: str


class _Version(msgspec.Struct):
    metadata: _Meta


Kind = TypeVar("Kind", Session, Fork)


class Sweep:
    """Compares what this node has with what the API server has."""

    def __init__(self, world: World, pruner: Pruner) -> None:
        self._world = world
        self._pruner = pruner

    async def run(self) -> None:
        """Sweep now and then, and soon when asked to. Never ends by itself."""
        await self._world.synced.wait()
        while True:
            try:
                await self.once()
                end = SweepEnd.DONE
            except ForktreeError as err:
                end = SweepEnd.GIVEN_UP
                log.warning("sweep_given_up reason=%s error=%r", err.reason, err.message)
            except Exception:  # The task's edge: the next sweep may well work.
                end = SweepEnd.GIVEN_UP
                log.exception("sweep_broke")
            self._world.metrics.sweep_over(end)
            began = loop_now()
            try:
                async with asyncio.timeout(self._world.settings.sweep_seconds):
                    await self._world.sweep_wanted.wait()
            except TimeoutError:
                pass
            self._world.sweep_wanted.clear()
            await asyncio.sleep(max(0.0, began + SOONEST_SECONDS - loop_now()))

    async def once(self) -> None:
        """One sweep. Raises `KubeError` where a list failed; nothing was ended then."""
        world = self._world
        known_before = world.tree.nodes()
        recorded_before = {each.owner: each for each in world.records.sessions()}
        machines_before = world.engine.machines()
        points_before = world.engine.points()
        sessions = await self._listed(Session, world.sessions, f"spec.nodeName={world.node}")
        forks = await self._listed(Fork, world.forks, f"status.node={world.node}")
        listed: dict[Uid, Session | Fork] = {each.metadata.uid: each for each in sessions}
        listed.update({each.metadata.uid: each for each in forks})
        for uid, item in listed.items():
            known = world.sessions.get(uid) or world.forks.get(uid)
            if known is not item or item.metadata.deleting:
                self.take_in(item)
        missing = [
            node
            for node in known_before
            if node.place.uid not in listed and not is_early(node.place.uid)  # Nobody could list that.
        ]
        gone = await self._gone(missing)
        for node in gone:
            await self._dependents_anew(node)
        for node in gone:
            if world.tree.get(node.place.uid) is not None:
                log.info("vanished uid=%s name=%s", node.place.uid, node.place.name)
                self._pruner.vanished(node)
                world.metrics.swept(Swept.VANISHED, 1)
        # What was recorded while the list was made may be of an object that came too late for it.
        settled = [
            each
            for each in machines_before
            if world.records.session(each.owner) is recorded_before.get(each.owner)
        ]
        # And what has another owner by now was an early fork's, whose object came meanwhile.
        machine_owners = {each.id: each.owner for each in world.engine.machines()}
        point_owners = {each.id: each.owner for each in world.engine.points()}
        await self._end_strays(
            [each for each in settled if machine_owners.get(each.id) == each.owner],
            [each for each in points_before if point_owners.get(each.id) == each.owner],
            listed,
        )
        self._poke_unfinished()

    async def _listed(self, kind: type[Kind], known: Store[Kind], field_selector: str) -> list[Kind]:
        """All objects there are at one instant. Raises `KubeError`, also where one of them cannot be read.

        One that is known in this very version is not read again, as that is nearly all of some thousands.
        """
        raws, _ = await self._world.client.list_raw(kind, field_selector=field_selector)
        listed: list[Kind] = []
        for raw in raws:
            try:
                version = msgspec.json.decode(raw, type=_Version).metadata
            except msgspec.MsgspecError as err:
                raise Unreadable(f"a {kind.resource.kind} has no version: {err}") from err
            held = known.get(Uid(version.uid))
            same = held is not None and held.metadata.resource_version == version.resource_version
            listed.append(held if held is not None and same else decode(kind, raw))
        return listed

    def take_in(self, item: Session | Fork) -> None:
        """A version of an object, from a watch or a list: into the store, into its tree, to its worker."""
        world = self._world
        known = world.sessions if isinstance(item, Session) else world.forks
        if known.gone(item.metadata.uid):
            return
        if item.metadata.deleting:
            self._pruner.doomed(world.tree.place(place_of(item), world.above(item), now=loop_now()))
            world.observed(item)
            self._pruner.deleting(item)
            return
        newest = known.get(item.metadata.uid)
        world.observed(item)
        current = known.get(item.metadata.uid)
        if current is not None and current is not newest:
            self._pruner.doomed(world.tree.place(place_of(current), world.above(current), now=loop_now()))

    async def _gone(self, missing: list[Node]) -> list[Node]:
        """Those that the API server does not know any more. One that cannot be asked about is kept."""
        at_once = asyncio.Semaphore(GETS_AT_ONCE)

        async def check(node: Node) -> bool:
            async with at_once:
                return await self._is_gone(node)

        answers = await asyncio.gather(*(check(node) for node in missing))
        return [node for node, gone in zip(missing, answers, strict=True) if gone]

    async def _is_gone(self, node: Node) -> bool:
        place = node.place
        try:
            found = await self._world.client.get(place.kind, place.namespace, place.name)
        except NotFound:
            return True
        except ForktreeError as err:
            log.warning("sweep_unsure uid=%s error=%r", place.uid, err.message)
            return False
        if found.metadata.uid != place.uid:
            return True
        if isinstance(found, Fork) and found.status.node is None:
            # An agent died before it told its early fork's object where it is, so no list of ours has it.
            self.take_in(found)
        return False

    async def _dependents_anew(self, node: Node) -> None:
        """Read again what hangs below a vanished object: if it left orphans, it let go of them first."""
        for below in self._world.tree.below(node.place.uid):
            place = below.place
            try:
                found = await self._world.client.get(place.kind, place.namespace, place.name)
            except NotFound:
                continue  # On its way out too.
            if found.metadata.uid == place.uid:
                self.take_in(found)

    async def _end_strays(
        self,
        machines: Sequence[Machine],
        points: Sequence[Point],
        listed: dict[Uid, Session | Fork],
    ) -> None:
        """End machines and instants, from before the list, of objects neither listed nor known."""
        owned = {owner_of(each) for each in listed.values() if isinstance(each, Session)}
        strays = [each for each in machines if each.owner not in owned and self._stray(each.owner, listed)]
        loose = [each for each in points if self._stray(each.owner, listed)]
        for owner in (*(each.owner for each in strays), *(each.owner for each in loose)):
            log.warning("stray owner=%s", owner)
        await reap(self._world.engine, strays, loose)
        self._world.metrics.swept(Swept.MACHINE, len(strays))
        self._world.metrics.swept(Swept.POINT, len(loose))
        if strays or loose:
            self._world.room_changed()

    def _stray(self, owner: Owner, listed: dict[Uid, Session | Fork]) -> bool:
        named = meaning(owner)
        match named:
            case RootMachine(session=uid):
                pass
            case ChildMachine(fork=uid):
                record = self._world.records.session(owner)
                if record is not None:
                    if record.ended:
                        return True  # Refused or deleted, and an agent died before it ended the machine.
                    uid = record.uid or uid
            case ForkPoint(fork=uid):
                pass
            case None:
                return False
        # What is in the tree is the pruner's to end, once it is certain that it is gone.
        return uid not in listed and self._world.tree.get(uid) is None

    def _poke_unfinished(self) -> None:
        """A round that was lost is made up for. Objects that stand as they should are left alone."""
        running = {each.owner for each in self._world.engine.machines()}
        for session in self._world.sessions.all():
            status = session.status
            stands = (
                status.ready
                and status.observed_generation == session.metadata.generation
                and owner_of(session) in running
            )
            if not status.phase.terminal and not stands:
                self._world.session_work.poke(session.metadata.uid)
        for fork in self._world.forks.all():
            if fork.status.phase is not ForkPhase.FAILED:  # A complete one still tells of its children.
                self._world.fork_work.poke(fork.metadata.uid)
