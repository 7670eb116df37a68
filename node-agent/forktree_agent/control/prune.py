"""Deletions: the machines of a whole subtree end as soon as any node of a tree goes.

What is to go is decided at once and without waiting, so that nothing new starts below a deleted object; the
ending itself is a worker's job, repeated until it is done.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from forktree.kube.errors import NotFound
from forktree.kube.events import Subject
from forktree.models import EventReason, Fork, Session, Uid
from forktree_agent.control.owners import (
    ChildMachine,
    ForkPoint,
    RootMachine,
    meaning,
)
from forktree_agent.control.reaping import reap
from forktree_agent.control.tree import Node, Place, owner_place, place_of
from forktree_agent.control.world import World, loop_now
from forktree_agent.engine.contract import Machine, Owner, Point

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Job:
    """What goes with one deleted object."""

    nodes: dict[Uid, Node]
    began_at: float
    confirm: Place | None = None
    """Set while it is not certain that the object is deleted: it may have left our view only."""


class Pruner:
    """Ends what deleted objects stood for."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._jobs: dict[Uid, _Job] = {}

    def deleting(self, item: Session | Fork) -> None:
        """The object has a deletion time stamp, or is known to be deleted: that is the same to us."""
        self._end(item.metadata.uid, orphaning=item.metadata.orphaning)

    def left(self, item: Session | Fork) -> None:
        """The watch says that the object left our view, in its last state."""
        uid = item.metadata.uid
        moved = isinstance(item, Fork) and not item.metadata.deleting and not self._world.tree.doomed(uid)
        if moved:
            # `status.node` can be changed, and that looks the same. `spec.nodeName` of a Session cannot.
            self._jobs.setdefault(uid, _Job({}, loop_now(), confirm=place_of(item)))
            self._world.prune_work.poke(uid)
            return
        self._forget(item)
        self.deleting(item)

    def vanished(self, node: Node) -> None:
        """The sweep found that the object is gone, and nobody told us."""
        self._forget_place(node.place)
        self._end(node.place.uid, orphaning=False)

    def doomed(self, nodes: tuple[Node, ...]) -> None:
        """Objects that turned out to hang below a deleted one."""
        if nodes:
            self._add(nodes[0].place.uid, nodes)

    def _end(self, uid: Uid, *, orphaning: bool) -> None:
        nodes = self._world.tree.end(uid, orphaning=orphaning, now=loop_now())
        self._add(uid, nodes)

    def _add(self, uid: Uid, nodes: tuple[Node, ...]) -> None:
        job = self._jobs.get(uid)
        if job is None or job.confirm is not None:
            job = self._jobs[uid] = _Job({}, loop_now() if job is None else job.began_at)
        job.nodes |= {node.place.uid: node for node in nodes}
        node = self._world.tree.get(uid)
        if node is not None:
            job.nodes.setdefault(uid, node)
        self._world.prune_work.poke(uid)

    def _forget(self, item: Session | Fork) -> None:
        self._forget_place(place_of(item))

    def _forget_place(self, place: Place) -> None:
        if place.kind is Session:
            gone = self._world.sessions.forget(place.uid)
            if gone is not None and gone.spec.fork_ref is not None:
                self._world.fork_work.poke(Uid(gone.spec.fork_ref.uid))
        else:
            gone_fork = self._world.forks.forget(place.uid)
            above = None if gone_fork is None else owner_place(gone_fork)
            if above is not None:  # An instant may have been held for its children.
                self._world.fork_work.poke(above.uid)

    async def round(self, uid: Uid) -> float | None:
        """One deleted object: end its machines and those below it; see `Workers`."""
        job = self._jobs.get(uid)
        if job is None:
            return None
        if job.confirm is not None and await self._lives(job.confirm):
            if self._jobs.get(uid) is job:
                del self._jobs[uid]
            return None
        if self._jobs.get(uid) is not job:
            return 0.0  # Found deleted on another way meanwhile.
        if job.confirm is not None:
            self._forget_place(job.confirm)
            self._end(uid, orphaning=False)
            return 0.0
        await self._carry_out(uid, job)
        return None

    async def _lives(self, place: Place) -> bool:
        """Whether an object that left our view is still there. Then its machines run on."""
        try:
            found = await self._world.client.get(place.kind, place.namespace, place.name)
        except NotFound:
            return False
        if found.metadata.uid != place.uid:
            return False
        log.warning("object_left_view uid=%s", place.uid)
        self._world.observed(found)
        return True

    async def _carry_out(self, uid: Uid, job: _Job) -> None:
        doomed = set(job.nodes)
        await self._world.session_work.halt(doomed)
        await self._world.fork_work.halt(doomed)
        await self._world.branch_work.halt(doomed)
        await self._world.early_work.halt(doomed)
        machines, points = self._of(doomed)
        await reap(self._world.engine, machines, points)
        if machines or points:
            log.info(
                "pruned root=%s objects=%d machines=%d points=%d reaped_ms=%.1f",
                uid, len(doomed), len(machines), len(points), (loop_now() - job.began_at) * 1000,
            )  # fmt: skip
            self._announce(job.nodes.get(uid), machines=len(machines))
            self._world.room_changed()
        if set(job.nodes) != doomed:
            return self._world.prune_work.poke(uid)  # More of the tree came to light meanwhile.
        self._clean_up(job)
        if self._jobs.get(uid) is job:
            del self._jobs[uid]
        return None

    def _announce(self, node: Node | None, *, machines: int) -> None:
        if node is None or not machines:
            return
        place = node.place
        self._world.announcer.say(
            Subject.named(place.kind, place.namespace, place.name, place.uid),
            EventReason.PRUNED,
            f"deleted, and {machines} machines of it and below it were ended",
        )

    def _tell_fork(self, owner: Owner) -> None:
        """A child is gone with its machine: its Fork counts it, and may have waited for that."""
        named = meaning(owner)
        if isinstance(named, ChildMachine):
            self._world.fork_work.poke(named.fork)

    def _of(self, doomed: set[Uid]) -> tuple[list[Machine], list[Point]]:
        """Machines and instants that stand for doomed objects."""
        bound = {
            record.owner: record.uid
            for record in self._world.records.sessions()
            if record.uid is not None and not record.ended
        }
        machines: list[Machine] = []
        for machine in self._world.engine.machines():
            match meaning(machine.owner):
                case RootMachine(session=session):
                    goes = session in doomed
                case ChildMachine(fork=fork):
                    # One with an object goes with that alone: its fork may have left it an orphan. If it
                    # did not, the object is found to hang below a deleted one as soon as it is seen.
                    goes = bound.get(machine.owner, fork) in doomed
                case _:
                    goes = False
            if goes:
                machines.append(machine)
        points: list[Point] = []
        for point in self._world.engine.points():
            named = meaning(point.owner)
            if isinstance(named, ForkPoint) and named.fork in doomed:
                points.append(point)
        return machines, points

    def _clean_up(self, job: _Job) -> None:
        """Forget what is ended. The record of what is above goes last: it leads back to all below it."""
        owners = {record.uid: record.owner for record in self._world.records.sessions() if record.uid}
        for node in reversed(tuple(job.nodes.values())):
            uid = node.place.uid
            if node.place.kind is Session:
                if uid in owners:
                    self._world.records.end_session(owners[uid])
                    self._tell_fork(owners[uid])
            else:
                fork = self._world.records.fork(uid)
                if fork is not None:
                    self._world.newborns.refused(fork, f"{fork.above_name} or something above it was deleted")
                self._world.records.remove_fork(uid)
                self._world.logs.remove(uid)
                self._world.early_work.poke(uid)
            if self._world.sessions.get(uid) is None and self._world.forks.get(uid) is None:
                self._world.tree.drop(uid)
            else:
                self._world.poke(uid)
