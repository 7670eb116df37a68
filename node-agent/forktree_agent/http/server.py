"""The agent's HTTP server: TLS, one log line a request, and every error as the API's error body."""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import ssl
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path

from aiohttp import web
from aiohttp.payload import Payload

from forktree.errors import ForktreeError
from forktree.tracing.spans import Tracer
from forktree.wire import MAX_BODY_BYTES
from forktree_agent.commons import Commons
from forktree_agent.http import certificates
from forktree_agent.http.bodies import PIECE_BYTES, refused
from forktree_agent.http.connections import Bounds, Entrance, listening_on
from forktree_agent.http.errors import Code, Refusal, place_of, refusal_of
from forktree_agent.http.holding import HELD_BYTES, Held, Holdings
from forktree_agent.http.requests import HELD, LAST, LOAD, REQUEST_ID, SEEN, Load
from forktree_agent.http.routes import Api
from forktree_agent.http.tracing import following

log = logging.getLogger(__name__)

SHUTDOWN_SECONDS = 5.0
"""Requests in flight get this long when the agent stops, while further ones are told that it does."""

LOCAL_BOUNDS = Bounds(connections=256, connections_of_a_peer=256)
"""Of one namespace's socket, where all come from one place."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Answered = Callable[[str, str, int | None, float], None]
"""Told of each request once it is over: method, pattern of its path, status, seconds. No status: its caller
went away."""

REQUESTS_AT_ONCE = 512
"""What they hold of our memory is bounded for itself. Existing clients open some 24 connections each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listener:
    """Where to serve, and as whom."""

    host: str
    port: int
    """0: any free one; `Served.port` tells which."""
    names: tuple[str, ...]
    """Names and addresses that clients reach this server by; a self-made certificate is for these."""
    tls_directory: Path
    """Where a self-made authority and certificate are kept."""
    certificate: Path | None = None
    """Given certificate chain and key; both or none."""
    key: Path | None = None
    bound: socket.socket | None = None
    """Listens there already; None: it is made to."""
    bounds: Bounds = field(default_factory=Bounds)
    held_bytes: int = HELD_BYTES
    """Of this agent's memory for all requests together, those at its doors included."""


