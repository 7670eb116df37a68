"""The paths of the HTTP API: who may, what was sent, who does it.

Every path stands under `/ns/{namespace}/v1` and, for the namespace of the caller's own service account,
under `/v1`.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from aiohttp import web

from forktree.kube.client import KubeClient
from forktree.kube.errors import NotFound
from forktree.models import Session
from forktree.models.texts import is_dns_label
from forktree.wire import EXEC_ID, CreateSession, Exec, ExecList, ForkSession, Health, SessionDeleted
from forktree_agent.control.branch_logs import KEPT_BYTES
from forktree_agent.control.facade import Facade
from forktree_agent.http import bodies, branch_log, executing, forking, locating, repeating, weighing
from forktree_agent.http.auth import Caller, Gate
from forktree_agent.http.describing import describe_all, describe_newborn, describe_one
from forktree_agent.http.errors import Code, Refusal
from forktree_agent.http.opening import open_session
from forktree_agent.http.proxying import HOP_SECONDS, Errand, Proxy
from forktree_agent.http.requests import REQUEST_ID, SEEN

_EXEC_ID = re.compile(EXEC_ID)

LOG_SECONDS = 15.0
"""For another agent to read a log: milliseconds, and as many to send its 2 MiB."""

WAIT_SECONDS_MAX = 110.0
"""Existing clients give up on any answer after 120 s."""


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

    def __init__(self, client: KubeClient, facade: Facade, proxy: Proxy) -> None:
        self._client = client
        self._facade = facade
        self._proxy = proxy
        self._gate = Gate(client)

    def routes(self) -> list[web.RouteDef]:
        """Every path, under both prefixes."""
        session = "/sessions/{session_id}"
        paths: list[tuple[str, str, Answering, str, str]] = [
            ("POST", "/sessions", self._create, "create", ""),
            ("GET", "/sessions", self._list, "list", ""),
            ("GET", session, self._get, "get", ""),
            ("DELETE", session, self._delete, "delete", ""),
            ("GET", f"{session}/memory", self._memory, "get", ""),
            ("POST", f"{session}/exec", self._exec, "create", "exec"),
            ("GET", f"{session}/execs", self._execs, "get", "exec"),
            ("GET", f"{session}/execs/{{exec_id}}", self._attach, "get", "exec"),
            ("POST", f"{session}/fork", self._fork, "create", "fork"),
        ]
        found = [
            web.route(method, f"{prefix}/v1{path}", self._checked(answering, verb, subresource))
            for method, path, answering, verb, subresource in paths
            for prefix in ("", "/ns/{namespace}")
        ]
        logs = [
            web.get(f"{prefix}/v1{branch_log.PATH}", self._child_log) for prefix in ("", "/ns/{namespace}")
        ]
        return [web.get("/v1/health", _health), *found, *logs]

    def _checked(
        self, answering: Answering, verb: str, subresource: str
    ) -> Callable[[web.Request], Awaitable[web.Response]]:
        """`answering`, once the caller is known and may `verb` sessions (or their subresource) there."""

        async def handler(request: web.Request) -> web.Response:
            caller = await self._gate.caller(request.headers.get("Authorization"))
            namespace = _namespace(request, caller)
            session_id = request.match_info.get("session_id", "")
            await self._gate.permit(caller, verb, namespace, name=session_id, subresource=subresource)
            if session_id and not is_dns_label(session_id):
                # No object can have it, and it must not become part of a path to the API server.
                raise _no_such_session("of that name", namespace)
            return await answering(Asked(request, caller, namespace, session_id))

        return handler

    async def _create(self, asked: Asked) -> web.Response:
        wanted = await bodies.read(asked.request, CreateSession)
        name = repeating.name_of(asked.request, asked.caller, wanted.name)
        wanted = wanted.model_copy(update={"name": name})
        seen = asked.request[SEEN]
        body, status = await open_session(self._client, asked.namespace, wanted, seen=seen)
        return await bodies.answer(body, status)

    async def _list(self, asked: Asked) -> web.Response:
        return bodies.array(await describe_all(self._client, asked.namespace, datetime.now(UTC)))

    async def _get(self, asked: Asked) -> web.Response:
        try:
            session = await self._client.get(Session, asked.namespace, asked.session_id)
        except NotFound as err:
            # A child that has no object yet, or never will.
            found = await locating.find(self._client, self._facade, asked.namespace, asked.session_id)
            if node := locating.other_node(self._facade, found):
                return await self._hand_on(asked, node, "", asked.request[SEEN] + HOP_SECONDS)
            if found.metadata.uid:
                raise _no_such_session(asked.session_id, asked.namespace) from err
            return await bodies.answer(describe_newborn(self._facade, found, datetime.now(UTC)))
        return await bodies.answer(await describe_one(self._client, session, datetime.now(UTC)))

    async def _delete(self, asked: Asked) -> web.Response:
        known = self._facade.session(asked.namespace, asked.session_id)
        if known is not None and not known.metadata.uid:
            wait_until = asked.request[SEEN] + forking.WAIT_SECONDS
            await locating.recorded(self._facade, known, deadline=wait_until)
        try:
            await self._client.delete(Session, asked.namespace, asked.session_id)
        except NotFound as err:
            found = await locating.find(self._client, self._facade, asked.namespace, asked.session_id)
            if node := locating.other_node(self._facade, found):
                return await self._hand_on(asked, node, "", asked.request[SEEN] + forking.WAIT_SECONDS)
            raise _no_such_session(asked.session_id, asked.namespace) from err
        return await bodies.answer(SessionDeleted(deleted=True, session_id=asked.session_id))

    async def _memory(self, asked: Asked) -> web.Response:
        session = await locating.find(self._client, self._facade, asked.namespace, asked.session_id)
        if node := locating.other_node(self._facade, session):
            end_by = asyncio.get_running_loop().time() + weighing.WEIGH_SECONDS
            return await self._hand_on(asked, node, "memory", end_by)
        return await bodies.answer(await weighing.weigh(self._facade, session))

    async def _exec(self, asked: Asked) -> web.Response:
        wanted = await bodies.read(asked.request, Exec)
        start_by = asyncio.get_running_loop().time() + executing.START_SECONDS
        session = await locating.find_placed(
            self._client, self._facade, asked.namespace, asked.session_id, deadline=start_by
        )
        if node := locating.other_node(self._facade, session):
            end_by = start_by + wanted.timeout_seconds + executing.MARGIN_SECONDS
            return await self._hand_on(asked, node, "exec", end_by)
        body = await executing.execute(
            self._facade, session, wanted, start_by=start_by, request_id=asked.request[REQUEST_ID]
        )
        return await bodies.answer(body, about_bytes=len(body.stdout) + len(body.stderr))

    async def _execs(self, asked: Asked) -> web.Response:
        start_by = asyncio.get_running_loop().time() + executing.START_SECONDS
        session = await locating.find_placed(
            self._client, self._facade, asked.namespace, asked.session_id, deadline=start_by
        )
        if node := locating.other_node(self._facade, session):
            return await self._hand_on(asked, node, "execs", start_by)
        session = await executing.running(self._facade, session, start_by)
        return await bodies.answer(ExecList(ids=self._facade.execs(session)))

    async def _attach(self, asked: Asked) -> web.Response:
        exec_id = asked.request.match_info["exec_id"]
        if not _EXEC_ID.fullmatch(exec_id):
            raise Refusal(Code.NOT_FOUND, "no command can have that id")
        wait_seconds = _wait_seconds(asked.request)
        start_by = asyncio.get_running_loop().time() + executing.START_SECONDS
        session = await locating.find_placed(
            self._client, self._facade, asked.namespace, asked.session_id, deadline=start_by
        )
        if node := locating.other_node(self._facade, session):
            what = f"execs/{exec_id}?wait_seconds={wait_seconds}"
            return await self._hand_on(asked, node, what, start_by + wait_seconds)
        body = await executing.attach(
            self._facade, session, exec_id, start_by=start_by, wait_seconds=wait_seconds
        )
        return await bodies.answer(body, about_bytes=len(body.stdout) + len(body.stderr))

    async def _fork(self, asked: Asked) -> web.Response:
        body = await bodies.read(asked.request, ForkSession)
        wait = _record_wait(asked.request)
        name = repeating.name_of(asked.request, asked.caller, body.name)
        wanted = forking.Wanted(
            namespace=asked.namespace,
            session_id=asked.session_id,
            replicas=body.replicas,
            name=name,
            called=repeating.called(asked.request, "fork", name or ""),
            seen=asked.request[SEEN],
        )
        parent = await locating.find(self._client, self._facade, asked.namespace, asked.session_id)
        if node := locating.other_node(self._facade, parent):
            what = "fork?record=wait" if wait else "fork"
            return await self._hand_on(asked, node, what, wanted.deadline)
        known = self._facade.session(asked.namespace, asked.session_id)
        answered = None
        if known is not None:
            known = await locating.recorded(self._facade, known, deadline=wanted.deadline)
            answered = None if wait else await forking.fork_at_once(self._facade, known, wanted)
        if answered is None:
            answered = await forking.fork_by_object(self._client, self._facade, wanted)
        return await bodies.answer(*answered)

    async def _child_log(self, request: web.Request) -> web.Response:
        caller = await self._gate.caller(request.headers.get("Authorization"))
        namespace = _namespace(request, caller)
        fork_id, index = branch_log.named(request)
        await self._gate.permit(caller, "get", namespace, resource="forks", name=fork_id, subresource="log")
        fork = await branch_log.find(self._client, namespace, fork_id)
        if fork.status.node not in {None, self._facade.node_name}:
            errand = Errand(
                node=str(fork.status.node),
                path=f"/ns/{namespace}/v1/forks/{fork_id}/children/{index}/log",
                subject=f"fork {fork_id}",
                deadline=asyncio.get_running_loop().time() + LOG_SECONDS + HOP_SECONDS,
            )
            return await self._proxy.forward(request, errand)
        body = await branch_log.read(self._facade.branches, fork, index)
        return await bodies.answer(body, about_bytes=2 * KEPT_BYTES)

    async def _hand_on(self, asked: Asked, node: str, what: str, end_by: float) -> web.Response:
        """The answer of `node`'s agent, which may take until `end_by` (loop time) by itself."""
        errand = Errand(
            node=node,
            path=f"/ns/{asked.namespace}/v1/sessions/{asked.session_id}" + (what and f"/{what}"),
            subject=f"session {asked.session_id}",
            deadline=end_by + HOP_SECONDS,
        )
        return await self._proxy.forward(asked.request, errand)


