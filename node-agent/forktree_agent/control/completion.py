"""The end of a fork that runs: who is pruned once every command is done, and how long its instant is held."""

from __future__ import annotations

import logging
from contextlib import suppress

import msgspec

from forktree.kube.errors import Conflict, NotFound
from forktree.models import Fork, ForkPhase, Session, Uid
from forktree.models.fork import KeepPoint, SourceRef
from forktree_agent.control.branch_records import Verdict
from forktree_agent.control.branches import show_score, unfinished
from forktree_agent.control.children import Children
from forktree_agent.control.decide_prune import Candidate, judge
from forktree_agent.control.fork_statuses import LIVE
from forktree_agent.control.owners import child_owner, is_early, point_owner
from forktree_agent.control.records import ForkRecord, SessionRecord
from forktree_agent.control.together import each_of
from forktree_agent.control.world import World

log = logging.getLogger(__name__)

DELETES_AT_ONCE = 8


class Completion:
    """Brings forks that run to their end. Every method may be called again after any crash."""

    def __init__(self, world: World, children: Children) -> None:
        self._world = world
        self._children = children

    async def advance(self, fork: Fork) -> None:
        """The next steps of a fork whose children all have their objects, as far as they can be done now.

        Raises `KubeError` where a deletion is not known to be accepted; calling it again asks again.
        """
        uid = fork.metadata.uid
        record = self._world.records.fork(uid)
        if record is None or record.result is None:
            return
        indexes = range(len(record.result.children))
        if any(unfinished(self._world, fork, index) for index in indexes):
            self._world.branch_work.poke(uid)
            return
        verdict = record.verdict
        if verdict is None:
            for index in indexes:
                show_score(self._world, uid, index)  # An agent before us may have noted no more than its end.
            # Decided once: from here on no other score and no other fork changes who goes.
            verdict = self._judged(fork, record)
            self._world.records.put_fork(msgspec.structs.replace(record, verdict=verdict))
        if not verdict.pruned:
            await self._prune(fork, verdict)

    def done(self, fork: Fork, record: ForkRecord) -> bool:
        """Whether all is done, and nothing is left of those who lost."""
        verdict = record.verdict
        if verdict is None or not verdict.pruned:
            return False
        uid = fork.metadata.uid
        return not any(
            self._object(uid, index) or self._world.machine(child_owner(uid, index))
            for index in verdict.losers
        )

    async def let_go(self, fork: Fork) -> bool:
        """Drop the instant of a fork that is complete, once nobody is left who came from it.

        Returns whether it did.
        """
        record = self._world.records.fork(fork.metadata.uid)
        if record is None or record.result is None or self._wanted(fork, record):
            return False
        if fork.spec.source.fork is not None:
            self._world.fork_work.poke(record.above)  # The instant is that one's, who may have waited for us.
            return False
        if not record.point_dropped:
            self._world.records.put_fork(msgspec.structs.replace(record, point_dropped=True))
        return await self._drop(fork)

    async def let_go_forgotten(self, fork: Fork) -> None:
        """Drop the instant of a fork whose record is lost, once nobody else's children start from it."""
        if self._wanted(fork, None):
            return
        above = fork.status.parent_uid
        if fork.spec.source.fork is None:
            await self._drop(fork)
        elif above is not None:
            self._world.fork_work.poke(above)

    async def _drop(self, fork: Fork) -> bool:
        point = self._world.point(point_owner(fork.metadata.uid))
        if point is None:
            return False
        log.info("instant_let_go uid=%s bytes=%d", fork.metadata.uid, point.bytes)
        await self._world.engine.drop_point(point.id)
        self._world.room_changed()
        for other in self._world.forks.all():
            if other.status.fork_point_id == point.id and other is not fork:
                self._world.fork_work.poke(other.metadata.uid)
        return True

    # Judging and pruning ----------------------------------------------------------------------------------

    def _judged(self, fork: Fork, record: ForkRecord) -> Verdict:
        prune = fork.spec.prune
        candidates = [
            Candidate(
                index=index,
                score=child.score,
                alive=child.phase in LIVE,
                present=self._object(fork.metadata.uid, index) is not None,
                # Asks all forks of the node, and without pruning nobody wants to know.
                forked=prune is not None and self._forked(fork.metadata.uid, index),
            )
            for index, child in enumerate(self._children.seen(fork, record))
        ]
        verdict = judge(candidates, None if prune is None else prune.keep_top)
        log.info(
            "judged uid=%s children=%d losers=%d", fork.metadata.uid, len(candidates), len(verdict.losers)
        )
        return verdict

    async def _prune(self, fork: Fork, verdict: Verdict) -> None:
        """Delete the losers' objects, and note which they were in the end: one may have been forked since."""
        deleted = await each_of(
            verdict.losers, lambda index: self._delete(fork.metadata.uid, index), at_once=DELETES_AT_ONCE
        )
        record = self._world.records.fork(fork.metadata.uid)
        if record is not None:
            losers = tuple(index for index, gone in zip(verdict.losers, deleted, strict=True) if gone)
            verdict = msgspec.structs.replace(verdict, losers=losers, pruned=True)
            self._world.records.put_fork(msgspec.structs.replace(record, verdict=verdict))

    async def _delete(self, fork: Uid, index: int) -> bool:
        child = self._world.records.session(child_owner(fork, index))
        if child is None or child.uid is None or child.ended:
            return True
        if self._forked(fork, index):
            return False
        with suppress(NotFound, Conflict):  # Gone already, perhaps by an agent before us.
            await self._world.client.delete(Session, child.namespace, child.name, uid=child.uid)
        return True

    def _object(self, fork: Uid, index: int) -> SessionRecord | None:
        """What is noted of a child whose object is there."""
        child = self._world.records.session(child_owner(fork, index))
        if child is None or child.uid is None or child.ended or self._world.sessions.gone(child.uid):
            return None
        return child

    def _forked(self, fork: Uid, index: int) -> bool:
        """Whether something was forked from a child, or is about to be."""
        child = self._object(fork, index)
        if child is None:
            return False
        return any(
            _starts_from(other, other.spec.source.session, child.namespace, child.name, child.uid)
            for other in self._world.forks.all()
        ) or any(is_early(other.uid) and other.above == child.uid for other in self._world.records.forks())

    # The instant ------------------------------------------------------------------------------------------

    def _wanted(self, fork: Fork, record: ForkRecord | None) -> bool:
        """Whether the instant of a fork is to be held, for itself or for those that started from it."""
        if record is None and fork.status.parent_uid is not None:
            return self._wanted_below(fork)  # Nothing can start from it any more, only from those.
        if fork.spec.keep_point is KeepPoint.ALWAYS or not fork.spec.replicas:
            return True
        if record is None or record.result is None or fork.status.phase is not ForkPhase.COMPLETE:
            return True  # On its way to having children.
        uid = fork.metadata.uid
        if any(self._object(uid, index) is not None for index in range(len(record.result.children))):
            return True
        return self._wanted_below(fork)

    def _wanted_below(self, fork: Fork) -> bool:
        return any(
            self._wanted(each, self._world.records.fork(each.metadata.uid)) for each in self._from(fork)
        )

    def _from(self, fork: Fork) -> list[Fork]:
        """Forks that started, or are to start, from the instant of `fork`."""
        meta = fork.metadata
        return [
            other
            for other in self._world.forks.all()
            if _starts_from(other, other.spec.source.fork, meta.namespace, meta.name, meta.uid)
        ]


def _starts_from(
    fork: Fork, source: SourceRef | None, namespace: str | None, name: str, uid: Uid | None
) -> bool:
    """Whether `source`, by which `fork` asks for its source, means that object, and the fork still counts."""
    return (
        source is not None
        and source.name == name
        and fork.metadata.namespace == namespace
        and source.uid in {None, uid}
        and fork.status.phase is not ForkPhase.FAILED
        and not fork.metadata.deleting
    )
