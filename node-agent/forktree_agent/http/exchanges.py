"""One request and its answer over a pipe, as HTTP/1.1: bodies as they come, both ways at once.

What a server says is read by h11 and written anew, so no answer of it can be taken for two, or end where it
should not. Only `101 Switching Protocols` makes bytes of it pass as they are, and the caller's connection
ends with them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final, TypeVar, cast

import aiohttp
import h11
from aiohttp import web
from multidict import CIMultiDict

from forktree_agent.http import streaming
from forktree_agent.http.allowing import while_allowed
from forktree_agent.http.errors import Code, Refusal
from forktree_agent.http.guest_headers import Headers
from forktree_agent.http.pipes import Pipe
from forktree_agent.http.sockets import TAKEN_SECONDS, first_of
from forktree_agent.http.streaming import Pieces

HEAD_BYTES: Final = 32 << 10
"""Of an answer: a head that is longer is none."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What to ask of whom, and what to make of its answer."""

    target: str
    """Path and query as they came."""
    headers: Iterable[tuple[str, str]]
    """All but those about the body's length."""
    told: Callable[[Headers], CIMultiDict[str]]
    """What of the answer's headers the caller gets."""
    still: Callable[[], Awaitable[None]]
    """Asked every so often whether this may go on. What it raises ends it."""
    subject: str
    """Who answers, for sentences: `port 80 (web) of session a`."""


def wants_websocket(request: web.Request) -> bool:
    """Whether it asks for one. No other protocol is changed to."""
    names = {each.strip().lower() for each in request.headers.get("Connection", "").split(",")}
    return (
        request.method == "GET"
        and "upgrade" in names
        and request.headers.get("Upgrade", "").strip().lower() == "websocket"
    )


async def exchange(request: web.Request, pipe: Pipe, order: Order) -> web.StreamResponse:
    """The answer to `request` of whoever is at the other end of `pipe`.

    Raises `Refusal`: `upstream_error` where there is none.
    """
    one = _Exchange(request, pipe, order)
    try:
        async with while_allowed(order.still):
            await one.ask()
            return await _while_sending(one.send_body(), one.answer())
    except Refusal:
        if not one.has_begun:
            raise
        return one.break_off()
    except ConnectionError as err:
        raise Refusal(Code.UPSTREAM_ERROR, f"{order.subject} gave no answer: {err}") from err
    except h11.RemoteProtocolError as err:
        raise Refusal(Code.UPSTREAM_ERROR, f"{order.subject} gave an answer that is no HTTP") from err


