"""Forks: made over HTTP."""

from __future__ import annotations

from http import HTTPStatus
from typing import Final

from aiohttp import web

from forktree.wire import ForkQuery, ForkSession, SessionForked
from forktree_agent.http import bodies, forking, locating, repeating
from forktree_agent.http.table import Asked, Right, Route


async def _fork(asked: Asked) -> web.Response:
    body = await asked.body(ForkSession)
    wait = asked.query(ForkQuery).record is not None
    name = repeating.name_of(asked.request, asked.caller, body.name)
    wanted = forking.Wanted(
        namespace=asked.namespace,
        session_id=asked.session_id,
        replicas=body.replicas,
        name=name,
        called=repeating.called(asked.request, "fork", name or ""),
        seen=asked.seen,
    )
    parent = await locating.find(asked.client, asked.facade, asked.namespace, asked.session_id)
    if node := locating.other_node(asked.facade, parent):
        what = "fork?record=wait" if wait else "fork"
        return await asked.session_elsewhere(node, what, end_by=wanted.deadline)
    known = asked.facade.session(asked.namespace, asked.session_id)
    answered = None
    if known is not None:
        known = await locating.recorded(asked.facade, known, deadline=wanted.deadline)
        answered = None if wait else await forking.fork_at_once(asked.facade, known, wanted)
    if answered is None:
        answered = await forking.fork_by_object(asked.client, asked.facade, wanted)
    return await bodies.answer(*answered)


ROUTES: Final = (
    Route(
        method="POST",
        path="/sessions/{session_id}/fork",
        summary="Fork a session, answered when every child runs",
        handler=_fork,
        rights=(Right("create", "sessions/fork"),),
        body=ForkSession,
        query=ForkQuery,
        repeatable=True,
        answers={HTTPStatus.CREATED: (SessionForked,), HTTPStatus.OK: (SessionForked,)},
    ),
)
