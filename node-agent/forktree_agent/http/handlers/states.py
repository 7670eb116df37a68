"""What a session is asked to be, what it counts for, and that somebody still cares for its tree."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from http import HTTPStatus
from typing import Final

from aiohttp import web

from forktree.models import SessionState
from forktree.wire import SessionInfo
from forktree.wire_trees import Heartbeat, HeartbeatHeard, Nothing, SetScore
from forktree_agent.http import bodies, changing, finding, heartbeats
from forktree_agent.http.table import Asked, Right, Route

_CHANGE: Final = (Right("patch", "sessions"),)


async def _score(asked: Asked) -> web.StreamResponse:
    wanted = await asked.body(SetScore)
    session = await finding.session_or_answer(asked, "score")
    if isinstance(session, web.StreamResponse):
        return session
    return await bodies.answer(await changing.score(asked, session, wanted))


async def _become(asked: Asked, *, state: SessionState, word: str) -> web.StreamResponse:
    await asked.body(Nothing)
    session = await finding.session_or_answer(asked, word)
    if isinstance(session, web.StreamResponse):
        return session
    return await bodies.answer(await changing.become(asked, session, state))


async def _heartbeat(asked: Asked) -> web.StreamResponse:
    wanted = await asked.body(Heartbeat)
    session = await finding.session_or_answer(asked, "heartbeat")
    if isinstance(session, web.StreamResponse):
        return session
    return await bodies.answer(await heartbeats.hear(asked, session, wanted.ttl_seconds))


def _state(word: str, state: SessionState, summary: str) -> Route:
    handler: Callable[[Asked], Awaitable[web.StreamResponse]] = partial(_become, state=state, word=word)
    return Route(
        method="POST",
        path=f"/sessions/{{session_id}}/{word}",
        summary=summary,
        handler=handler,
        rights=_CHANGE,
        body=Nothing,
        answers={HTTPStatus.OK: (SessionInfo,)},
    )


ROUTES: Final = (
    Route(
        method="POST",
        path="/sessions/{session_id}/score",
        summary="Set a session's score and rewards",
        handler=_score,
        rights=_CHANGE,
        body=SetScore,
        answers={HTTPStatus.OK: (SessionInfo,)},
    ),
    _state("pause", SessionState.PAUSED, "Let a session's machine stand still, answered when it does"),
    _state("resume", SessionState.RUNNING, "Let a paused session go on, answered when it does"),
    _state("release", SessionState.RELEASED, "End a session's machine for good; its place and instants stay"),
    Route(
        method="POST",
        path="/sessions/{session_id}/heartbeat",
        summary="Keep a session's tree alive for a while; without another it is deleted",
        handler=_heartbeat,
        rights=_CHANGE,
        body=Heartbeat,
        answers={HTTPStatus.OK: (HeartbeatHeard,)},
    ),
)
