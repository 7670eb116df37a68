"""Routes as they are declared: what aiohttp serves and what the OpenAPI document says are made of the same.

A route says who may ask, what may be sent and what comes back; its handler is only called when the first two
hold, and reads no body and no query that the route does not declare.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Final, TypeAlias

from aiohttp import web

from forktree.kube.client import KubeClient
from forktree.models import Session
from forktree.wire import EXEC_ID, Answer, Query, Request
from forktree_agent.control.facade import Facade
from forktree_agent.http import bodies, executing, locating, queries
from forktree_agent.http.auth import Caller, Gate
from forktree_agent.http.errors import Code, Refusal
from forktree_agent.http.proxying import HOP_SECONDS, Errand, Proxy
from forktree_agent.http.requests import HELD, SEEN
from forktree_agent.http.tree_watching import Watchers
from forktree_agent.http.tunnels import Tunnels


@dataclass(frozen=True, slots=True)
class Each:
    """A JSON array."""

    of: type[Answer]


@dataclass(frozen=True, slots=True)
class Lines:
    """One JSON object a line, each of one of these, as long as the answer takes."""

    of: tuple[type[Answer], ...]


@dataclass(frozen=True, slots=True)
class Raw:
    """Bytes."""

    content_type: str


Shape: TypeAlias = type[Answer] | Each | Lines | Raw


@dataclass(frozen=True, slots=True)
class Right:
    """What a caller must be allowed, in the words of the API server."""

    verb: str
    resource: str
    """Of group `forktree.dev`; `sessions/exec`: a subresource. The object is the one that the path names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A part of a path that callers choose."""

    meaning: str
    pattern: str
    """Of the whole of it. What does not match becomes part of no path to anywhere."""
    code: Code
    sentence: str
    """For what does not match. May say `{namespace}`."""


_LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"

NAMESPACE: Final = Parameter(
    meaning="The namespace of the objects.",
    pattern=_LABEL,
    code=Code.BAD_REQUEST,
    sentence="the namespace in the path is not a DNS label",
)

PARAMETERS: Final[Mapping[str, Parameter]] = {
    "session_id": Parameter(
        meaning="Name of the Session.",
        pattern=_LABEL,
        code=Code.NO_SUCH_SESSION,
        sentence="there is no session of that name in the namespace {namespace}",
    ),
    "exec_id": Parameter(
        meaning="Id of the command.",
        pattern=EXEC_ID,
        code=Code.NOT_FOUND,
        sentence="no command can have that id",
    ),
    "fork_id": Parameter(
        meaning="Name of the Fork.",
        pattern=_LABEL,
        code=Code.NOT_FOUND,
        sentence="no fork can have that name",
    ),
    "template_id": Parameter(
        meaning="Name of the SessionTemplate.",
        pattern=r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?",
        code=Code.NO_TEMPLATE,
        sentence="no template can have that name",
    ),
    "checkpoint": Parameter(
        meaning="What the checkpoint is called.",
        pattern=_LABEL,
        code=Code.NOT_FOUND,
        sentence="no checkpoint can have that name",
    ),
    "port": Parameter(
        meaning="A port that the session's template declares, by its name or number.",
        pattern=r"[a-z]([-a-z0-9]{0,13}[a-z0-9])?|[1-9][0-9]{0,4}",
        code=Code.NOT_FOUND,
        sentence="a port is called by the name that its template gives it, or by its number",
    ),
    "path": Parameter(
        meaning="What is asked of the server, with all the slashes that it has.",
        pattern=r"[\s\S]*",
        code=Code.NOT_FOUND,
        sentence="there is no such path",
    ),
    "index": Parameter(
        meaning="Which of the Fork's children, from 0.",
        pattern=r"0|[1-9][0-9]{0,2}",
        code=Code.NOT_FOUND,
        sentence="a child is named by its index, from 0",
    ),
}
"""Every one that a path may have."""

_NAMED: Final = {"sessions": "session_id", "forks": "fork_id", "sessiontemplates": "template_id"}
"""By which parameter a path names an object of a resource."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What handlers work with."""

    client: KubeClient
    facade: Facade
    proxy: Proxy
    gate: Gate
    watchers: Watchers
    tunnels: Tunnels


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One thing that can be asked."""

    method: str
    path: str
    """From `/v1` on. Each `{…}` in it is one of `PARAMETERS`."""
    summary: str
    """What it does, in a line without a full stop."""
    handler: Callable[[Asked], Awaitable[web.StreamResponse]]
    rights: tuple[Right, ...]
    """All must be held. Empty: the handler asks for those of each object that a body names."""
    answers: Mapping[HTTPStatus, tuple[Shape, ...]]
    """What comes back where all is well; errors are alike everywhere."""
    body: type[Request] | Raw | None = None
    query: type[Query] | None = None
    """None: whatever stands there is not read."""
    repeatable: bool = False
    """It heeds an `Idempotency-Key`."""

    @property
    def parameters(self) -> tuple[str, ...]:
        return tuple(re.findall(r"\{(\w+)\}", self.path))

    @property
    def served(self) -> str:
        """The path as aiohttp is told of it."""
        return self.path.replace("{path}", "{path:.*}")  # The only one that may hold slashes.


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRoute:
    """One thing that can be asked without a token, and that belongs to no namespace."""

    path: str
    summary: str
    handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    answers: Mapping[HTTPStatus, tuple[Shape, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request for a route, by a caller who may."""

    parts: Parts
    route: Route
    request: web.Request
    caller: Caller
    namespace: str
    granted: set[tuple[str, str, str]] = field(default_factory=set[tuple[str, str, str]])
    """What the caller was allowed so far, as `permit` takes it."""

    @property
    def client(self) -> KubeClient:
        return self.parts.client

    @property
    def facade(self) -> Facade:
        return self.parts.facade

    @property
    def session_id(self) -> str:
        return self.named("session_id")

    @property
    def seen(self) -> float:
        """When the request was, in monotonic seconds."""
        return self.request[SEEN]

    def named(self, parameter: str) -> str:
        """What the path has for one of `PARAMETERS`; it was checked."""
        return self.request.match_info[parameter]

    async def body(self, model: type[bodies.RequestT]) -> bodies.RequestT:
        """What was sent. Raises `Refusal`."""
        assert model is self.route.body, f"{self.route.path} declares another body"
        return await bodies.read(self.request, model)

    def query(self, model: type[queries.QueryT]) -> queries.QueryT:
        """What stands after the `?`. Raises `Refusal`."""
        assert model is self.route.query, f"{self.route.path} declares another query"
        return queries.read(self.request, model)

    async def placed(self) -> tuple[Session, float]:
        """The session that the path names, once it has a node, and by when (loop time) it must run."""
        start_by = asyncio.get_running_loop().time() + executing.START_SECONDS
        session = await locating.find_placed(
            self.client, self.facade, self.namespace, self.session_id, deadline=start_by
        )
        return session, start_by

    async def still_may(self) -> None:
        """Return if the caller may still do this, as a long answer asks now and then. Raises `Refusal`.

        All that it took is asked for, also what the route does not say, as a WebSocket's second right.
        """
        await self.parts.gate.caller(self.request.headers.get("Authorization"))
        for verb, resource, name in tuple(self.granted):
            await self.permit(verb, resource, name)

    async def permit(self, verb: str, resource: str, name: str = "") -> None:
        """Return if the caller may also do this; `name`: the object, empty for any. Raises `Refusal`.

        With the first right the request becomes one of the namespace's own.
        """
        plural, _, subresource = resource.partition("/")
        await self.parts.gate.permit(
            self.caller, verb, self.namespace, resource=plural, name=name, subresource=subresource
        )
        self.request[HELD].belongs_to(self.namespace)
        self.granted.add((verb, resource, name))

    async def hand_on(self, node: str, path: str, subject: str, *, end_by: float) -> web.StreamResponse:
        """The answer of `node`'s agent, which may take until `end_by` (loop time) by itself.

        `path` goes on from `/v1/`. `subject` is what the request is about, for sentences: `session a`.
        """
        errand = Errand(
            node=node,
            path=f"/ns/{self.namespace}/v1/{path}",
            subject=subject,
            deadline=end_by + HOP_SECONDS,
        )
        return await self.parts.proxy.relay(self.request, errand)

    async def relay(
        self, node: str, what: str, *, begin_by: float, body: AsyncIterator[bytes] | None = None
    ) -> web.StreamResponse:
        """The same for an answer that is handed on as it comes, and that begins by `begin_by` (loop time)."""
        errand = self.errand(node, what, begin_by=begin_by)
        return await self.parts.proxy.relay(self.request, errand, body=body)

    async def relay_socket(
        self, node: str, what: str, ours: web.WebSocketResponse, *, open_by: float
    ) -> None:
        """Join our caller's WebSocket with that of `node`'s agent, which opens by `open_by` (loop time)."""
        errand = self.errand(node, what, begin_by=open_by)
        await self.parts.proxy.relay_socket(self.request, errand, ours)

    def errand(self, node: str, what: str, *, begin_by: float) -> Errand:
        """To ask `node`'s agent about the session that the path names, which begins by `begin_by` (loop
        time). `what` follows its name."""
        return Errand(
            node=node,
            path=f"/ns/{self.namespace}/v1/sessions/{self.session_id}/{what}",
            subject=f"session {self.session_id}",
            deadline=begin_by + HOP_SECONDS,
        )

    async def session_elsewhere(self, node: str, what: str, *, end_by: float) -> web.StreamResponse:
        """`hand_on` for the session that the path names; `what` follows its name."""
        path = f"sessions/{self.session_id}" + (what and f"/{what}")
        return await self.hand_on(node, path, f"session {self.session_id}", end_by=end_by)