async def _health(_: web.Request) -> web.Response:
    """For probes, so without a token; it says nothing of what runs here."""
    return await bodies.answer(Health(status="ok", version=importlib.metadata.version("forktree")))


def _namespace(request: web.Request, caller: Caller) -> str:
    """The namespace that a request is about."""
    namespace = request.match_info.get("namespace", caller.namespace)
    if namespace is None:
        sentence = f"{caller.username} belongs to no namespace: use the paths under /ns/NAMESPACE/v1"
        raise Refusal(Code.BAD_REQUEST, sentence)
    if not is_dns_label(namespace):
        raise Refusal(Code.BAD_REQUEST, "the namespace in the path is not a DNS label")
    return namespace


def _wait_seconds(request: web.Request) -> float:
    """`?wait_seconds=`: how long to wait for the end of a command; by custom not at all."""
    text = request.query.get("wait_seconds", "0")
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= WAIT_SECONDS_MAX:
        raise Refusal(Code.BAD_REQUEST, f"`wait_seconds` must be a number from 0 to {WAIT_SECONDS_MAX:g}")
    return seconds


def _record_wait(request: web.Request) -> bool:
    """`?record=wait`: whether to answer only when all objects are there."""
    record = request.query.get("record")
    if record not in {None, "wait"}:
        raise Refusal(Code.BAD_REQUEST, "`record` can only be `wait`")
    return record == "wait"


def _no_such_session(session_id: str, namespace: str) -> Refusal:
    return Refusal(Code.NO_SUCH_SESSION, f"there is no session {session_id} in the namespace {namespace}")
