"""Forks: made, read, listed, started from again, deleted."""

from __future__ import annotations

from datetime import UTC, datetime
from http import HTTPStatus
from typing import Final

from aiohttp import web

from forktree.kube.errors import NotFound
from forktree.models import Fork, Session
from forktree.wire import ForkQuery, ForkSession, SessionForked
from forktree.wire_trees import ForkDeleted, ForkInfo, ForksQuery
from forktree_agent.http import bodies, finding, forking, locating, repeating
from forktree_agent.http.describing_forks import describe_fork, parent_among, parent_of
from forktree_agent.http.errors import Code, Refusal
from forktree_agent.http.forking import SourceName, Wanted
from forktree_agent.http.table import Asked, Each, Right, Route


async def _fork(asked: Asked) -> web.StreamResponse:
    wanted, record = await _wanted(asked, SourceName(Session, asked.session_id))
    parent = await locating.find(asked.client, asked.facade, asked.namespace, asked.session_id)
    if node := locating.other_node(asked.facade, parent):
        asks = {"record": record, "wait": "complete" if wanted.complete else None}
        what = "&".join(f"{key}={word}" for key, word in asks.items() if word)
        return await asked.session_elsewhere(node, f"fork?{what}" if what else "fork", end_by=wanted.deadline)
    at_once = wanted.body.plain and record is None and not wanted.complete
    return await bodies.answer(*await forking.fork(asked.client, asked.facade, wanted, at_once=at_once))


async def _fork_again(asked: Asked) -> web.StreamResponse:
    wanted, _ = await _wanted(asked, SourceName(Fork, asked.named("fork_id")))
    return await bodies.answer(*await forking.fork_by_object(asked.client, asked.facade, wanted))


async def _wanted(asked: Asked, source: SourceName) -> tuple[Wanted, str | None]:
    """What is asked for, by somebody who may; and `record` of the query."""
    body, query = await asked.body(ForkSession), asked.query(ForkQuery)
    if body.runs_commands:
        session_id = source.name if source.kind is Session else ""
        await asked.permit("create", "sessions/exec", session_id)
    name = repeating.name_of(asked.request, asked.caller, body.name)
    wanted = Wanted(
        namespace=asked.namespace,
        source=source,
        body=body,
        name=name,
        called=repeating.called(asked.request, "fork", name or ""),
        seen=asked.seen,
        complete=query.wait is not None,
    )
    return wanted, query.record


async def _get(asked: Asked) -> web.StreamResponse:
    fork = await finding.fork_object(asked, asked.named("fork_id"))
    parent = await parent_of(asked.client, fork)
    return await bodies.answer(describe_fork(fork, datetime.now(UTC), parent=parent))


async def _list(asked: Asked) -> web.StreamResponse:
    session_id, now = asked.query(ForksQuery).session_id, datetime.now(UTC)
    forks, _ = await asked.client.list(Fork, asked.namespace)
    named = {fork.metadata.name: fork for fork in forks}
    found = [describe_fork(fork, now, parent=parent_among(fork, named)) for fork in forks]
    return bodies.array([each for each in found if session_id in {None, each.parent_session_id}])


async def _delete(asked: Asked) -> web.StreamResponse:
    fork_id = asked.named("fork_id")
    # One that was made at once may be about to have its object.
    await forking.written(asked.facade, asked.namespace, fork_id, deadline=asked.seen + forking.WAIT_SECONDS)
    try:
        await asked.client.delete(Fork, asked.namespace, fork_id)
    except NotFound as err:
        sentence = f"there is no fork {fork_id} in the namespace {asked.namespace}"
        raise Refusal(Code.NOT_FOUND, sentence) from err
    return await bodies.answer(ForkDeleted(deleted=True, fork_id=fork_id))


_MADE: Final = {HTTPStatus.CREATED: (SessionForked,), HTTPStatus.OK: (SessionForked,)}

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
        answers=_MADE,
    ),
    Route(
        method="GET",
        path="/forks",
        summary="The forks of the namespace",
        handler=_list,
        rights=(Right("list", "forks"),),
        query=ForksQuery,
        answers={HTTPStatus.OK: (Each(ForkInfo),)},
    ),
    Route(
        method="GET",
        path="/forks/{fork_id}",
        summary="One fork, and what became of its children",
        handler=_get,
        rights=(Right("get", "forks"),),
        answers={HTTPStatus.OK: (ForkInfo,)},
    ),
    Route(
        method="DELETE",
        path="/forks/{fork_id}",
        summary="Delete a fork, its instant, its children and all below them",
        handler=_delete,
        rights=(Right("delete", "forks"),),
        answers={HTTPStatus.OK: (ForkDeleted,)},
    ),
    Route(
        method="POST",
        path="/forks/{fork_id}/fork",
        summary="Start more children from the instant of a fork",
        handler=_fork_again,
        rights=(Right("create", "forks"),),
        body=ForkSession,
        query=ForkQuery,
        repeatable=True,
        answers=_MADE,
    ),
)
