"""The agent's HTTP server: TLS, one log line a request, and every error as the API's error body."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path

from aiohttp import web

from forktree.errors import ForktreeError
from forktree.wire import MAX_BODY_BYTES
from forktree_agent.http import certificates
from forktree_agent.http.bodies import refused
from forktree_agent.http.connections import Bounds, Entrance
from forktree_agent.http.errors import Code, Refusal, place_of, refusal_of
from forktree_agent.http.requests import REQUEST_ID, SEEN
from forktree_agent.http.routes import Api

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

REQUESTS_AT_ONCE = 512
"""Each may hold a body of 1 MiB and an exec's output. Existing clients open some 24 connections each."""


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
    bounds: Bounds = field(default_factory=Bounds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What a client needs to know."""

    port: int
    authority: Path | None
    """PEM file to verify the server by; None where a certificate was given."""
    ca_bundle: str
    """PEM to verify the server by, wherever its certificate comes from."""


@asynccontextmanager
async def serving(listener: Listener, api: Api) -> AsyncGenerator[Served]:
    """Serve `api` inside the block. Leaving it cancels what is still in flight after a short grace.

    Raises `OSError` where the address cannot be bound or the certificate cannot be read or written.
    """
    identity = await asyncio.to_thread(_identity, listener)  # Key generation and files: some 10 ms.
    app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_Edge().middleware])
    app.add_routes(api.routes())
    bounds = listener.bounds
    async with Entrance.open(
        app, listener.host, listener.port, tls=identity.context, bounds=bounds
    ) as entrance:
        log.info("http_serving host=%s port=%d", listener.host, entrance.port)
        yield Served(port=entrance.port, authority=identity.authority, ca_bundle=identity.ca_bundle)


def _identity(listener: Listener) -> certificates.Identity:
    if listener.certificate is not None and listener.key is not None:
        return certificates.given(listener.certificate, listener.key)
    return certificates.self_signed(listener.tls_directory, list(listener.names))


class _Edge:
    """Around every request: an id, a bound on how many run, errors put into words, a log line."""

    def __init__(self) -> None:
        self._running = 0

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        request_id = request[REQUEST_ID] = f"req_{secrets.token_hex(8)}"
        began = request[SEEN] = time.monotonic()
        self._running += 1
        try:
            response = await self._bounded(request, handler)
        except asyncio.CancelledError:
            log.info(
                "request_abandoned id=%s method=%s route=%s", request_id, request.method, _route(request)
            )
            raise
        except Exception as err:
            response = _error_response(request, request_id, err)
        finally:
            self._running -= 1
        log.debug(
            "request_answered id=%s method=%s route=%s status=%d ms=%.1f",
            request_id,
            request.method,
            _route(request),
            response.status,
            (time.monotonic() - began) * 1000,
        )
        response.headers["X-Request-Id"] = request_id
        return response

    async def _bounded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if self._running > REQUESTS_AT_ONCE:
            sentence = f"{REQUESTS_AT_ONCE} requests are being answered already; ask again later"
            raise Refusal(Code.OVERLOADED, sentence)
        return await handler(request)


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


def _route(request: web.Request) -> str:
    """The pattern, not the path: a path may hold anything."""
    resource = request.match_info.route.resource
    return resource.canonical if resource is not None else "unknown"
