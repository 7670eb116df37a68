"""A port of a session as a port of this machine: each connection to that becomes one to the server inside.

Written by hand for both flavours: the sync one has an event loop in a thread of its own.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from typing import Final, NamedTuple

import aiohttp
from yarl import URL

from forktree._settings import Reach
from forktree._websockets import opened
from forktree.errors import BadSettings, ClientError

PIECE_BYTES: Final = 1 << 16
CONNECTIONS: Final = 64
"""At once; an agent lets in 32 of a session. Further ones are closed again."""

Told = Callable[[ClientError], None]


class Address(NamedTuple):
    """Where to connect to, as `socket.create_connection` takes it."""

    host: str
    port: int


@asynccontextmanager
async def async_forwarding(
    reach: Callable[[], Awaitable[Reach]], path: str, local: Address, told: Told
) -> AsyncGenerator[Address]:
    """Listen at `local` (port 0: any) inside the block. `path`: of the port, below what `reach` says.

    Leaving the block ends all connections. `told` hears why one could not be made; it is reset then. Raises
    `BadSettings` where nobody can listen there.
    """
    async with aiohttp.ClientSession(trust_env=False) as http:
        forwarder = _Forwarder(http, reach, path, told)
        try:
            server = await asyncio.start_server(forwarder.take, local.host, local.port)
        except OSError as err:
            raise BadSettings(f"nobody can listen at {local.host}:{local.port}: {err.strerror}") from err
        try:
            host, port = server.sockets[0].getsockname()[:2]
            yield Address(host, port)
        finally:
            server.close()
            await forwarder.close()


@contextmanager
def forwarding(reach: Callable[[], Reach], path: str, local: Address, told: Told) -> Generator[Address]:
    """As `async_forwarding`. `told` is called in the other thread."""
    address: Future[Address] = Future()
    over: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def reached() -> Reach:
        return await asyncio.to_thread(reach)

    async def forward() -> None:
        end = asyncio.Event()
        over.set_result((asyncio.get_running_loop(), end))
        try:
            async with async_forwarding(reached, path, local, told) as found:
                address.set_result(found)
                await end.wait()
        except ClientError as err:
            address.set_exception(err)

    thread = threading.Thread(target=lambda: asyncio.run(forward()), name="forktree-forward", daemon=True)
    thread.start()
    try:
        yield address.result()
    finally:
        loop, end = over.result()
        if thread.is_alive() and not loop.is_closed():
            loop.call_soon_threadsafe(end.set)
        thread.join()


class _Forwarder:
    """All connections of one port."""

    def __init__(
        self, http: aiohttp.ClientSession, reach: Callable[[], Awaitable[Reach]], path: str, told: Told
    ) -> None:
        self._http = http
        self._reach = reach
        self._path = path
        self._told = told
        self._tasks: set[asyncio.Task[None]] = set()

    def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._tasks) >= CONNECTIONS:
            writer.transport.abort()
            return
        task = asyncio.create_task(self._carry(reader, writer), name="forward-connection")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            where = await self._reach()
            url = URL(where.url + self._path, encoded=True)
            async with await opened(self._http, where, url, "connection") as there:
                await _joined(reader, writer, there)
            writer.close()
            await writer.wait_closed()
        except ClientError as err:
            _reset(writer)
            self._told(err)
        except BaseException as err:
            _reset(writer)
            if not isinstance(err, OSError):  # That is either side's, and the other one has seen it now.
                raise


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close it so that its peer takes it for broken and not for ended."""
    ours: socket.socket = writer.get_extra_info("socket")
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def _joined(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, there: aiohttp.ClientWebSocketResponse
) -> None:
    """Until both sides have ended. Raises `OSError` where one breaks."""
    ours, theirs = asyncio.Event(), asyncio.Event()
    works = (_up(reader, there, ours, theirs), _down(there, writer, ours, theirs))
    tasks = [asyncio.create_task(each, name="forward-bytes") for each in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for each in done:
            each.result()
    finally:
        for each in tasks:
            each.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _up(
    reader: asyncio.StreamReader,
    there: aiohttp.ClientWebSocketResponse,
    ours: asyncio.Event,
    theirs: asyncio.Event,
) -> None:
    while data := await reader.read(PIECE_BYTES):
        await there.send_bytes(data)
    await there.send_bytes(b"")
    ours.set()
    await theirs.wait()


async def _down(
    there: aiohttp.ClientWebSocketResponse,
    writer: asyncio.StreamWriter,
    ours: asyncio.Event,
    theirs: asyncio.Event,
) -> None:
    """Reads on when the server has ended its side: a WebSocket that nobody reads is dead."""
    async for message in there:
        if message.type is not aiohttp.WSMsgType.BINARY or theirs.is_set():
            break
        if message.data:
            writer.write(message.data)
            await writer.drain()
        else:
            writer.write_eof()
            theirs.set()
    if not (ours.is_set() and theirs.is_set()):
        raise ConnectionError("the agent ended the connection before its end")