def checked(route: Route, parts: Parts) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    """The route's handler, once the caller is known and may, and the path names what can be."""

    async def handler(request: web.Request) -> web.StreamResponse:
        caller = await parts.gate.caller(request.headers.get("Authorization"))
        # Anybody may ask about any namespace, so what they hold is theirs until they may something there.
        request[HELD].asked_by(caller.among)
        namespace = _namespace(request, caller)
        asked = Asked(parts=parts, route=route, request=request, caller=caller, namespace=namespace)
        for right in route.rights:
            await asked.permit(right.verb, right.resource, _named(right, request))
        for name in parameters:
            _check(PARAMETERS[name], request.match_info[name], namespace)
        return await route.handler(asked)

    parameters = route.parameters
    return handler


def _named(right: Right, request: web.Request) -> str:
    """The one object that a right is needed for. Who lists, or creates, has not named what there is."""
    resource, _, subresource = right.resource.partition("/")
    if right.verb == "list" or (right.verb == "create" and not subresource):
        return ""
    return request.match_info.get(_NAMED.get(resource, ""), "")


def _namespace(request: web.Request, caller: Caller) -> str:
    """The namespace that a request is about."""
    namespace = request.match_info.get("namespace", caller.namespace)
    if namespace is None:
        sentence = f"{caller.username} belongs to no namespace: use the paths under /ns/NAMESPACE/v1"
        raise Refusal(Code.BAD_REQUEST, sentence)
    _check(NAMESPACE, namespace, namespace)
    return namespace


def _check(parameter: Parameter, given: str, namespace: str) -> None:
    if not re.fullmatch(parameter.pattern, given):
        raise Refusal(parameter.code, parameter.sentence.format(namespace=namespace))
