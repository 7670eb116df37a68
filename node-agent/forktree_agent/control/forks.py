"""One Fork, one step: checks, the fork of machines, the answer in its status, and its children's objects."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Generator
from contextlib import contextmanager

import msgspec

from forktree.errors import ForktreeError
from forktree.kube.events import Subject
from forktree.metrics.table import Road, Stage
from forktree.models import EventReason, Fork, ForkPhase, Reason, Session, Uid
from forktree.models.names import BORN_ANNOTATION
from forktree_agent.control import news
from forktree_agent.control.belonging import adopted, adopted_refused
from forktree_agent.control.births import Births, end_loose, mode_of
from forktree_agent.control.children import WRITES_AT_ONCE, Children
from forktree_agent.control.completion import Completion
from forktree_agent.control.decide_fork import Begin, Refuse, Wait, begin
from forktree_agent.control.decide_session import HELD_GRACE_SECONDS, grace_left
from forktree_agent.control.environment import SecretUnreadable
from forktree_agent.control.fork_statuses import fork_ended, fork_fails, fork_outlived, fork_runs, fork_waits
from forktree_agent.control.living import LiveLimit
from forktree_agent.control.owners import point_owner
from forktree_agent.control.patience import seconds_left
from forktree_agent.control.records import ForkRecord
from forktree_agent.control.sources import source_lives, source_name, source_of
from forktree_agent.control.status_writer import Vanished
from forktree_agent.control.tree import Node
from forktree_agent.control.world import World, boot_now, loop_now, wall_now
from forktree_agent.engine.contract import (
    AtCapacity,
    EngineError,
    ForkResult,
    ParentLost,
    PointId,
    PointLost,
)
from forktree_agent.journal import JournalError

log = logging.getLogger(__name__)

DELETED = "it is deleted and holds no instant; a finalizer still holds its object"
BELOW_DELETED = "something above it was deleted, and its machines with it"
ROOM_RETRY_SECONDS = 5.0
MANY_FORKS = 3
"""Of one node, whose objects are written at the same time. From here on a fork's news come in one write."""


