"""What a client may take of the server before and between its requests: real sockets, small bounds.

Both event loops are tried: the agent runs on uvloop, which has a TLS and a transport of its own.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import ssl
import zlib
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
import uvloop
from aiohttp import web

from forktree.wire import MAX_BODY_BYTES, Exec
from forktree_agent.http import bodies
from forktree_agent.http.connections import Bounds
from forktree_agent.http.routes import Api
from forktree_agent.http.server import Listener, serving
from forktree_agent.metrics import Metrics

SECONDS = 30.0
"""For each test, whose bounds are fractions of a second."""
SHORT = 0.3
BEARABLE = 2.0
"""Short, where something else must still be done in time, also on a busy machine."""
ASKS = b"GET /v1/short HTTP/1.1\r\nHost: agent\r\n\r\n"
POSTS = b"POST /v1/read HTTP/1.1\r\nHost: agent\r\n"
LARGE_BYTES = 64 << 20
"""More than the buffers of both sides hold."""


@dataclass
class SmallApi:
    """Stands for the routes: what takes no time, what takes long, what is large, and what has a body."""

    begun: asyncio.Event = field(default_factory=asyncio.Event)
    goes_on: asyncio.Event = field(default_factory=asyncio.Event)

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/v1/short", self.short),
            web.get("/v1/long", self.long),
            web.get("/v1/large", self.large),
            web.post("/v1/read", self.read),
        ]

    async def short(self, _: web.Request) -> web.Response:
        return web.json_response({})

    async def long(self, _: web.Request) -> web.Response:
        self.begun.set()
        await self.goes_on.wait()
        return web.json_response({})

    async def large(self, _: web.Request) -> web.Response:
        self.begun.set()
        return bodies.whole(bytes(LARGE_BYTES))

    async def read(self, request: web.Request) -> web.Response:
        return web.json_response({"argv": (await bodies.read(request, Exec)).argv})


@dataclass
class Client:
    """One connection to the server, to say on it what no client library would."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def ask(self, *sent: bytes) -> tuple[int, Any]:
        self.writer.write(b"".join(sent))
        return await self.answer()

    async def answer(self) -> tuple[int, Any]:
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
        length = next(line for line in head.splitlines() if line.lower().startswith("content-length:"))
        body = await self.reader.readexactly(int(length.partition(":")[2]))
        return int(head.split()[1]), json.loads(body)

    async def ended(self) -> None:
        """Return once the server has closed it; fails if it says something instead."""
        with suppress(ConnectionError):
            assert await self.reader.read(1) == b""


@dataclass(frozen=True)
class Door:
    """The server, with bounds that the test chooses."""

    port: int
    trust: ssl.SSLContext
    api: SmallApi

    @asynccontextmanager
    async def client(self, *, tls: bool = True, at: str = "127.0.0.1") -> AsyncGenerator[Client]:
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", self.port, ssl=self.trust if tls else None, local_addr=(at, 0)
        )
        try:
            yield Client(reader, writer)
        finally:
            writer.transport.abort()  # To close it would take until the server has said good-bye too.

    async def refuses(self, *, at: str = "127.0.0.1") -> bool:
        """Whether another connection is closed before it can say anything."""
        try:
            async with self.client(at=at) as client:
                return (await client.ask(ASKS))[0] != 200
        except (ConnectionError, ssl.SSLError, asyncio.IncompleteReadError):
            return True


@asynccontextmanager
async def door(folder: Path, **bounds: Any) -> AsyncGenerator[Door]:
    api = SmallApi()
    listener = Listener(
        host="127.0.0.1", port=0, names=("127.0.0.1",), tls_directory=folder, bounds=Bounds(**bounds)
    )
    async with serving(listener, cast("Api", api), Metrics().answered) as served:
        yield Door(served.port, ssl.create_default_context(cadata=served.ca_bundle), api)


Loop = Callable[[], asyncio.AbstractEventLoop]
LOOPS: dict[str, Loop] = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


def on_both_loops(test: Callable[[Path], Coroutine[None, None, None]]) -> Callable[[Path, Loop], None]:
    @pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
    def on_one(tmp_path: Path, loop: Loop) -> None:
        with asyncio.Runner(loop_factory=loop) as runner:
            runner.run(asyncio.wait_for(test(tmp_path), SECONDS))

    return on_one


# Time.


@on_both_loops
async def test_a_connection_that_never_begins_tls_is_closed(folder: Path) -> None:
    async with door(folder, handshake_seconds=SHORT) as server, server.client(tls=False) as client:
        await client.ended()


@on_both_loops
async def test_a_connection_without_a_request_is_closed(folder: Path) -> None:
    async with door(folder, idle_seconds=SHORT) as server, server.client() as client:
        await client.ended()


@on_both_loops
async def test_a_head_that_does_not_come_to_its_end_is_not_waited_for(folder: Path) -> None:
    async with door(folder, idle_seconds=SHORT) as server, server.client() as client:
        client.writer.write(ASKS[:-2] + b"X-Slow: ")
        await client.ended()


