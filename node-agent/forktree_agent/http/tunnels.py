"""Connections to servers in guests. Nothing leads there but a machine's channel: a tool carries each.

The tool's input and output are what the connection carries, so nothing is held whole: a server that reads
slowly slows down whoever sends, and the other way round. A connection that breaks off here is reset in the
guest; one that was open as its machine was forked goes on in the parent alone.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Final

from forktree.errors import ForktreeError
from forktree.models import Session
from forktree_agent.commons import Commons
from forktree_agent.control.facade import Facade
from forktree_agent.control.records import PortRecord
from forktree_agent.engine.contract import Command, ExecChunk, ExecEnd, ExecReader, ExecStream
from forktree_agent.http.errors import Code, Refusal
from forktree_agent.http.executing import running
from forktree_agent.http.pipes import IDLE_SECONDS
from forktree_agent.http.transferring import BEGIN_SECONDS, HEAD_BYTES, head_of

OF_A_SESSION: Final = 32
"""Open at once. Each takes one of the 128 commands that a guest runs, and 256 KiB here while it is behind; a
machine's commands may take 16 MiB."""

OF_A_NODE: Final = 256
"""Of all sessions. Half of the requests that are answered at once stay for others."""

OF_A_NAMESPACE: Final = 3.0
"""Times what is left to others: at most three quarters of them."""

LONGEST_SECONDS: Final = 24 * 3600.0
"""A connection that nobody ever closes ends after so long."""

GOODBYE_SECONDS: Final = 1.0
"""For a server to end what was ended here. Then it is ended for it."""

_TOLD_BYTES: Final = 32
"""Of the number that a tool says last."""


class Tunnels:
    """How many there are. One instance per server."""

    def __init__(self) -> None:
        self._open: Counter[tuple[str, str]] = Counter()
        self._places = Commons(OF_A_NODE)

    @contextmanager
    def counted(self, session: Session) -> Generator[None]:
        """One more inside the block. Raises `Refusal` where there are enough."""
        name = session.metadata.name
        namespace = session.metadata.namespace or ""
        key = (namespace, name)
        if self._open[key] >= OF_A_SESSION:
            sentence = f"{OF_A_SESSION} connections into session {name} are open already: close one"
            raise Refusal(Code.OVERLOADED, sentence)
        if not self._places.take(1, {namespace: OF_A_NAMESPACE}):
            sentence = (
                f"of {OF_A_NODE} connections into sessions of this node {self._places.held} are open already,"
                f" {self._places.held_by(namespace)} of them into sessions of {namespace}; close some, or ask"
                " again later"
            )
            raise Refusal(Code.OVERLOADED, sentence)
        self._open[key] += 1
        try:
            yield
        finally:
            self._places.give_back(1, [namespace])
            self._open[key] -= 1
            if not self._open[key]:
                del self._open[key]


