"""Sessions: created, read, weighed and deleted."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Final

from aiohttp import web

from forktree.kube.errors import NotFound
from forktree.models import Session
from forktree.wire import CreateSession, SessionCreated, SessionDeleted, SessionInfo, SessionMemory
from forktree.wire_trees import CONTINUE, SessionsQuery
from forktree_agent.http import bodies, forking, locating, repeating, weighing
from forktree_agent.http.describing import describe_all, describe_newborn, describe_one
from forktree_agent.http.errors import Code, Refusal
from forktree_agent.http.locating import no_such_session
from forktree_agent.http.opening import open_session
from forktree_agent.http.proxying import HOP_SECONDS
from forktree_agent.http.table import Asked, Each, Right, Route


async def _create(asked: Asked) -> web.StreamResponse:
    wanted = await asked.body(CreateSession)
    name = repeating.name_of(asked.request, asked.caller, wanted.name)
    wanted = wanted.model_copy(update={"name": name})
    body, status = await open_session(asked.client, asked.namespace, wanted, seen=asked.seen)
    return await bodies.answer(body, status)


async def _list(asked: Asked) -> web.StreamResponse:
    query = asked.query(SessionsQuery)
    labels = [_label(each) for each in query.label]
    found = await describe_all(asked.client, asked.namespace, datetime.now(UTC))
    # By name, so that it is known where to go on whatever comes and goes meanwhile.
    found = sorted(
        (
            each
            for each in found
            if query.template_id in {None, each.template_id}
            and query.root in {None, each.root}
            and all((each.labels or {}).get(key) == text for key, text in labels)
            and (query.continue_ is None or each.session_id > query.continue_)
        ),
        key=lambda each: each.session_id,
    )
    shown = found[: query.limit]
    more = {CONTINUE: shown[-1].session_id} if len(shown) < len(found) else None
    return bodies.array(shown, headers=more)


def _label(text: str) -> tuple[str, str]:
    key, separator, value = text.partition("=")
    if not separator or not key:
        raise Refusal(Code.BAD_REQUEST, "`label` must be like team=search")
    return key, value


async def _get(asked: Asked) -> web.StreamResponse:
    try:
        session = await asked.client.get(Session, asked.namespace, asked.session_id)
    except NotFound as err:
        # A child that has no object yet, or never will.
        found = await locating.find(asked.client, asked.facade, asked.namespace, asked.session_id)
        if node := locating.other_node(asked.facade, found):
            return await asked.session_elsewhere(node, "", end_by=asked.seen + HOP_SECONDS)
        if found.metadata.uid:
            raise no_such_session(asked.session_id, asked.namespace) from err
        return await bodies.answer(describe_newborn(asked.facade, found, datetime.now(UTC)))
    return await bodies.answer(await describe_one(asked.client, asked.facade, session, datetime.now(UTC)))


async def _delete(asked: Asked) -> web.StreamResponse:
    known = asked.facade.session(asked.namespace, asked.session_id)
    if known is not None and not known.metadata.uid:
        await locating.recorded(asked.facade, known, deadline=asked.seen + forking.WAIT_SECONDS)
    try:
        await asked.client.delete(Session, asked.namespace, asked.session_id)
    except NotFound as err:
        found = await locating.find(asked.client, asked.facade, asked.namespace, asked.session_id)
        if node := locating.other_node(asked.facade, found):
            return await asked.session_elsewhere(node, "", end_by=asked.seen + forking.WAIT_SECONDS)
        raise no_such_session(asked.session_id, asked.namespace) from err
    return await bodies.answer(SessionDeleted(deleted=True, session_id=asked.session_id))


async def _memory(asked: Asked) -> web.StreamResponse:
    session = await locating.find(asked.client, asked.facade, asked.namespace, asked.session_id)
    if node := locating.other_node(asked.facade, session):
        end_by = asyncio.get_running_loop().time() + weighing.WEIGH_SECONDS
        return await asked.session_elsewhere(node, "memory", end_by=end_by)
    return await bodies.answer(await weighing.weigh(asked.facade, session))


ROUTES: Final = (
    Route(
        method="POST",
        path="/sessions",
        summary="Create a root session, answered when it runs",
        handler=_create,
        rights=(Right("create", "sessions"),),
        body=CreateSession,
        repeatable=True,
        answers={HTTPStatus.CREATED: (SessionCreated,), HTTPStatus.OK: (SessionCreated,)},
    ),
    Route(
        method="GET",
        path="/sessions",
        summary="The sessions of the namespace",
        handler=_list,
        rights=(Right("list", "sessions"),),
        query=SessionsQuery,
        answers={HTTPStatus.OK: (Each(SessionInfo),)},
    ),
    Route(
        method="GET",
        path="/sessions/{session_id}",
        summary="One session",
        handler=_get,
        rights=(Right("get", "sessions"),),
        answers={HTTPStatus.OK: (SessionInfo,)},
    ),
    Route(
        method="DELETE",
        path="/sessions/{session_id}",
        summary="Delete a session and all below it",
        handler=_delete,
        rights=(Right("delete", "sessions"),),
        answers={HTTPStatus.OK: (SessionDeleted,)},
    ),
    Route(
        method="GET",
        path="/sessions/{session_id}/memory",
        summary="What memory a session takes now",
        handler=_memory,
        rights=(Right("get", "sessions"),),
        answers={HTTPStatus.OK: (SessionMemory,)},
    ),
)