@dataclass(frozen=True, slots=True)
class Door:
    """A socket of this machine itself, and what can be asked there. No TLS, and nobody says who he is."""

    listening: socket.socket
    routes: list[web.RouteDef]
    bounds: Bounds = LOCAL_BOUNDS


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What a client needs to know."""

    port: int
    authority: Path | None
    """PEM file to verify the server by; None where a certificate was given."""
    ca_bundle: str
    """PEM to verify the server by, wherever its certificate comes from."""


@asynccontextmanager
async def serving(
    listener: Listener,
    api: Api,
    answered: Answered,
    doors: Iterable[Door] = (),
    tracer: Tracer | None = None,
) -> AsyncGenerator[Served]:
    """Serve `api` inside the block, and beside it each of `doors`. No `tracer`: nobody follows requests.

    Leaving it gives what is in flight a short grace, and begins nothing new. Raises `OSError` where the
    address cannot be bound or the made certificate cannot be written, `UnusableCertificate`.
    """
    identity = await asyncio.to_thread(_identity, listener)  # Key generation and files: some 10 ms.
    listening, ending = listener.bound or await listening_on(listener.host, listener.port), _Ending()
    holdings = Holdings(memory=Commons(listener.held_bytes), requests=Commons(REQUESTS_AT_ONCE))
    async with AsyncExitStack() as stack:
        entrance = await stack.enter_async_context(
            _Edge(ending, holdings, answered, tracer).around(
                api.routes(), listening, identity.context, listener.bounds
            )
        )
        for door in doors:
            # Each with a bound of its own: a crowd at one does not shut the others. But memory is one.
            of_it = Holdings(memory=holdings.memory, requests=Commons(REQUESTS_AT_ONCE))
            await stack.enter_async_context(
                _Edge(ending, of_it, answered, tracer).around(door.routes, door.listening, None, door.bounds)
            )
        log.info("http_serving host=%s port=%d", listener.host, entrance.port)
        yield Served(port=entrance.port, authority=identity.authority, ca_bundle=identity.ca_bundle)


def _identity(listener: Listener) -> certificates.Identity:
    if listener.certificate is not None and listener.key is not None:
        return certificates.given(listener.certificate, listener.key)
    return certificates.self_signed(listener.tls_directory, list(listener.names))


class _Ending:
    """When all that is in flight must be done. One for all entrances: none begins anything once it is set."""

    def __init__(self) -> None:
        self.end_by: float | None = None
        """Loop time; None while the server goes on."""

    def begun(self) -> float:
        """The end begins with this, unless it has already. Returns loop time."""
        if self.end_by is None:
            self.end_by = asyncio.get_running_loop().time() + SHUTDOWN_SECONDS
        return self.end_by


class _Edge:
    """Around every request: an id, a bound on how many run, errors put into words, a log line."""

    def __init__(
        self, ending: _Ending, holdings: Holdings, answered: Answered, tracer: Tracer | None
    ) -> None:
        self._holdings = holdings
        self._answered = answered
        self._outermost = [] if tracer is None else [following(tracer)]
        self._running = 0
        self._ending = ending
        self._idle = asyncio.Event()

    @asynccontextmanager
    async def around(
        self, routes: list[web.RouteDef], listening: socket.socket, tls: ssl.SSLContext | None, bounds: Bounds
    ) -> AsyncGenerator[Entrance]:
        """Serve these routes inside the block."""
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[*self._outermost, self.middleware])
        app.add_routes(routes)
        async with Entrance.open(app, listening, tls=tls, bounds=bounds) as entrance:
            try:
                yield entrance
            finally:
                await self._drain()

    async def _drain(self) -> None:
        """Until nothing is in flight, or its time is over. What comes meanwhile is told to go elsewhere."""
        end_by = self._ending.begun()
        if self._running:
            self._idle.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout_at(end_by):
                    await self._idle.wait()

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        request_id = request[REQUEST_ID] = f"req_{secrets.token_hex(8)}"
        began = request[SEEN] = time.monotonic()
        self._running += 1
        request[LOAD] = Load(self._running, REQUESTS_AT_ONCE, self._ending.end_by is not None)
        request[HELD] = Held(self._holdings)
        status: int | None = None
        try:
            response = _held(request, await self._bounded(request, handler))
            status = response.status
        except asyncio.CancelledError:
            request[HELD].close()
            log.info(
                "request_abandoned id=%s method=%s route=%s", request_id, request.method, _route(request)
            )
            raise
        except Exception as err:
            response = _error_response(request, request_id, err)
            status = response.status
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()  # Only looked at while it drains.
            self._answered(request.method, _pattern(request), status, time.monotonic() - began)
        log.debug(
            "request_answered id=%s method=%s route=%s status=%d ms=%.1f",
            request_id,
            request.method,
            _route(request),
            response.status,
            (time.monotonic() - began) * 1000,
        )
        response.headers["X-Request-Id"] = request_id
        if LAST in request or request[LOAD].draining:
            response.force_close()
        return response

    async def _bounded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request[LOAD].draining and not _route(request).endswith("/v1/health"):
            raise Refusal(Code.DRAINING, "this agent is about to stop and begins nothing: ask again")
        if self._running > REQUESTS_AT_ONCE:
            sentence = f"{REQUESTS_AT_ONCE} requests are being answered already; ask again later"
            raise Refusal(Code.OVERLOADED, sentence)
        return await handler(request)


def _held(request: web.Request, response: web.StreamResponse) -> web.StreamResponse:
    """An answer, which lies here until its reader has taken it. Raises `Refusal` where there is no room."""
    body = response.body if isinstance(response, web.Response) else None
    if isinstance(body, Payload) and (size := body.size or 0) > PIECE_BYTES:
        request[HELD].hold(size, "the answer")
    return response


def _error_response(request: web.Request, request_id: str, error: Exception) -> web.Response:
    refusal = _put_into_words(request, request_id, error)
    if refusal.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        log.error(
            "request_failed id=%s method=%s route=%s code=%s error=%s",
            request_id,
            request.method,
            _route(request),
            refusal.code,
            refusal.sentence,
        )
    headers: dict[str, str] = {}
    if refusal.code is Code.UNAUTHORIZED:
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, web.HTTPMethodNotAllowed):
        headers["Allow"] = ", ".join(sorted(error.allowed_methods))
    return refused(refusal, headers)


def _put_into_words(request: web.Request, request_id: str, error: Exception) -> Refusal:
    match error:
        case Refusal():
            return error
        case ForktreeError():
            return refusal_of(error)
        case web.HTTPNotFound():
            return Refusal(Code.NOT_FOUND, "there is no such path; sessions are at /ns/NAMESPACE/v1/sessions")
        case web.HTTPMethodNotAllowed():
            allowed = ", ".join(sorted(error.allowed_methods))
            return Refusal(Code.METHOD_NOT_ALLOWED, f"{request.method} is not possible here, only {allowed}")
        case web.HTTPRequestEntityTooLarge():
            return Refusal(Code.BODY_TOO_LARGE, f"the body is larger than {MAX_BODY_BYTES} bytes")
        case web.HTTPException() if error.status < HTTPStatus.INTERNAL_SERVER_ERROR:
            return Refusal(Code.BAD_REQUEST, error.reason or "the request is not valid HTTP")
        case _:
            log.error("request_crashed id=%s error=%s\n%s", request_id, type(error).__name__, place_of(error))
            return Refusal(Code.INTERNAL, f"something here is broken; the agent's log has it as {request_id}")


def _pattern(request: web.Request) -> str:
    """The same without the two ways in which a namespace can be named."""
    return _route(request).removeprefix("/ns/{namespace}")


def _route(request: web.Request) -> str:
    """The pattern, not the path: a path may hold anything."""
    resource = request.match_info.route.resource
    return resource.canonical if resource is not None else "unknown"
