"""Servers inside sessions: their HTTP, and their connections as such."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from typing import Final

import aiohttp
from aiohttp import web

from forktree.errors import ForktreeError
from forktree.models import Session
from forktree_agent.control.records import PortRecord
from forktree_agent.http import guest_headers, locating, sockets, tunnels
from forktree_agent.http.allowing import while_allowed
from forktree_agent.http.errors import Code, Refusal
from forktree_agent.http.exchanges import Order, exchange, wants_websocket
from forktree_agent.http.requests import REQUEST_ID
from forktree_agent.http.table import Asked, Raw, Right, Route
from forktree_agent.http.tunnels import GuestPipe

LOOK: Final = Right("get", "sessions/proxy")
USE: Final = Right("create", "sessions/proxy")

_METHODS: Final = {
    "GET": LOOK,
    "HEAD": LOOK,
    "OPTIONS": LOOK,
    "POST": USE,
    "PUT": USE,
    "PATCH": USE,
    "DELETE": USE,
}
"""Which right each takes. A WebSocket begins with a GET, and takes both."""

_END: Final = b""
"""As a message: nothing more comes from this side."""

_BROKE: Final = aiohttp.WSCloseCode.INTERNAL_ERROR


async def _serve(asked: Asked) -> web.StreamResponse:
    """Hand a request on to the server, and its answer back."""
    if wants_websocket(asked.request):
        await asked.permit(USE.verb, USE.resource, asked.session_id)
    session, start_by = await asked.placed()
    if node := locating.other_node(asked.facade, session):
        return await _elsewhere(asked, node, start_by)
    port = tunnels.declared(asked.facade, session, asked.named("port"))
    prefix, path = _split(asked)
    headers = asked.request.headers
    asked_at = headers.get("Host", "")
    order = Order(
        target=path,
        headers=guest_headers.to_guest(
            list(headers.items()),
            authority=f"localhost:{port.port}",
            prefix=prefix,
            asked_at=asked_at,
            is_upgrade=wants_websocket(asked.request),
        ),
        told=partial(
            guest_headers.from_guest,
            session=asked.session_id,
            prefix=prefix,
            path=path.partition("?")[0],
            ports=frozenset({str(port.port)}),
            asked_at=asked_at,
        ),
        still=asked.still_may,
        subject=f"port {port.port} ({port.name}) of session {asked.session_id}",
    )
    async with _connected(asked, session, port, start_by) as pipe:
        return await exchange(asked.request, pipe, order)


async def _tunnel(asked: Asked) -> web.StreamResponse:
    """The connection itself, as messages of a WebSocket."""
    if not wants_websocket(asked.request):
        sentence = (
            "this is a port's connection, a WebSocket: ask with `Upgrade: websocket`; its HTTP is below"
            f" …/ports/{asked.named('port')}/"
        )
        raise Refusal(Code.BAD_REQUEST, sentence)
    session, start_by = await asked.placed()
    if node := locating.other_node(asked.facade, session):
        return await _elsewhere(asked, node, start_by)
    port = tunnels.declared(asked.facade, session, asked.named("port"))
    socket = web.WebSocketResponse(
        heartbeat=sockets.HEARTBEAT_SECONDS, max_msg_size=sockets.MAX_MESSAGE_BYTES, compress=False
    )
    try:
        async with while_allowed(asked.still_may), _connected(asked, session, port, start_by) as pipe:
            await socket.prepare(asked.request)
            await _joined(socket, pipe)
    except (ConnectionError, Refusal, ForktreeError):
        if not socket.prepared:
            raise
        await socket.close(code=_BROKE, message=b"the connection in the session broke")
    await socket.close()
    return socket


async def _joined(socket: web.WebSocketResponse, pipe: GuestPipe) -> None:
    """Until both sides have ended. Raises `ConnectionError` where one breaks."""
    ends = _Ends()
    await sockets.first_of(_up(socket, pipe, ends), _down(pipe, socket, ends))


@dataclass(frozen=True, slots=True)
class _Ends:
    """Which sides have ended."""

    caller: asyncio.Event = field(default_factory=asyncio.Event)
    server: asyncio.Event = field(default_factory=asyncio.Event)


async def _up(socket: web.WebSocketResponse, pipe: GuestPipe, ends: _Ends) -> None:
    """Reads on when the caller has ended its side: a WebSocket that nobody reads is dead."""
    async for message in socket:
        if message.type is not aiohttp.WSMsgType.BINARY or ends.caller.is_set():
            break
        if message.data:
            await pipe.write(message.data)
        else:
            await pipe.end()
            ends.caller.set()
    if not (ends.caller.is_set() and ends.server.is_set()):
        raise ConnectionError("the caller went away before the end")


async def _down(pipe: GuestPipe, socket: web.WebSocketResponse, ends: _Ends) -> None:
    while data := await pipe.read():
        await sockets.send(socket, data)
    await sockets.send(socket, _END)
    ends.server.set()
    await ends.caller.wait()


@asynccontextmanager
async def _connected(
    asked: Asked, session: Session, port: PortRecord, start_by: float
) -> AsyncGenerator[GuestPipe]:
    request_id = asked.request[REQUEST_ID]
    with asked.parts.tunnels.counted(session):
        async with tunnels.connected(
            asked.facade, session, port, start_by=start_by, request_id=request_id
        ) as pipe:
            yield pipe


async def _elsewhere(asked: Asked, node: str, start_by: float) -> web.StreamResponse:
    """The same, of the session's own node: its agent gets the request as it came."""
    request = asked.request
    errand = asked.errand(node, "", begin_by=start_by)
    async with asked.parts.proxy.pipe(request, errand) as peer:
        headers = guest_headers.to_agent(
            list(request.headers.items()),
            authority=peer.authority,
            added=[peer.handed_on],
            is_upgrade=wants_websocket(request),
        )
        order = Order(
            target=_whole(asked),
            headers=headers,
            told=partial(guest_headers.from_agent, asked_at=request.headers.get("Host", "")),
            still=asked.still_may,
            subject=f"the agent of node {node}",
        )
        return await exchange(request, peer.pipe, order)