@on_both_loops
async def test_a_connection_is_kept_for_the_next_request_but_not_for_ever(folder: Path) -> None:
    async with door(folder, idle_seconds=BEARABLE) as server, server.client() as client:
        assert await client.ask(ASKS) == (200, {})
        assert await client.ask(ASKS) == (200, {})
        await client.ended()


@on_both_loops
async def test_an_answer_that_takes_long_is_not_cut(folder: Path) -> None:
    bounds = {"handshake_seconds": BEARABLE, "idle_seconds": BEARABLE, "unread_seconds": SHORT}
    async with door(folder, **bounds) as server, server.client() as waiting:
        waiting.writer.write(ASKS.replace(b"short", b"long"))
        await server.api.begun.wait()
        async with server.client() as idle, server.client(tls=False) as silent:
            await idle.ended()  # The bounds of a connection that began later are over.
            await silent.ended()
        server.api.goes_on.set()
        assert await waiting.answer() == (200, {})


@on_both_loops
async def test_an_answer_that_is_taken_slowly_is_not_cut(folder: Path) -> None:
    async with door(folder, idle_seconds=SHORT, goodbye_seconds=SHORT) as server, server.client() as client:
        client.writer.write(ASKS.replace(b"short", b"large"))
        await client.reader.readuntil(b"\r\n\r\n")
        for _ in range(4):
            await client.reader.readexactly(1 << 20)
            async with server.client() as idle:
                await idle.ended()
        await client.reader.readexactly(LARGE_BYTES - (4 << 20))


@on_both_loops
async def test_an_answer_that_is_not_taken_is_dropped(folder: Path) -> None:
    async with (
        door(folder, connections=1, unread_seconds=SHORT, goodbye_seconds=SHORT) as server,
        server.client() as client,
    ):
        cast("asyncio.Transport", client.writer.transport).pause_reading()
        client.writer.write(ASKS.replace(b"short", b"large"))
        await server.api.begun.wait()
        while await server.refuses():  # Until the one place is free again.
            pass


@on_both_loops
async def test_a_client_that_does_not_say_good_bye_is_left_without(folder: Path) -> None:
    async with (
        door(folder, connections=1, idle_seconds=SHORT, goodbye_seconds=SHORT) as server,
        server.client() as client,
    ):
        cast("asyncio.Transport", client.writer.transport).pause_reading()
        while await server.refuses():
            pass


@on_both_loops
async def test_a_body_that_does_not_come_is_not_waited_for(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bodies, "BODY_SECONDS", SHORT)
        async with door(folder) as server, server.client() as client:
            status, said = await client.ask(POSTS, b"Content-Length: 100\r\n\r\n", b'{"argv"')
            assert (status, said["code"]) == (400, "bad_request")
            assert "did not arrive" in said["message"]
            await client.ended()  # What is left of the body would be taken for the next request.


@on_both_loops
async def test_a_body_without_an_end_is_not_read_for_ever(folder: Path) -> None:
    async with door(folder) as server, server.client() as client:
        client.writer.write(POSTS + b"Transfer-Encoding: chunked\r\n\r\n")
        chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"

        async def send() -> None:
            while not client.writer.is_closing():
                client.writer.write(chunk)
                await client.writer.drain()
                await asyncio.sleep(0)  # A writer whose peer is gone does not wait.

        sending = asyncio.create_task(send(), name="send-for-ever")
        assert (await client.answer())[0] == 413
        await client.ended()
        sending.cancel()
        with suppress(ConnectionError, asyncio.CancelledError):
            await sending


# Number.


@on_both_loops
async def test_there_are_only_so_many_connections_and_one_that_ends_makes_room(folder: Path) -> None:
    async with door(folder, connections=2) as server, server.client() as first:
        assert await first.ask(ASKS) == (200, {})
        async with server.client(tls=False):  # One that has not begun counts as well.
            while not await server.refuses():
                pass
            assert await first.ask(ASKS) == (200, {})
        while await server.refuses():
            pass


@on_both_loops
async def test_one_address_cannot_take_all_connections(folder: Path) -> None:
    async with door(folder, connections=3, connections_of_a_peer=1) as server, server.client() as first:
        assert await first.ask(ASKS) == (200, {})
        assert await server.refuses()
        assert not await server.refuses(at="127.0.0.2")


@on_both_loops
async def test_leaving_ends_every_connection(folder: Path) -> None:
    async with (
        door(folder) as server,
        server.client() as idle,
        server.client(tls=False) as silent,
    ):
        assert await idle.ask(ASKS) == (200, {})
        port = server.port
    await idle.ended()
    await silent.ended()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)


# What is no request.


PLAIN = b'{"argv": ["ls"]}'
PACKED = gzip.compress(PLAIN, mtime=0)
ZEROS = gzip.compress(bytes(256 << 20), mtime=0)
GARBAGE = b"\x00\xffgarbage"


