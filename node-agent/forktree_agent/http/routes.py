"""The paths of the HTTP API: who may, what was sent, who does it.

Every path stands under `/ns/{namespace}/v1` and, for the namespace of the caller's own service account,
under `/v1`.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from aiohttp import web

from forktree.kube.client import KubeClient
from forktree.kube.errors import NotFound
from forktree.models import Session
from forktree.wire import CreateSession, Exec, ForkSession, Health, SessionDeleted
from forktree_agent.control.facade import Facade
from forktree_agent.http import bodies
from forktree_agent.http.auth import Caller, Gate
from forktree_agent.http.describing import describe_all, describe_one
from forktree_agent.http.errors import Code, Refusal
from forktree_agent.http.executing import execute
from forktree_agent.http.forking import fork_session
from forktree_agent.http.opening import open_session
from forktree_agent.http.requests import REQUEST_ID

_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")


@dataclass(frozen=True, slots=True)
class Asked:
    """A request by a known caller, in a namespace, for a session where the path names one."""

    request: web.Request
    caller: Caller
    namespace: str
    session_id: str


Answering = Callable[[Asked], Awaitable[web.Response]]


class Api:
    """All handlers. It holds nothing but what it was given, and the gate's short memory."""

    def __init__(self, client: KubeClient, facade: Facade) -> None:
        self._client = client
        self._facade = facade
        self._gate = Gate(client)

    def routes(self) -> list[web.RouteDef]:
        """Every path, under both prefixes."""
        session = "/sessions/{session_id}"
        paths: list[tuple[str, str, Answering, str, str]] = [
            ("POST", "/sessions", self._create, "create", ""),
            ("GET", "/sessions", self._list, "list", ""),
            ("GET", session, self._get, "get", ""),
            ("DELETE", session, self._delete, "delete", ""),
            ("POST", f"{session}/exec", self._exec, "create", "exec"),
            ("POST", f"{session}/fork", self._fork, "create", "fork"),
        ]
        found = [
            web.route(method, f"{prefix}/v1{path}", self._checked(answering, verb, subresource))
            for method, path, answering, verb, subresource in paths
            for prefix in ("", "/ns/{namespace}")
        ]
        return [web.get("/v1/health", _health), *found]

    def _checked(
        self, answering: Answering, verb: str, subresource: str
    ) -> Callable[[web.Request], Awaitable[web.Response]]:
        """`answering`, once the caller is known and may `verb` sessions (or their subresource) there."""

        async def handler(request: web.Request) -> web.Response:
            caller = await self._gate.caller(request.headers.get("Authorization"))
            namespace = _namespace(request, caller)
            session_id = request.match_info.get("session_id", "")
            await self._gate.permit(caller, verb, namespace, name=session_id, subresource=subresource)
            if session_id and not _LABEL.fullmatch(session_id):
                # No object can have it, and it must not become part of a path to the API server.
                raise _no_such_session("of that name", namespace)
            return await answering(Asked(request, caller, namespace, session_id))

        return handler

    async def _create(self, asked: Asked) -> web.Response:
        wanted = await bodies.read(asked.request, CreateSession)
        body, status = await open_session(self._client, asked.namespace, wanted)
        return await bodies.answer(body, status)

    async def _list(self, asked: Asked) -> web.Response:
        return bodies.array(await describe_all(self._client, asked.namespace, datetime.now(UTC)))

    async def _get(self, asked: Asked) -> web.Response:
        try:
            session = await self._client.get(Session, asked.namespace, asked.session_id)
        except NotFound as err:
            raise _no_such_session(asked.session_id, asked.namespace) from err
        return await bodies.answer(await describe_one(self._client, session, datetime.now(UTC)))

    async def _delete(self, asked: Asked) -> web.Response:
        try:
            await self._client.delete(Session, asked.namespace, asked.session_id)
        except NotFound as err:
            raise _no_such_session(asked.session_id, asked.namespace) from err
        return await bodies.answer(SessionDeleted(deleted=True, session_id=asked.session_id))

    async def _exec(self, asked: Asked) -> web.Response:
        wanted = await bodies.read(asked.request, Exec)
        request_id = asked.request[REQUEST_ID]
        body = await execute(
            self._client, self._facade, asked.namespace, asked.session_id, wanted, request_id=request_id
        )
        return await bodies.answer(body, about_bytes=len(body.stdout) + len(body.stderr))

    async def _fork(self, asked: Asked) -> web.Response:
        wanted = await bodies.read(asked.request, ForkSession)
        body, status = await fork_session(self._client, asked.namespace, asked.session_id, wanted)
        return await bodies.answer(body, status)


async def _health(_: web.Request) -> web.Response:
    """For probes, so without a token; it says nothing of what runs here."""
    return await bodies.answer(Health(status="ok", version=importlib.metadata.version("forktree")))


def _namespace(request: web.Request, caller: Caller) -> str:
    """The namespace that a request is about."""
    namespace = request.match_info.get("namespace", caller.namespace)
    if namespace is None:
        sentence = f"{caller.username} belongs to no namespace: use the paths under /ns/NAMESPACE/v1"
        raise Refusal(Code.BAD_REQUEST, sentence)
    if not _LABEL.fullmatch(namespace):
        raise Refusal(Code.BAD_REQUEST, "the namespace in the path is not a DNS label")
    return namespace


def _no_such_session(session_id: str, namespace: str) -> Refusal:
    return Refusal(Code.NO_SUCH_SESSION, f"there is no session {session_id} in the namespace {namespace}")
