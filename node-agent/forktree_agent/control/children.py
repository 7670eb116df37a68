"""The Session objects of a fork's children: written after their machines run, and what became of each."""

from __future__ import annotations

import logging
from dataclasses import replace

from forktree.kube.errors import AlreadyExists, Forbidden, Invalid, NoRight, NotFound
from forktree.kube.events import Subject
from forktree.models import EventReason, Fork, ObjectMeta, Reason, Session, SessionPhase, SessionSpec
from forktree.models.fork import ForkChild
from forktree.models.names import FORK_LABEL, ROOT_LABEL
from forktree.models.session import ForkRef
from forktree.models.session_template import EnvVar
from forktree_agent.control.decide_fork import told
from forktree_agent.control.fork_statuses import LIVE, ChildSeen
from forktree_agent.control.noting import bound
from forktree_agent.control.owners import child_owner
from forktree_agent.control.records import ForkRecord, SessionRecord
from forktree_agent.control.statuses import score_of
from forktree_agent.control.together import each_of
from forktree_agent.control.world import World
from forktree_agent.engine.contract import Owner

log = logging.getLogger(__name__)

WRITES_AT_ONCE = 8
"""Of one fork. A server takes some hundred a second of all nodes together."""


class Children:
    """Children of forks that are done."""

    def __init__(self, world: World) -> None:
        self._world = world

    async def record(self, fork: Fork, record: ForkRecord) -> None:
        """Write the objects that are missing. A child whose object is refused is ended; the others stay.

        Raises `KubeError` when it is not known of some whether they were written; calling it again finds out.
        """
        made = record.result
        assert made is not None
        missing = [
            index
            for index in range(len(made.children))
            if self._world.records.session(child_owner(fork.metadata.uid, index)) is None
        ]
        await each_of(missing, lambda index: self._record_one(fork, record, index), at_once=WRITES_AT_ONCE)

    def seen(self, fork: Fork, record: ForkRecord) -> list[ChildSeen]:
        """What became of each child, as far as this node knows."""
        made = record.result
        assert made is not None
        owners = [child_owner(fork.metadata.uid, index) for index in range(len(made.children))]
        return [
            self._judged(fork, record, index, self._seen(owner, runs=self._runs(owner)))
            for index, owner in enumerate(owners)
        ]

    def left(self, fork: Fork) -> tuple[ForkChild, ...]:
        """What the status of `fork` says of its children, made true for one whose record is gone."""
        return tuple(
            self._left(fork, each, runs=self._runs(child_owner(fork.metadata.uid, each.index)))
            if each.phase in LIVE
            else each
            for each in fork.status.children
        )

    def _runs(self, owner: Owner) -> bool:
        return self._world.machine(owner) is not None

    def _left(self, fork: Fork, child: ForkChild, *, runs: bool) -> ForkChild:
        session = self._world.sessions.named(fork.metadata.namespace or "", child.name)
        reference = None if session is None else session.spec.fork_ref
        if session is None or reference is None or reference.uid != fork.metadata.uid:
            return _without_machine(child, SessionPhase.RELEASED)
        if session.status.phase.terminal:
            return _without_machine(child, session.status.phase, session.status.reason)
        if runs:
            still = session.status.phase is SessionPhase.PAUSED
            return child.model_copy(update={"phase": SessionPhase.PAUSED if still else SessionPhase.RUNNING})
        if self._world.tree.doomed(session.metadata.uid):
            return _without_machine(child, SessionPhase.RELEASED)
        return _without_machine(child, SessionPhase.FAILED, Reason.MACHINE_LOST)

    def _judged(self, fork: Fork, record: ForkRecord, index: int, child: ChildSeen) -> ChildSeen:
        """`child`, with what came of its branch."""
        branch = self._world.records.branch(fork.metadata.uid, index)
        trouble = None if branch is None else branch.unscored
        pruned = (
            record.verdict is not None
            and index in record.verdict.losers
            and child.phase is SessionPhase.RELEASED
        )
        reason = child.reason or (None if trouble is None else trouble.reason)
        return replace(
            child,
            reason=reason or (Reason.PRUNED if pruned else None),
            score=self._score(fork, index),
            exit_code=None if branch is None or branch.exec is None else branch.exec.exit_code,
            unscored=None if trouble is None else trouble.message,
        )

    def _score(self, fork: Fork, index: int) -> float | None:
        """The number that counts; of a child that is gone, the last one that was told."""
        child = self._world.records.session(child_owner(fork.metadata.uid, index))
        session = None if child is None or child.uid is None else self._world.sessions.get(child.uid)
        if session is not None:
            return score_of(session, child)
        told = next((each.score for each in fork.status.children if each.index == index), None)
        return told if told is not None or child is None else child.scored

    def _seen(self, owner: Owner, *, runs: bool) -> ChildSeen:
        child = self._world.records.session(owner)
        if child is None:
            if runs:
                return ChildSeen(phase=SessionPhase.RUNNING, recorded=False)
            return ChildSeen(phase=SessionPhase.FAILED, recorded=False, reason=Reason.MACHINE_LOST)
        if child.uid is None:
            return ChildSeen(
                phase=SessionPhase.FAILED, recorded=False, reason=Reason.INVALID, refusal=child.lost
            )
        session = self._world.sessions.get(child.uid)
        if session is not None and session.status.phase.terminal:
            return ChildSeen(phase=session.status.phase, recorded=True, reason=session.status.reason)
        if child.ended or self._world.sessions.gone(child.uid):
            return ChildSeen(phase=SessionPhase.RELEASED, recorded=True)
        if runs:
            still = session is not None and session.status.phase is SessionPhase.PAUSED
            return ChildSeen(phase=SessionPhase.PAUSED if still else SessionPhase.RUNNING, recorded=True)
        return ChildSeen(phase=SessionPhase.FAILED, recorded=True, reason=Reason.MACHINE_LOST)

    async def _record_one(self, fork: Fork, record: ForkRecord, index: int) -> None:
        wanted = _child(fork, record, index, self._world.node)
        try:
            session = await self._world.client.create(wanted)
        except AlreadyExists:
            session = await self._existing(wanted)
            if not _is_ours(session, wanted):
                await self._refused(
                    fork, record, index, f"the name {wanted.metadata.name} is taken by another Session"
                )
                return
        except NoRight:
            raise  # Of a server that has just started, most likely: the machine is somebody's.
        except (Forbidden, Invalid) as err:
            await self._refused(fork, record, index, err.message)
            return
        if self._world.records.session(child_owner(fork.metadata.uid, index)) is None:
            newest = self._world.records.fork(record.uid) or record
            self._world.records.put_session(bound(session, newest, index))
        self._world.newborns.recorded(session)
        # Its own worker writes its status.
        self._world.observed(session)

    async def _existing(self, wanted: Session) -> Session:
        try:
            return await self._world.client.get(Session, wanted.metadata.namespace, wanted.metadata.name)
        except NotFound as err:
            raise AlreadyExists(f"{wanted.metadata.name} was just deleted; it is tried again") from err

    async def _refused(self, fork: Fork, record: ForkRecord, index: int, why: str) -> None:
        """A late refusal ends only this child."""
        owner = child_owner(fork.metadata.uid, index)
        log.error("child_refused fork=%s index=%d error=%r", fork.metadata.uid, index, why)
        self._world.announcer.say(
            Subject.of(fork), EventReason.REJECTED, f"child {index} has no object and was ended: {why}"
        )
        self._world.records.put_session(
            SessionRecord(
                owner=owner,
                uid=None,
                namespace=record.namespace,
                name=record.child_name(index),
                lineage=record.lineage,
                seen_at=record.seen_at,
                lost=why,
                ended=True,
            )
        )
        self._world.newborns.refused(record, f"it has no object and was ended: {why}", (index,))
        machine = self._world.machine(owner)
        if machine is not None:
            await self._world.engine.release(machine.id)
            self._world.room_changed()


def _child(fork: Fork, record: ForkRecord, index: int, node: str) -> Session:
    uid, branch = fork.metadata.uid, fork.spec.branch(index)
    return Session(
        metadata=ObjectMeta(
            name=record.child_name(index),
            namespace=fork.metadata.namespace,
            labels={**branch.labels, ROOT_LABEL: record.lineage.root, FORK_LABEL: fork.metadata.name},
            owner_references=(fork.owner_reference(),),
        ),
        spec=SessionSpec(
            fork_ref=ForkRef(name=fork.metadata.name, uid=uid, index=index),
            node_name=node,
            seed=record.seeds[index] if record.seeds else None,
            env=told((EnvVar.model_validate(each) for each in record.parent_env), branch),
        ),
    )


def _is_ours(found: Session, wanted: Session) -> bool:
    """Whether `found` is the object that an agent before this one wrote, and not another of its name."""
    return found.spec.fork_ref == wanted.spec.fork_ref


def _without_machine(child: ForkChild, phase: SessionPhase, reason: Reason | None = None) -> ForkChild:
    """The same once its machine is gone. A reason that it had stays where there is none."""
    told = {"phase": phase, "reason": reason or child.reason, "endpoint": None}
    return child.model_copy(update=told)