def _split(asked: Asked) -> tuple[str, str]:
    """The path under which the caller sees the server, and what it asks of it; both as they came."""
    url = asked.request.rel_url
    parts = url.raw_path.split("/")
    ours = len(["", "ns", "N", "v1", "sessions", "S", "ports", "P"])
    if "namespace" not in asked.request.match_info:
        ours = len(["", "v1", "sessions", "S", "ports", "P"])
    query = f"?{url.raw_query_string}" if url.raw_query_string else ""
    return "/".join(parts[:ours]), f"/{'/'.join(parts[ours:])}{query}"


def _whole(asked: Asked) -> str:
    """The same path for an agent that knows callers of any namespace, made of parts that were checked."""
    start = f"/ns/{asked.namespace}/v1/sessions/{asked.session_id}/ports/{asked.named('port')}"
    return start if asked.route is TUNNEL else start + _split(asked)[1]


TUNNEL: Final = Route(
    method="GET",
    path="/sessions/{session_id}/ports/{port}",
    summary="A connection to a port, as a WebSocket of bytes; an empty message ends one side",
    handler=_tunnel,
    rights=(USE,),
    answers={HTTPStatus.SWITCHING_PROTOCOLS: ()},
)

ROUTES: Final = (
    TUNNEL,
    *(
        Route(
            method=method,
            path="/sessions/{session_id}/ports/{port}/{path}",
            summary="What the server at a port answers to the same request",
            handler=_serve,
            rights=(right,),
            answers={HTTPStatus.OK: (Raw("*/*"),)},
        )
        for method, right in _METHODS.items()
    ),
)
