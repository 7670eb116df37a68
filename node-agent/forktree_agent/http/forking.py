"""Forking a session: at once, with its objects to follow; or by a Fork object that is waited for.

The second is for whoever asks for it, and for what the first cannot do: a session that this node does not
know yet, or that does not run yet, and more forks at once than the API server keeps up with.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from http import HTTPStatus

from forktree.kube.client import KubeClient
from forktree.kube.errors import AlreadyExists, NotFound
from forktree.models import Fork, ForkPhase, ForkSpec, ObjectMeta, Reason, Session
from forktree.models.fork import ForkSource, SourceRef
from forktree.wire import ForkedChild, SessionForked
from forktree_agent.control.early import Forked, NameTaken, Refused
from forktree_agent.control.facade import Facade
from forktree_agent.control.records import ForkRecord
from forktree_agent.http.describing import template_name
from forktree_agent.http.discarding import discard
from forktree_agent.http.errors import Code, Refusal, refusal_for
from forktree_agent.http.naming import any_name
from forktree_agent.http.waiting import Vanished, until

ALL_RUN = {ForkPhase.RUNNING, ForkPhase.COMPLETE}

WAIT_SECONDS = 110.0
"""Existing clients give up on a fork after 120 s; they should hear why first."""

Answered = tuple[SessionForked, HTTPStatus]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What is asked for."""

    namespace: str
    session_id: str
    replicas: int
    name: str | None
    """None: any."""
    called: str
    """The fork in a sentence: `fork a`."""
    seen: float
    """When the request was, in monotonic seconds."""

    @property
    def deadline(self) -> float:
        return self.seen + WAIT_SECONDS


async def fork_at_once(facade: Facade, parent: Session, wanted: Wanted) -> Answered | None:
    """Children that all run, without a word to the API server: 201, or 200 where an earlier call made them.

    None where only an object can do it. A caller that goes away does not stop it. Raises `Refusal`.
    """
    name = wanted.name or any_name(facade.node_name)
    outcome = await facade.early.fork(
        parent, name, wanted.replicas, seen_at=wanted.seen, deadline=wanted.deadline
    )
    match outcome:
        case None:
            return None
        case NameTaken():
            raise _taken(wanted)
        case Refused(reason=reason, message=message):
            raise refusal_for(reason, message, f"fork {name}")
        case Forked(record=record, made=made):
            total_ms = (time.monotonic() - wanted.seen) * 1000
            answer = _early_answer(record, parent, facade.template_name(parent), total_ms)
            return answer, HTTPStatus.CREATED if made else HTTPStatus.OK


async def fork_by_object(client: KubeClient, facade: Facade, wanted: Wanted) -> Answered:
    """Children that all run and have their objects: 201 if this call made the Fork object, 200 if an earlier
    call of that name did.

    A fork that fails or finds no room leaves no object. A caller that goes away does not stop it.
    """
    if wanted.name is not None:
        await _written(facade, wanted)
    parent = await _parent(client, wanted)
    fork, made = await _object(client, facade.node_name, parent, wanted)
    refused = False
    try:
        fork = await until(client, fork, _settled, deadline=wanted.deadline)
        if fork.status.phase not in ALL_RUN:
            refused = True
            raise _refused(fork)
    except Vanished as err:
        raise Refusal(Code.SESSION_GONE, f"fork {fork.metadata.name} was deleted as it started") from err
    except TimeoutError as err:
        sentence = f"fork {fork.metadata.name} is not complete after {WAIT_SECONDS:g} seconds"
        raise Refusal(Code.DEADLINE_EXCEEDED, sentence) from err
    finally:
        if made and refused:
            await discard(client, fork)
    template = await template_name(client, parent)
    total_ms = (time.monotonic() - wanted.seen) * 1000
    return _answer(fork, parent, template, total_ms), HTTPStatus.CREATED if made else HTTPStatus.OK


async def _written(facade: Facade, wanted: Wanted) -> None:
    """Until the object is there of a fork of that name that was made at once, if there is one."""
    assert wanted.name is not None
    try:
        async with asyncio.timeout_at(wanted.deadline):
            await facade.early.recorded(wanted.namespace, wanted.name)
    except TimeoutError as err:
        sentence = f"the API server has not taken the object of {wanted.called} yet"
        raise Refusal(Code.DEADLINE_EXCEEDED, sentence) from err


