"""Opening a session: create its object, wait until its machine runs, answer; or leave nothing behind."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from http import HTTPStatus

from forktree.kube.client import KubeClient
from forktree.kube.errors import AlreadyExists, NotFound
from forktree.models import ObjectMeta, Reason, Session, SessionPhase, SessionSpec, SessionTemplate
from forktree.models.session import TemplateRef
from forktree.wire import CreateSession, SessionCreated
from forktree_agent.http.discarding import created, discard
from forktree_agent.http.errors import Code, Refusal, refusal_for
from forktree_agent.http.forking import variables
from forktree_agent.http.trace_context import annotated
from forktree_agent.http.waiting import Vanished, until

WAIT_SECONDS = 110.0
"""Existing clients give up on a create after 120 s; they should hear why first."""


async def open_session(
    client: KubeClient,
    namespace: str,
    request: CreateSession,
    *,
    seen: float,
    annotations: Mapping[str, str] | None = None,
    node: str | None = None,
    unless_full: bool = False,
) -> tuple[SessionCreated, HTTPStatus]:
    """A running session: 201 if this call made its object, 200 if an earlier call of that name did.

    `node`: where it is to run, which only the agent there can say; None: wherever the operator puts it.
    `unless_full`: do not wait where no node has room, and say `at_capacity`.

    `seen`: when the request was, monotonic seconds. On any refusal after this call made the object, that is
    deleted again; the one exception is a named session that is still on its way at the deadline, which the
    same call can be repeated for.
    """
    deadline = seen + WAIT_SECONDS
    session, made = await _object(client, namespace, request, annotations or {}, node)
    keep = not made
    try:
        session = await until(
            client,
            session,
            lambda seen: _settled(seen) or (unless_full and seen.status.reason is Reason.UNSCHEDULED),
            deadline=deadline,
        )
        if not _lives(session):
            raise _refused(session)
        keep = True
    except Vanished as err:
        raise Refusal(
            Code.SESSION_GONE, f"session {session.metadata.name} was deleted as it started"
        ) from err
    except TimeoutError as err:
        keep = keep or request.name is not None
        sentence = f"session {session.metadata.name} does not run after {WAIT_SECONDS:g} seconds"
        raise Refusal(Code.DEADLINE_EXCEEDED, sentence) from err
    finally:
        if not keep:
            await discard(client, session)
    status = session.status
    answer = SessionCreated(
        session_id=session.metadata.name,
        template_id=request.template_id,
        fork_time_ms=status.fork_ms,
        create_time_ms=round((time.monotonic() - seen) * 1000, 3),
        node=status.node,
        mode=status.mode,
        level=status.level,
    )
    return answer, HTTPStatus.CREATED if made else HTTPStatus.OK


async def _object(
    client: KubeClient,
    namespace: str,
    request: CreateSession,
    annotations: Mapping[str, str],
    node: str | None,
) -> tuple[Session, bool]:
    """The session's object, and whether this call made it."""
    try:
        await client.get(SessionTemplate, namespace, request.template_id)
    except NotFound as err:
        sentence = f"there is no template {request.template_id} in the namespace {namespace}"
        raise Refusal(Code.NO_TEMPLATE, sentence) from err
    wanted = Session(
        metadata=ObjectMeta(
            name=request.name or f"sess-{secrets.token_hex(8)}",
            namespace=namespace,
            labels=request.labels,
            annotations=annotated(annotations),
        ),
        spec=SessionSpec(
            template_ref=TemplateRef(name=request.template_id),
            node_name=node,
            seed=request.seed,
            env=variables(request.env),
        ),
    )
    try:
        return await created(client, wanted), True
    except AlreadyExists as err:
        try:
            present = await client.get(Session, namespace, wanted.metadata.name)
        except NotFound:
            sentence = f"session {wanted.metadata.name} is being deleted; ask again"
            raise Refusal(Code.CONFLICT, sentence) from err
        if not _same(present, wanted):
            sentence = (
                f"a session {wanted.metadata.name} exists already and is not of this template, or is told"
                " something else"
            )
            raise Refusal(Code.CONFLICT, sentence) from err
        return present, False


def _same(present: Session, wanted: Session) -> bool:
    """Its labels may be changed later, so only those asked for must be there."""
    ours, theirs = wanted.spec, present.spec
    return (ours.template_ref, ours.seed, ours.env) == (
        theirs.template_ref,
        theirs.seed,
        theirs.env,
    ) and wanted.metadata.labels.items() <= present.metadata.labels.items()


def _settled(session: Session) -> bool:
    status = session.status
    if session.metadata.deleting or status.phase.terminal:
        return True
    return _lives(session) or status.reason is Reason.AT_CAPACITY


def _lives(session: Session) -> bool:
    """It has a machine that answered. One that somebody has paused at once is the caller's all the same."""
    return session.status.phase in {SessionPhase.RUNNING, SessionPhase.PAUSED}


def _refused(session: Session) -> Refusal:
    name, status = session.metadata.name, session.status
    if session.metadata.deleting:
        return Refusal(Code.SESSION_GONE, f"session {name} is being deleted")
    if status.phase is SessionPhase.RELEASED:
        return Refusal(Code.SESSION_GONE, f"session {name} was released")
    if status.reason is Reason.UNSCHEDULED:
        return Refusal(Code.AT_CAPACITY, f"session {name} finds no room: {status.message}")
    return refusal_for(status.reason, status.message, f"session {name}")