def with_body(body: bytes, **headers: str) -> bytes:
    lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    return POSTS + f"{lines}Content-Length: {len(body)}\r\n\r\n".encode() + body


@pytest.mark.parametrize(
    ("sent", "status", "sentence"),
    [
        (b"\x16\x03\x01nonsense\r\n\r\n", 400, "not valid HTTP"),
        (b"GET /v1/short HTTP/9.9\r\n\r\n", 400, "not valid HTTP"),
        (b"GET /v1/short HTTP/1.1\r\nno colon\r\n\r\n", 400, "not valid HTTP"),
        (b"GET /v1/short HTTP/1.1\r\nA: \x00\r\n\r\n", 400, "not valid HTTP"),
        (b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\n\r\n", 400, "too long"),
        (b"GET /v1/short HTTP/1.1\r\nA: " + b"a" * 9000 + b"\r\n\r\n", 400, "too long"),
        (b"GET /v1/short HTTP/1.1\r\nHost: a\r\nExpect: miracles\r\n\r\n", 400, "Expectation Failed"),
        (b"GET /none HTTP/1.1\r\nHost: a\r\nExpect: miracles\r\n\r\n", 400, "Expectation Failed"),
        (b"BREW /v1/short HTTP/1.1\r\nHost: a\r\n\r\n", 400, "not valid HTTP"),
        (b"PUT /v1/short HTTP/1.1\r\nHost: a\r\n\r\n", 405, "not possible here"),
        (b"GET /v1/%00%ff%0a HTTP/1.1\r\nHost: a\r\n\r\n", 404, "no such path"),
        (b"OPTIONS * HTTP/1.1\r\nHost: a\r\n\r\n", 404, "no such path"),
        (POSTS + b"Content-Length: -1\r\n\r\n", 400, "not valid HTTP"),
        (POSTS + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}", 400, "not valid HTTP"),
        (POSTS + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n{}", 400, "not valid HTTP"),
        (POSTS + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", 400, "not valid HTTP"),
        (POSTS + b"\r\n", 400, "give exactly one of"),
        (with_body(b" " * (MAX_BODY_BYTES + 1)), 413, "larger than"),
        (with_body(GARBAGE, Content_Encoding="gzip"), 400, "not gzip"),
        (with_body(GARBAGE, Content_Encoding="deflate"), 400, "not deflate"),
        (with_body(b"\x78garbage", Content_Encoding="deflate"), 400, "not deflate"),
        (with_body(b"", Content_Encoding="gzip"), 400, "not one whole piece of gzip"),
        (with_body(PACKED[:12], Content_Encoding="gzip"), 400, "not one whole piece of gzip"),
        (with_body(PACKED[:-8], Content_Encoding="gzip"), 400, "not one whole piece of gzip"),
        (with_body(PACKED * 2, Content_Encoding="gzip"), 400, "not one whole piece of gzip"),
        (with_body(ZEROS, Content_Encoding="gzip"), 413, "larger than"),
        (with_body(GARBAGE, Content_Encoding="br"), 400, "Content-Encoding is not known"),
        (with_body(GARBAGE, Content_Encoding="zstd"), 400, "Content-Encoding is not known"),
        (with_body(b"{}", Content_Encoding="rot13"), 400, "Content-Encoding is not known"),
        (with_body(b"{}", Content_Encoding="gzip, gzip"), 400, "Content-Encoding is not known"),
    ],
)
async def test_what_is_no_request_is_refused_with_a_sentence_and_logged_without_a_traceback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, sent: bytes, status: int, sentence: str
) -> None:
    caplog.set_level(logging.INFO)
    async with asyncio.timeout(SECONDS), door(tmp_path) as server:
        async with server.client() as client:
            told, body = await client.ask(sent)
        assert (told, sorted(body)) == (status, ["code", "error", "error_code", "message"])
        assert sentence in body["message"]
        assert not await server.refuses()
    assert [record for record in caplog.records if record.levelno > logging.INFO] == []


@pytest.mark.parametrize(
    ("encoding", "body"),
    [
        ("identity", PLAIN),
        ("GZIP", PACKED),
        ("deflate", zlib.compress(PLAIN)),
        ("deflate", zlib.compress(PLAIN)[2:-4]),
    ],
    ids=["plain", "gzip", "zlib", "bare-deflate"],
)
async def test_a_packed_body_is_read(tmp_path: Path, encoding: str, body: bytes) -> None:
    async with door(tmp_path) as server, server.client() as client:
        assert await client.ask(with_body(body, Content_Encoding=encoding)) == (200, {"argv": ["ls"]})


async def test_the_rest_of_a_broken_body_is_no_matter_for_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    head = b"GET /none HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    async with asyncio.timeout(SECONDS), door(tmp_path) as server, server.client() as client:
        assert (await client.ask(head))[0] == 404
        client.writer.write(b"zz\r\n")
        await client.ended()
    assert [record for record in caplog.records if record.levelno > logging.INFO] == []