class Forks:
    """Brings forks to what they should be. `round` is one worker's step."""

    def __init__(self, world: World, tasks: asyncio.TaskGroup) -> None:
        self._world = world
        self._births = Births(world, tasks)
        self._children = Children(world)
        self._completion = Completion(world, self._children)
        self._verdicts: dict[Uid, tuple[Reason, str]] = {}
        """Failures that are not written yet. A fork is not tried again because the API server is away."""
        self._seen: dict[Uid, float] = {}
        """When a fork that is not answered yet was first looked at."""
        self._until: dict[Uid, float] = {}
        """And until when it has to be ready, by the same clock."""
        self._writing: set[Uid] = set()
        """Forks whose machines run and whose objects are just being written."""

    async def round(self, uid: Uid) -> float | None:
        """One step for one fork; see `Workers`."""
        await self._world.synced.wait()
        fork = self._world.forks.get(uid)
        if fork is None or fork.metadata.deleting:
            # Deletion ends machines where it is seen, with all that hangs below.
            self._over(uid)
        else:
            self._seen.setdefault(uid, boot_now())
            if uid not in self._until:
                self._until[uid] = boot_now() + seconds_left(fork, wall_now())
        if fork is None:
            return None
        try:
            if uid in self._verdicts:
                await self._pronounce(fork)
                return 0.0
            return await self._step(fork)
        except Vanished as err:
            log.info("fork_not_there uid=%s error=%r", uid, err.message)
            self._world.sweep_wanted.set()
            return None

    async def _step(self, fork: Fork) -> float | None:
        try:
            return await self._next(fork)
        except JournalError as err:
            newest = self._world.forks.get(fork.metadata.uid) or fork
            if newest.metadata.deleting or newest.status.parent_uid is not None:
                raise  # It is tried again, and what was said of it stays true.
            return await self._put_off(newest, err)

    async def _next(self, fork: Fork) -> float | None:
        uid = fork.metadata.uid
        record = self._world.records.fork(uid)
        node = self._world.tree.get(uid)
        if fork.metadata.deleting or (node is not None and node.doomed_at is not None):
            return await self._doomed(fork, node)
        if fork.status.node != self._world.node and not _unrouted(fork, record):
            return (
                None  # Somebody took it from here: its machines run on, and only the operator sends it back.
            )
        if record is not None and record.born is not None and self._world.records.fork(record.born):
            return None  # Not all of its machines are known to be its own yet; it is poked when they are.
        if fork.status.phase is ForkPhase.FAILED:
            await self._clear(fork)
            return None
        born = fork.metadata.annotations.get(BORN_ANNOTATION)
        if record is None and born is not None and fork.status.parent_uid is None:
            return await self._unborn(fork, Uid(born))
        if record is None and (fork.status.parent_uid is not None or self._has_children(uid)):
            return await self._forgotten(fork)
        if record is None or record.result is None:
            return await self._begin(fork)
        with self._writing_of(uid):
            return await self._write(fork, record)

    async def _write(self, fork: Fork, record: ForkRecord) -> float | None:
        """Bring all objects of a fork whose machines run to where they should be."""
        uid = fork.metadata.uid
        if fork.status.parent_uid is None:
            if not await self._answered(fork, record):
                return 0.0
            if not self._told_with_children(fork):
                await self._mirror(uid)
        self._seen.pop(uid, None)
        self._until.pop(uid, None)
        try:
            await self._children.record(fork, record)
            await self._completion.advance(fork)
        except ForktreeError:
            await self._mirror(uid)  # Whatever became of its children: that it runs is told.
            raise
        await self._mirror(uid)
        if await self._completion.let_go(self._world.forks.get(uid) or fork):
            await self._mirror(uid)
        return None

    async def _unborn(self, fork: Fork, early: Uid) -> float | None:
        """Its machines were there before it, so whatever became of them, it is not forked another time."""
        if self._world.records.fork(early) is not None:
            return None  # They are about to be given over to it, and then it is poked.
        return await self._fail(fork, Reason.MACHINE_LOST, "its node knows nothing of its machines any more")

    async def _forgotten(self, fork: Fork) -> float | None:
        """This node has lost its memory of a fork that ran. What was done by then was done."""
        if fork.status.phase is ForkPhase.COMPLETE:
            await self._completion.let_go_forgotten(fork)
            await self._world.write_fork(fork, fork_outlived(fork, self._children.left(fork), wall_now()))
            return None
        return await self._fail(
            fork, Reason.MACHINE_LOST, "its node knows nothing of it any more, and it was not complete"
        )

    # Begun and forked ------------------------------------------------------------------------------------

    async def _begin(self, fork: Fork) -> float | None:
        if self._left(fork) <= 0:
            return await self._too_late(fork)
        source = await source_of(self._world, fork)
        match begin(fork, source, self._world.node):
            case Refuse(reason=reason, message=message):
                return await self._fail(fork, reason, message)
            case Wait(reason=reason, message=message):
                return await self._wait_for_source(fork, reason, message)
            case Begin() as plan:
                return await self._fork(fork, plan)

    async def _fork(self, fork: Fork, plan: Begin) -> float | None:
        uid = fork.metadata.uid
        # What an agent before us had made of it, and could not note any more, nobody has heard of.
        await end_loose(self._world, fork.metadata.uid, fork.spec.replicas)
        if self._world.tree.doomed(uid) or self._world.tree.doomed(plan.above.uid):
            return 0.0
        try:
            with (
                self._world.living.starting(uid, fork.spec.replicas, plan.lineage),
                self._world.activity.during(plan.above.uid),
            ):
                forked, place = await self._births.born(
                    fork,
                    plan,
                    seen_at=self._seen.setdefault(uid, boot_now()),
                    deadline=loop_now() + self._left(fork),
                )
        except LiveLimit as err:
            return await self._fail(fork, err.reason, err.message)
        match forked:
            case ForkResult():
                self._over(uid)
            case AtCapacity():
                return await self._put_off(fork, forked)
            case EngineError():
                return await self._fail(fork, *self._blame(forked, plan))
            case SecretUnreadable():
                return await self._fail(fork, forked.reason, forked.message)
            case BaseException():
                raise forked
        if isinstance(place, Exception):
            log.info("fork_not_adopted_yet uid=%s error=%r", uid, str(place))
        return 0.0  # The machines are noted. The next round goes on from here, adoption first.

    def _blame(self, error: EngineError, plan: Begin) -> tuple[Reason, str]:
        """A source that was ended on purpose is gone; one that ended by itself is lost."""
        gone = self._world.tree.doomed(plan.above.uid)
        if gone and isinstance(error, ParentLost | PointLost):
            kind = plan.above.kind.__name__.lower()
            return Reason.SOURCE_GONE, f"{kind} {plan.above.name} was deleted while it was forked"
        return error.reason, error.message

    # Answered ---------------------------------------------------------------------------------------------

    async def _answered(self, fork: Fork, record: ForkRecord) -> bool:
        """Hang the Fork in its tree, so that it can be told. False: its source is gone, and so is all."""
        if not await source_lives(self._world, record):
            why = f"{record.above_kind.lower()} {record.above_name} was deleted while it was forked"
            self._world.newborns.refused(record, why)
            await self._clear(fork)
            await self._fail(fork, Reason.SOURCE_GONE, why)
            return False
        await adopted(self._world, fork, record)
        if record.total_ms is None:
            record = msgspec.structs.replace(record, total_ms=(boot_now() - record.seen_at) * 1000)
            self._world.records.put_fork(record)
            if record.total_ms is not None and record.result is not None:
                mode = mode_of(record.result)
                self._world.metrics.fork_took(Road.OBJECT, mode, Stage.TOTAL, record.total_ms)
        return True

    @contextmanager
    def _writing_of(self, uid: Uid) -> Generator[None]:
        self._writing.add(uid)
        try:
            yield
        finally:
            self._writing.discard(uid)

    def _told_with_children(self, fork: Fork) -> bool:
        """Whether it is told in one write that a fork runs and that its children have objects.

        While many forks are written, the server is what they wait for, and each write more holds up all of
        them. What is awaited beside the children's objects, their commands or the many others of a large
        fork, is told of before.
        """
        replicas = fork.spec.replicas
        if fork.spec.score is not None or any(each.exec is not None for each in fork.spec.branches):
            return False
        return replicas == 0 or (replicas <= WRITES_AT_ONCE and len(self._writing) >= MANY_FORKS)

    def _has_children(self, uid: Uid) -> bool:
        """Whether a child has its object: then its fork ran, whatever its own object says of that yet."""
        return any(each.place.kind is Session for each in self._world.tree.below(uid))

    async def _mirror(self, uid: Uid) -> None:
        """Have the status say what became of the fork and of each child."""
        fork, record = self._world.forks.get(uid), self._world.records.fork(uid)
        if fork is None or record is None or record.result is None:
            return
        point = record.result.point_id
        status = fork_runs(
            fork,
            record,
            self._children.seen(fork, record),
            node=self._world.node,
            point_held=self._world.engine.holds(PointId(point)),
            complete=self._completion.done(fork, record),
            now=wall_now(),
            origin=self._world.settings.advertise_url,
        )
        written = await self._world.write_fork(fork, status)
        if status.phase is ForkPhase.COMPLETE and fork.status.phase is not ForkPhase.COMPLETE:
            self._world.announcer.say(Subject.of(written), EventReason.COMPLETE, news.complete(status))

    # Waiting and failing ----------------------------------------------------------------------------------

    async def _wait_for_source(self, fork: Fork, reason: Reason, message: str) -> float | None:
        self._world.waiting.for_source(fork.metadata.uid, source_name(fork), loop_now())
        if self._left(fork) <= 0:
            return await self._fail(fork, Reason.DEADLINE_EXCEEDED, f"{_limit(fork)}, still {message}")
        await self._world.write_fork(fork, fork_waits(fork, reason, message))
        return max(0.0, self._left(fork))

    async def _put_off(self, fork: Fork, refused: AtCapacity | JournalError) -> float | None:
        """Say what it waits for, and try again as long as it has time."""
        uid = fork.metadata.uid
        room = isinstance(refused, AtCapacity)
        if room:
            self._world.waiting.for_room(uid, loop_now())
        else:
            self._world.waiting.over(uid)
        fork = self._world.forks.get(uid) or fork
        left = self._left(fork)
        if left <= 0:
            why = "there was no room" if room else "it was not ready"
            reason = refused.reason if room else Reason.DEADLINE_EXCEEDED
            return await self._fail(fork, reason, f"{why} {_limit(fork)}: {refused.message}")
        message = f"waiting for room: {refused.message}" if room else refused.message
        await self._world.write_fork(fork, fork_waits(fork, refused.reason, message))
        if room and fork.status.reason is not Reason.AT_CAPACITY:
            self._world.announcer.say(Subject.of(fork), EventReason.AT_CAPACITY, message)
        return min(left, ROOM_RETRY_SECONDS)

    async def _too_late(self, fork: Fork) -> float | None:
        """Its time is over. That there was no room says more than that."""
        if self._world.waiting.lacks_room(fork.metadata.uid):
            return await self._fail(fork, Reason.AT_CAPACITY, f"there was no room {_limit(fork)}")
        # What it said last that it waits for is why, unless it was only slow.
        why = f": {fork.status.message}" if fork.status.message else ""
        return await self._fail(fork, Reason.DEADLINE_EXCEEDED, f"it was not ready {_limit(fork)}{why}")

    def _left(self, fork: Fork) -> float:
        """Seconds until it has to be ready."""
        return self._until.get(fork.metadata.uid, boot_now()) - boot_now()

    async def _doomed(self, fork: Fork, node: Node | None) -> float | None:
        """It or something above is deleted, and the garbage collector deletes what hangs there already."""
        deleting, phase = fork.metadata.deleting, fork.status.phase
        if phase is ForkPhase.FAILED:
            return None
        if not deleting and not phase.terminal and not fork.metadata.owner_references:
            return await self._fail(fork, Reason.SOURCE_GONE, "its source was deleted while it was forked")
        since = loop_now() if node is None or node.doomed_at is None else node.doomed_at
        left = grace_left(loop_now() - since, held=node is not None and self._world.held(node))
        if left > 0:
            return left
        if self._world.point(point_owner(fork.metadata.uid)) is not None:
            return HELD_GRACE_SECONDS  # It is just being ended, with all that goes.
        if not deleting and not phase.terminal:
            return await self._fail(fork, Reason.PARENT_LOST, BELOW_DELETED)
        reason, message = (None, DELETED) if deleting else (Reason.PARENT_LOST, BELOW_DELETED)
        children = self._children.left(fork)
        status = fork_ended(fork, children, reason=reason, message=message, now=wall_now())
        await self._world.write_fork(fork, status)
        return None

    async def _fail(self, fork: Fork, reason: Reason, message: str) -> float:
        """Say so for good. Until it is written nothing is tried again; then what is left may go."""
        uid = fork.metadata.uid
        self._verdicts.setdefault(uid, (reason, message))
        await self._pronounce(self._world.forks.get(uid) or fork)
        return 0.0

    async def _pronounce(self, fork: Fork) -> None:
        uid = fork.metadata.uid
        reason, message = self._verdicts[uid]
        if not fork.status.phase.terminal:
            if reason is not Reason.SOURCE_NOT_FOUND:
                await adopted_refused(self._world, fork)
                fork = self._world.forks.get(uid) or fork
            status = fork_fails(fork, reason, message, self._children.left(fork), wall_now())
            await self._world.write_fork(fork, status)
            self._world.metrics.fork_failed(reason)
            now = boot_now()
            self._world.traces.failed(fork, self._seen.get(uid, now), now, reason, message)
            log.error("fork_failed uid=%s reason=%s message=%r", uid, reason, message)
            self._world.announcer.say(Subject.of(fork), EventReason.FAILED, f"{reason}: {message}")
        self._over(uid)

    def _over(self, uid: Uid) -> None:
        self._verdicts.pop(uid, None)
        self._seen.pop(uid, None)
        self._until.pop(uid, None)
        self._births.over(uid)
        self._world.waiting.over(uid)

    async def _clear(self, fork: Fork) -> None:
        """End what this fork has that no Session object stands for, and forget that it was begun."""
        await end_loose(self._world, fork.metadata.uid, fork.spec.replicas)
        if self._world.records.fork(fork.metadata.uid) is not None:
            self._world.records.remove_fork(fork.metadata.uid)


def _unrouted(fork: Fork, record: ForkRecord | None) -> bool:
    """Whether its machines were here before it, and it does not say so yet: its first status will."""
    return fork.status.node is None and record is not None and record.born is not None


def _limit(fork: Fork) -> str:
    return f"within its timeoutSeconds of {fork.spec.timeout_seconds} s"
