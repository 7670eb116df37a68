"""What a caller may change in a session: its numbers, and what it is asked to be."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

from forktree.kube.errors import NotFound
from forktree.models import Session, SessionPhase, SessionState
from forktree.wire import SessionInfo
from forktree.wire_trees import SetScore
from forktree_agent.http.describing import describe_one
from forktree_agent.http.errors import Code, Refusal
from forktree_agent.http.locating import no_such_session
from forktree_agent.http.naming import FOR_CALLERS
from forktree_agent.http.table import Asked
from forktree_agent.http.waiting import Vanished, until

STATE_SECONDS = 60.0
"""For a machine to stand still, to go on or to end: milliseconds, unless its node is behind."""

SCORE_SECONDS = 5.0
"""For the node's agent to say what counts, once a user's number is taken back."""

_THERE = {
    SessionState.RUNNING: SessionPhase.RUNNING,
    SessionState.PAUSED: SessionPhase.PAUSED,
    SessionState.RELEASED: SessionPhase.RELEASED,
}


async def score(asked: Asked, session: Session, wanted: SetScore) -> SessionInfo:
    """The session with its new numbers. Raises `Refusal`, and what the API server says."""
    given: dict[str, object] = {}
    takes_back = "score" in wanted.model_fields_set and wanted.score is None
    if "score" in wanted.model_fields_set:
        given["score"] = wanted.score
    if wanted.rewards:
        given["rewards"] = wanted.rewards
    if not given:
        raise Refusal(Code.BAD_REQUEST, "give `score` or `rewards`")
    session = await _patched(asked, session, given)
    if takes_back:
        session = await _said(asked, session)
    return await describe_one(asked.client, asked.facade, session, datetime.now(UTC))


async def _said(asked: Asked, session: Session) -> Session:
    """Once its agent has said what its score is now; as it is where that takes too long."""
    generation = session.metadata.generation
    try:
        return await until(
            asked.client,
            session,
            lambda seen: (seen.status.observed_generation or 0) >= generation or seen.status.phase.terminal,
            deadline=asyncio.get_running_loop().time() + SCORE_SECONDS,
        )
    except (Vanished, TimeoutError):
        return session


async def become(asked: Asked, session: Session, state: SessionState) -> SessionInfo:
    """The session once it is so. Raises `Refusal`, and what the API server says."""
    name, phase = session.metadata.name, session.status.phase
    if phase.terminal and phase is not _THERE[state]:
        raise Refusal(Code.SESSION_GONE, session.status.message or f"session {name} is {phase}")
    if session.spec.state is not state:
        session = await _patched(asked, session, {"state": state})
    try:
        session = await until(
            asked.client,
            session,
            lambda seen: seen.status.phase is _THERE[state] or seen.status.phase.terminal,
            deadline=asyncio.get_running_loop().time() + STATE_SECONDS,
        )
    except Vanished as err:
        raise Refusal(Code.SESSION_GONE, f"session {name} was deleted meanwhile") from err
    except TimeoutError as err:
        sentence = f"session {name} is not {_THERE[state]} after {STATE_SECONDS:g} seconds"
        raise Refusal(Code.DEADLINE_EXCEEDED, sentence) from err
    if session.status.phase is not _THERE[state]:
        sentence = session.status.message or f"session {name} is {session.status.phase}"
        raise Refusal(Code.SESSION_GONE, sentence)
    return await describe_one(asked.client, asked.facade, session, datetime.now(UTC))


async def _patched(asked: Asked, session: Session, spec: dict[str, object]) -> Session:
    """Of exactly this session, and not another of its name."""
    metadata = session.metadata
    body = {"metadata": {"uid": metadata.uid}, "spec": spec}
    try:
        return await asked.client.merge_patch(
            Session, metadata.namespace, metadata.name, body, manager=FOR_CALLERS
        )
    except NotFound as err:
        raise no_such_session(metadata.name, asked.namespace) from err
