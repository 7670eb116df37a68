"""The daemon's surface: sessions of one node and one namespace, and commands in them.

On a namespace's own socket nobody says who he is: whoever may open that may all of this. On the server the
same stands below `/ns/NAMESPACE/daemon`, for callers with a token, as its paths are those of native routes
that mean something else.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

from aiohttp import web

from forktree.kube.client import KubeClient
from forktree.models import SessionTemplate
from forktree.wire import Answer, Request
from forktree_agent.control.facade import Facade
from forktree_agent.http import bodies
from forktree_agent.http.collimate import closing, listing, sandboxes, wire
from forktree_agent.http.collimate.sandboxes import Elsewhere, Visit
from forktree_agent.http.collimate.surfaces import Handler, Surface, handed_on, visit
from forktree_agent.http.errors import Code, Refusal
from forktree_agent.http.requests import HELD, LOAD, REQUEST_ID, SEEN
from forktree_agent.http.table import PARAMETERS, Asked, Each, Right, Route

BELOW: Final = "/daemon"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """One thing that can be asked of this surface."""

    method: str
    path: str
    summary: str
    answering: Callable[[Visit, web.Request], Awaitable[web.StreamResponse]]
    rights: tuple[Right, ...]
    """Of callers with a token."""
    body: type[Request] | None = None
    status: HTTPStatus = HTTPStatus.OK
    answer: type[Answer] | Each

    def route(self) -> Route:
        async def handler(asked: Asked) -> web.StreamResponse:
            return await self.answering(visit(asked), asked.request)

        return Route(
            method=self.method,
            path=self.path,
            summary=self.summary,
            handler=handed_on(handler, BELOW),
            rights=self.rights,
            body=self.body,
            answers={self.status: (self.answer,)},
        )

    def on_socket(self, client: KubeClient, facade: Facade, namespace: str) -> Handler:
        async def handler(request: web.Request) -> web.StreamResponse:
            session_id = request.match_info.get("session_id")
            allowed = PARAMETERS["session_id"]
            if session_id is not None and not re.fullmatch(allowed.pattern, session_id):
                raise Refusal(allowed.code, allowed.sentence.format(namespace=namespace))
            request[HELD].belongs_to(namespace)
            visiting = Visit(
                client=client,
                facade=facade,
                namespace=namespace,
                request_id=request[REQUEST_ID],
                seen=request[SEEN],
                held=request[HELD],
            )
            try:
                return await self.answering(visiting, request)
            except Elsewhere as there:
                sentence = f"session {session_id} is on node {there.node}, and this socket is of another"
                raise Refusal(Code.NO_SUCH_SESSION, sentence) from there

        return handler


async def _health(visiting: Visit, request: web.Request) -> web.StreamResponse:
    load = request[LOAD]
    templates = (await visiting.client.list(SessionTemplate, visiting.namespace)).items
    body = wire.DaemonHealth(
        status="draining" if load.draining else "ok",
        sessions=len(await listing.sessions(visiting)),
        running=load.running - 1,  # All but this.
        max_inflight=load.at_once,
        templates=tuple(each.metadata.name for each in templates),
        version=importlib.metadata.version("forktree"),
    )
    return await bodies.answer(body)


async def _list(visiting: Visit, _: web.Request) -> web.StreamResponse:
    return bodies.array(await listing.sessions(visiting))


async def _open(visiting: Visit, request: web.Request) -> web.StreamResponse:
    wanted = await bodies.read(request, wire.OpenSession)
    sandboxes.refuse_network(wanted.egress)
    made = await sandboxes.opened(visiting, wanted.template_id, here=True)
    body = wire.DaemonOpened(
        session_id=made.session_id,
        template_id=made.template_id,
        fork_time_ms=made.fork_time_ms or 0.0,
        create_time_ms=made.create_time_ms,
    )
    return await bodies.answer(body, HTTPStatus.CREATED)


async def _get(visiting: Visit, request: web.Request) -> web.StreamResponse:
    return await bodies.answer(await listing.session(visiting, request.match_info["session_id"]))


async def _exec(visiting: Visit, request: web.Request) -> web.StreamResponse:
    wanted = await bodies.read(request, wire.SandboxExec)
    ended = await sandboxes.executed(visiting, request.match_info["session_id"], wanted)
    return await ended.answer(request)


async def _exec_once(visiting: Visit, request: web.Request) -> web.StreamResponse:
    ended = await sandboxes.executed_once(visiting, await bodies.read(request, wire.OneShot))
    return await ended.answer(request)


async def _delete(visiting: Visit, request: web.Request) -> web.StreamResponse:
    session_id = request.match_info["session_id"]
    await closing.closed(visiting, session_id, its_node_first=True)
    return await bodies.answer(wire.DaemonDeleted(deleted=True, session_id=session_id))


_SESSION: Final = "/sessions/{session_id}"

_CALLS: Final = (
    _Call(
        method="GET",
        path="/health",
        summary="How much is done here, and whether the agent is about to stop",
        answering=_health,
        rights=(Right("list", "sessions"), Right("list", "sessiontemplates")),
        answer=wire.DaemonHealth,
    ),
    _Call(
        method="GET",
        path="/sessions",
        summary="The sessions that run on this node",
        answering=_list,
        rights=(Right("list", "sessions"),),
        answer=Each(wire.DaemonSession),
    ),
    _Call(
        method="POST",
        path="/sessions",
        summary="Open a session on this node, answered when it runs",
        answering=_open,
        rights=(Right("create", "sessions"),),
        body=wire.OpenSession,
        status=HTTPStatus.CREATED,
        answer=wire.DaemonOpened,
    ),
    _Call(
        method="GET",
        path=_SESSION,
        summary="One session",
        answering=_get,
        rights=(Right("get", "sessions"),),
        answer=wire.DaemonSession,
    ),
    _Call(
        method="POST",
        path=f"{_SESSION}/exec",
        summary="Run a command to its end",
        answering=_exec,
        rights=(Right("create", "sessions/exec"),),
        body=wire.SandboxExec,
        answer=wire.ExecAnswer,
    ),
    _Call(
        method="POST",
        path="/exec",
        summary="Run a command in a session of its own, of which nothing is left",
        answering=_exec_once,
        rights=(Right("create", "sessions"), Right("create", "sessions/exec"), Right("delete", "sessions")),
        body=wire.OneShot,
        answer=wire.ExecAnswer,
    ),
    _Call(
        method="DELETE",
        path=_SESSION,
        summary="Delete a session, and nothing that was forked from it",
        answering=_delete,
        rights=(Right("delete", "sessions"),),
        answer=wire.DaemonDeleted,
    ),
)

DAEMON: Final = Surface(below=BELOW, routes=tuple(each.route() for each in _CALLS), codes={})


def on_socket(client: KubeClient, facade: Facade, namespace: str) -> list[web.RouteDef]:
    """Its routes for the socket of one namespace."""
    return [
        web.route(each.method, f"/v1{each.path}", each.on_socket(client, facade, namespace))
        for each in _CALLS
    ]