class GuestPipe:
    """Implements `Pipe`."""

    def __init__(self, facade: Facade, session: Session, reader: ExecReader) -> None:
        self._loop = asyncio.get_running_loop()
        self._facade = facade
        self._session = session
        self._reader = reader
        self._offset = 0
        """Of the tool's output, read so far."""
        self._rest = b""
        """What came with the tool's first line."""
        self._head_bytes = 0
        self._told = b""
        self._over = False
        self._ended = False
        self._active_at = self._loop.time()

    async def open(self, port: PortRecord) -> None:
        """Until it is connected. Raises `Refusal`."""
        line = b""
        try:
            while b"\n" not in line and len(line) <= HEAD_BYTES:
                piece = await self._next()
                if not piece:
                    break
                line += piece
        except ConnectionError:
            pass  # What it has said tells more.
        head, _, self._rest = line.partition(b"\n")
        self._head_bytes = len(head) + 1
        try:
            head_of(head, bool)
        except Refusal as err:
            if err.code is not Code.UPSTREAM_ERROR:
                raise
            where = f"port {port.port} ({port.name}) of session {self._session.metadata.name}"
            raise Refusal(err.code, f"{where} cannot be reached: {err.sentence}") from err

    async def read(self) -> bytes:
        if self._rest:
            data, self._rest = self._rest, b""
            return data
        return await self._next()

    async def write(self, data: bytes) -> None:
        if data:
            await self._send(len(data).to_bytes(4, "big") + data)

    async def end(self) -> None:
        if not self._ended:
            self._ended = True
            await self._send(bytes(4))

    async def close(self) -> None:
        """End it as it should end, where there is still something to end."""
        with suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(GOODBYE_SECONDS):
                await self.end()
                while not self._over:
                    await self._next()

    async def _next(self) -> bytes:
        """The tool's output. Empty where the server has ended its side."""
        while not self._is_ended():
            match await self._waited():
                case ExecChunk(stream=ExecStream.STDOUT, offset=offset, data=data):
                    if offset != self._offset:
                        raise ConnectionError("a part of what the server sent is lost")
                    self._offset += len(data)
                    return data
                case ExecChunk(data=data):
                    self._told = (self._told + data)[:_TOLD_BYTES]
                case ExecEnd():
                    self._over = True
                    if not self._is_ended():
                        raise ConnectionError("the connection in the guest broke")
        if not self._over and self._ended:
            # Both sides have ended, so the tool does.
            self._over = isinstance(await self._waited(), ExecEnd)
        return b""

    async def _waited(self) -> ExecChunk | ExecEnd:
        while (idle_at := self._active_at + IDLE_SECONDS) > self._loop.time():
            try:
                found = await self._reader.next(deadline=idle_at)
            except ForktreeError as err:
                raise ConnectionError(err.message) from err
            if found is not None:
                self._active_at = self._loop.time()
                return found
        raise ConnectionError(f"nothing went over the connection for {IDLE_SECONDS:g} seconds")

    def _is_ended(self) -> bool:
        """Whether all that the server sent was read: the tool says how much that is once it knows."""
        count, newline, _ = self._told.partition(b"\n")
        if not newline:
            return False
        if not count.isdigit():
            raise ConnectionError("the session's tool said nothing that makes sense")
        return self._offset >= self._head_bytes + int(count)

    async def _send(self, data: bytes) -> None:
        try:
            deadline = self._loop.time() + IDLE_SECONDS
            await self._facade.write(self._session, self._reader.id, data, end=False, deadline=deadline)
        except ForktreeError as err:
            raise ConnectionError(err.message) from err
        self._active_at = self._loop.time()


@asynccontextmanager
async def connected(
    facade: Facade, session: Session, port: PortRecord, *, start_by: float, request_id: str
) -> AsyncGenerator[GuestPipe]:
    """A connection to a server in a session of this node, which must run by `start_by` (loop time).

    It ends as it should where the block does, and is reset in the guest where the block raises. Raises
    `Refusal`, and what the engine raises.
    """
    session = await running(facade, session, start_by)
    command = Command(
        argv=("connect", str(port.port)),
        id=request_id,
        stdin_open=True,
        builtin=True,
        timeout_seconds=LONGEST_SECONDS,
    )
    async with facade.streaming(session, command, deadline=start_by + BEGIN_SECONDS) as reader:
        pipe = GuestPipe(facade, session, reader)
        await pipe.open(port)
        yield pipe
        await pipe.close()


def declared(facade: Facade, session: Session, named: str) -> PortRecord:
    """The port that a path names, by its name or number. Raises `Refusal` where the template has none."""
    ports = facade.ports(session)
    for port in ports:
        if named in {port.name, str(port.port)}:
            return port
    known = ", ".join(f"{each.name} ({each.port})" for each in ports) or "none"
    sentence = (
        f"port {named} of session {session.metadata.name} is not exposed: its template's ports are {known}"
    )
    raise Refusal(Code.PORT_NOT_EXPOSED, sentence)