async def _parent(client: KubeClient, wanted: Wanted) -> Session:
    namespace, session_id = wanted.namespace, wanted.session_id
    try:
        parent = await client.get(Session, namespace, session_id)
    except NotFound as err:
        sentence = f"there is no session {session_id} in the namespace {namespace}"
        raise Refusal(Code.NO_SUCH_SESSION, sentence) from err
    if parent.status.phase.terminal or parent.metadata.deleting:
        raise Refusal(Code.SESSION_GONE, f"session {session_id} no longer runs")
    return parent


async def _object(client: KubeClient, node: str, parent: Session, asked: Wanted) -> tuple[Fork, bool]:
    """The fork's object, and whether this call made it."""
    source = parent.metadata
    wanted = Fork(
        metadata=ObjectMeta(name=asked.name or any_name(node), namespace=source.namespace),
        spec=ForkSpec(
            source=ForkSource(session=SourceRef(name=source.name, uid=source.uid)), replicas=asked.replicas
        ),
    )
    try:
        return await client.create(wanted), True
    except AlreadyExists as err:
        try:
            present = await client.get(Fork, source.namespace, wanted.metadata.name)
        except NotFound:
            raise Refusal(Code.CONFLICT, f"the {asked.called} is being deleted; ask again") from err
        if not _same(present, wanted):
            raise _taken(asked) from err
        return present, False


def _taken(wanted: Wanted) -> Refusal:
    sentence = f"a {wanted.called} exists already, of another session or with other replicas"
    return Refusal(Code.CONFLICT, sentence)


def _same(present: Fork, wanted: Fork) -> bool:
    """A fork made by kubectl may name its source without the uid; `parentUID` then says which it was."""
    theirs, ours = present.spec.source.session, wanted.spec.source.session
    if theirs is None or ours is None or theirs.name != ours.name:
        return False
    return (theirs.uid or present.status.parent_uid) in (ours.uid, None) and (
        present.spec.replicas == wanted.spec.replicas
    )


def _settled(fork: Fork) -> bool:
    """Failed, without room, or running with every child's object made: only then can a caller use each."""
    status = fork.status
    if fork.metadata.deleting or status.phase is ForkPhase.FAILED:
        return True
    if status.phase in ALL_RUN:
        return (status.recorded or 0) >= fork.spec.replicas
    return status.reason is Reason.AT_CAPACITY


def _refused(fork: Fork) -> Refusal:
    if fork.metadata.deleting:
        return Refusal(Code.SESSION_GONE, f"fork {fork.metadata.name} is being deleted")
    return refusal_for(fork.status.reason, fork.status.message, f"fork {fork.metadata.name}")


def _early_answer(record: ForkRecord, parent: Session, template: str, total_ms: float) -> SessionForked:
    made = record.result
    assert made is not None
    children = tuple(
        ForkedChild(session_id=record.child_name(index), index=index, mode=child.mode, level=child.level)
        for index, child in enumerate(made.children)
    )
    return SessionForked(
        session_id=children[0].session_id if children else None,
        parent_session_id=parent.metadata.name,
        template_id=template,
        fork_id=record.name,
        recorded=False,
        fork_time_ms=round(made.fork_ms, 3),
        total_time_ms=round(total_ms, 3),
        pause_time_ms=None if made.pause_ms is None else round(made.pause_ms, 3),
        ready_time_ms=None if made.ready_ms is None else round(made.ready_ms, 3),
        children=children,
    )


def _answer(fork: Fork, parent: Session, template: str, total_ms: float) -> SessionForked:
    status = fork.status
    children = tuple(
        ForkedChild(
            session_id=child.name,
            index=child.index,
            mode=child.mode,
            level=child.level,
        )
        for child in sorted(status.children, key=lambda child: child.index)
    )
    return SessionForked(
        session_id=children[0].session_id if children else None,
        parent_session_id=parent.metadata.name,
        template_id=template,
        fork_time_ms=status.fork_ms,
        total_time_ms=round(total_ms, 3),
        fork_id=fork.metadata.name,
        recorded=True,
        pause_time_ms=status.pause_ms,
        ready_time_ms=status.ready_ms,
        children=children,
    )
