"""HTTP with a server that may say anything: what its callers get of it, over a real connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from yarl import URL

from forktree_agent.http import bodies
from forktree_agent.http.errors import Refusal
from forktree_agent.http.exchanges import HEAD_BYTES, Order, exchange
from forktree_agent.http.guest_headers import from_agent
from forktree_agent.http.pipes import StreamPipe
from forktree_agent.http.requests import REQUEST_ID


async def _fine() -> None:
    pass


@asynccontextmanager
async def before(said: bytes, *, heard: bytearray | None = None, reads: bool = True) -> AsyncGenerator[str]:
    """The address of a proxy before a server that says this to whoever comes, once a head has come."""

    async def guest(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        got = await reader.readuntil(b"\r\n\r\n")
        if heard is not None:
            heard.extend(got)
        writer.write(said)
        writer.write_eof()
        while reads and (data := await reader.read(1 << 16)):
            if heard is not None:
                heard.extend(data)
        writer.close()

    async def handler(request: web.Request) -> web.StreamResponse:
        request[REQUEST_ID] = "req_1"
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        order = Order(
            target=request.rel_url.raw_path,
            headers=[("Host", "x")],
            told=lambda headers: from_agent(headers, asked_at=""),
            still=_fine,
            subject="the server",
        )
        try:
            return await exchange(request, StreamPipe(reader, writer), order)
        except Refusal as err:
            return bodies.refused(err)
        finally:
            writer.transport.abort()

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    async with await asyncio.start_server(guest, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with TestServer(app) as proxy:
            yield str(proxy.make_url("/"))


async def raw(url: str, request: bytes) -> bytes:
    """All that comes back until the connection ends."""
    where = URL(url)
    reader, writer = await asyncio.open_connection(where.host, where.port)
    writer.write(request)
    try:
        return await reader.read()
    finally:
        writer.close()


@pytest.mark.parametrize(
    "said",
    [
        b"SSH-2.0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nA b: c\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nA: " + b"x" * (HEAD_BYTES + 1) + b"\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: upgrade\r\n\r\n",
        b"HTTP/1.1 200",
        b"",
    ],
)
async def test_what_is_no_answer_becomes_a_refusal(said: bytes) -> None:
    async with before(said) as url, aiohttp.ClientSession() as client, client.get(url) as answer:
        assert (answer.status, (await answer.json())["code"]) == (502, "upstream_error")


async def test_two_answers_to_one_request_are_one() -> None:
    one = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
    two = b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\nX-Smuggled: 1\r\n\r\nforged"
    async with before(one + two) as url:
        got = await raw(url, b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert got.endswith(b"\r\n\r\nok")
    assert b"forged" not in got


@pytest.mark.parametrize(
    "said",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhalf",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nabXX",
    ],
)
async def test_an_answer_that_breaks_off_does_so_for_its_caller(said: bytes) -> None:
    async with before(said) as url, aiohttp.ClientSession() as client:
        with pytest.raises(aiohttp.ClientError):
            async with client.get(url) as answer:
                await answer.read()


async def test_early_hints_are_left_out_and_the_end_of_the_connection_is_an_end() -> None:
    said = b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\nHTTP/1.0 201 Made\r\nX-A: 1\r\n\r\nall of it"
    async with before(said) as url, aiohttp.ClientSession() as client, client.get(url) as answer:
        assert (answer.status, answer.headers["X-A"], await answer.read()) == (201, "1", b"all of it")
        assert "Link" not in answer.headers


async def test_a_body_comes_with_one_length_and_whole() -> None:
    heard = bytearray()
    said = b"HTTP/1.1 204 No Content\r\n\r\n"
    async with before(said, heard=heard) as url:
        request = b"POST /a HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
        await raw(url, request + b"3\r\nabc\r\n2\r\nde\r\n0\r\nX-Trailer: 1\r\n\r\n")
    head, _, body = bytes(heard).partition(b"\r\n\r\n")
    assert head == b"POST /a HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked"
    assert body.replace(b"\r\n", b"") in {b"5abcde0", b"3abc2de0"}


async def test_a_server_may_answer_before_it_has_read_all() -> None:
    said = b"HTTP/1.1 413 Too Much\r\nContent-Length: 3\r\nConnection: close\r\n\r\nno!"
    async with (
        before(said, reads=False) as url,
        aiohttp.ClientSession() as client,
        client.post(url, data=bytes(100_000)) as answer,
    ):
        assert (answer.status, await answer.read()) == (413, b"no!")


async def test_a_body_that_is_cut_off_is_never_whole_for_the_server() -> None:
    heard = bytearray()
    async with before(b"", heard=heard) as url:
        where = URL(url)
        _, writer = await asyncio.open_connection(where.host, where.port)
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n")
        while b"abc" not in heard:  # noqa: ASYNC110  # It is a server of its own.
            await asyncio.sleep(0.01)
        writer.transport.abort()
    assert not heard.endswith(b"0\r\n\r\n")