class _Exchange:
    def __init__(self, request: web.Request, pipe: Pipe, order: Order) -> None:
        self._request = request
        self._pipe = pipe
        self._order = order
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=HEAD_BYTES)
        self.has_begun = False
        """To answer the caller: a second answer cannot follow."""

    def break_off(self) -> web.StreamResponse:
        """End the caller's connection in the midst of the answer."""
        if self._request.transport is not None:
            self._request.transport.abort()
        return web.Response()  # For a connection that is not there any more.

    async def ask(self) -> None:
        """Send the head."""
        request = self._request
        try:
            head = h11.Request(
                method=request.method,
                target=self._order.target,
                headers=[
                    (name.encode(), _raw(value)) for name, value in (*self._order.headers, *self._length())
                ],
            )
            data = self._http.send(head)
        except h11.LocalProtocolError as err:
            sentence = "this request's head cannot be handed on: it is not as strict as HTTP/1.1 asks for"
            raise Refusal(Code.BAD_REQUEST, sentence) from err
        await self._pipe.write(data or b"")

    def _length(self) -> list[tuple[str, str]]:
        """How the body's end is told. Our own: what was sent of it is for the connection that it came by."""
        length = self._request.content_length
        if length is not None:
            return [("Content-Length", str(length))]
        return [("Transfer-Encoding", "chunked")] if self._request.body_exists else []

    async def send_body(self) -> None:
        """As it comes. Who takes no more of it may still answer."""
        try:
            if self._request.body_exists:
                while data := await self._request.content.readany():
                    await self._pipe.write(self._http.send(h11.Data(data=data)) or b"")
            if rest := self._http.send(h11.EndOfMessage()):
                await self._pipe.write(rest)
        except web.RequestPayloadError as err:
            sentence = "the body does not end as its Content-Length or its chunks say"
            raise Refusal(Code.BAD_REQUEST, sentence) from err
        except (ConnectionError, h11.LocalProtocolError):
            return

    async def answer(self) -> web.StreamResponse:
        while True:
            match await self._event():
                case h11.InformationalResponse(status_code=HTTPStatus.SWITCHING_PROTOCOLS) as head:
                    return await self._switched(head)
                case h11.Response() as head:
                    return await self._whole(head)
                case h11.InformationalResponse():
                    continue
                case _:
                    raise ConnectionError("it ended the connection")

    async def _event(self) -> object:
        while True:
            event = self._http.next_event()
            if event is not h11.NEED_DATA:
                return event
            self._http.receive_data(await self._pipe.read())

    async def _whole(self, head: h11.Response) -> web.StreamResponse:
        async def pass_on(pieces: Pieces) -> None:
            await pieces.begin()
            try:
                while isinstance(event := await self._event(), h11.Data):
                    await pieces.send(bytes(event.data))
            except h11.RemoteProtocolError as err:
                raise ConnectionError("the answer broke off") from err

        headers = self._order.told(_text(head))
        self.has_begun = True
        return await streaming.pieces(self._request, pass_on, headers, head.status_code)

    async def _switched(self, head: h11.InformationalResponse) -> web.StreamResponse:
        """From here on bytes go as they are, until either side ends."""
        headers = self._order.told(_text(head))
        headers["Connection"] = "Upgrade"
        headers["Upgrade"] = "websocket"
        response = web.StreamResponse(status=HTTPStatus.SWITCHING_PROTOCOLS, headers=headers)
        response.force_close()
        self.has_begun = True
        await response.prepare(self._request)
        taken = _Taken(self._request)
        ahead, _ = self._http.trailing_data
        await first_of(self._up(taken), self._down(ahead, response))
        return response

    async def _up(self, taken: _Taken) -> None:
        try:
            while data := await taken.read():
                await self._pipe.write(data)
            await self._pipe.end()
        except ConnectionError:
            return

    async def _down(self, data: bytes, response: web.StreamResponse) -> None:
        try:
            while True:
                if data:
                    async with asyncio.timeout(TAKEN_SECONDS):
                        await response.write(data)
                if not (data := await self._pipe.read()):
                    return
        except (ConnectionError, TimeoutError):
            return


class _Taken:
    """What the caller's connection brings, once it is no HTTP any more, as a stream that can be behind."""

    def __init__(self, request: web.Request) -> None:
        protocol = request.protocol
        self._stream = aiohttp.StreamReader(protocol, 2**16, loop=asyncio.get_running_loop())
        # Declared for the library's own reader of WebSockets, of which no more than these two is used.
        protocol.set_parser(cast("Any", self))

    def feed_data(self, data: bytes) -> tuple[bool, bytes]:
        self._stream.feed_data(data)
        return False, b""

    def feed_eof(self) -> None:
        self._stream.feed_eof()

    async def read(self) -> bytes:
        """Empty at its end."""
        return await self._stream.readany()


async def _while_sending(sending: Coroutine[Any, Any, None], answering: Coroutine[Any, Any, _T]) -> _T:
    """What `answering` comes to, whether or not all was sent by then. What `sending` raises counts first."""
    up, down = asyncio.create_task(sending), asyncio.create_task(answering)
    try:
        await asyncio.wait((up, down), return_when=asyncio.FIRST_COMPLETED)
        if up.done():
            up.result()
        return await down
    finally:
        up.cancel()
        down.cancel()
        await asyncio.gather(up, down, return_exceptions=True)


def _raw(value: str) -> bytes:
    """As it came: aiohttp reads heads so."""
    return value.encode("utf-8", "surrogateescape")


def _text(head: h11.Response | h11.InformationalResponse) -> Headers:
    """Bytes that are no text are shown as such. Raises `RemoteProtocolError` for a head that is too long,
    which h11 takes if it comes at once."""
    if sum(len(name) + len(value) for name, value in head.headers) > HEAD_BYTES:
        raise h11.RemoteProtocolError("the head is too long")
    return [(name.decode("ascii"), value.decode("utf-8", "replace")) for name, value in head.headers]
