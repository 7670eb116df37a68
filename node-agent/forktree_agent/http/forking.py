"""Forking a session: create the Fork object, wait until every child runs, answer with all of them."""

from __future__ import annotations

import asyncio
import secrets
from http import HTTPStatus

from forktree.kube.client import KubeClient
from forktree.kube.errors import AlreadyExists, NotFound
from forktree.models import Fork, ForkPhase, ForkSpec, ObjectMeta, Reason, Session
from forktree.models.fork import ForkSource, SourceRef
from forktree.wire import ForkedChild, ForkSession, SessionForked
from forktree_agent.http.describing import template_name
from forktree_agent.http.discarding import discard
from forktree_agent.http.errors import Code, Refusal, refusal_for
from forktree_agent.http.waiting import Vanished, until

ALL_RUN = {ForkPhase.RUNNING, ForkPhase.COMPLETE}

WAIT_SECONDS = 110.0
"""Existing clients give up on a fork after 120 s; they should hear why first."""


async def fork_session(
    client: KubeClient, namespace: str, session_id: str, request: ForkSession, *, seen: float
) -> tuple[SessionForked, HTTPStatus]:
    """Children that all run: 201 if this call made the Fork object, 200 if an earlier call of that name did.

    `seen`: when the request was, in loop time. A fork that fails or finds no room leaves no object. A caller
    that goes away does not stop it.
    """
    loop = asyncio.get_running_loop()
    deadline = seen + WAIT_SECONDS
    parent = await _parent(client, namespace, session_id)
    fork, made = await _object(client, parent, request)
    refused = False
    try:
        fork = await until(client, fork, _settled, deadline=deadline)
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
    total_ms = (loop.time() - seen) * 1000
    return _answer(fork, parent, template, total_ms), HTTPStatus.CREATED if made else HTTPStatus.OK


async def _parent(client: KubeClient, namespace: str, session_id: str) -> Session:
    try:
        parent = await client.get(Session, namespace, session_id)
    except NotFound as err:
        sentence = f"there is no session {session_id} in the namespace {namespace}"
        raise Refusal(Code.NO_SUCH_SESSION, sentence) from err
    if parent.status.phase.terminal or parent.metadata.deleting:
        raise Refusal(Code.SESSION_GONE, f"session {session_id} no longer runs")
    return parent


async def _object(client: KubeClient, parent: Session, request: ForkSession) -> tuple[Fork, bool]:
    """The fork's object, and whether this call made it."""
    source = parent.metadata
    wanted = Fork(
        metadata=ObjectMeta(name=request.name or f"f-{secrets.token_hex(8)}", namespace=source.namespace),
        spec=ForkSpec(
            source=ForkSource(session=SourceRef(name=source.name, uid=source.uid)), replicas=request.replicas
        ),
    )
    try:
        return await client.create(wanted), True
    except AlreadyExists as err:
        name = wanted.metadata.name
        try:
            present = await client.get(Fork, source.namespace, name)
        except NotFound:
            raise Refusal(Code.CONFLICT, f"fork {name} is being deleted; ask again") from err
        if not _same(present, wanted):
            sentence = f"a fork {name} exists already, of another session or with other replicas"
            raise Refusal(Code.CONFLICT, sentence) from err
        return present, False


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
        pause_time_ms=status.pause_ms,
        ready_time_ms=status.ready_ms,
        children=children,
    )
