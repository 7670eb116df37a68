"""Files of a session, in and out: a tool in the guest does the work, and the bytes are its input or output.

Nothing is held whole: a slow reader slows the tool down, and a slow disk whoever sends. A tool is tied to the
request that it serves: if that breaks off, it learns that not all was sent, and takes back what it began.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Annotated, TypeVar

import msgspec
from aiohttp import web

from forktree.errors import ForktreeError
from forktree.models import Session
from forktree.wire_files import MAX_TRANSFER_BYTES, FileEntry
from forktree_agent.control.facade import Facade
from forktree_agent.engine.contract import Command, CommandRefused, ExecChunk, ExecEnd, ExecReader, ExecStream
from forktree_agent.http.errors import Code, Refusal
from forktree_agent.http.executing import running

TRANSFER_SECONDS = 3600.0
"""For all of one, whatever its size."""

BEGIN_SECONDS = 30.0
"""For a tool to begin: it is a program like others."""

SILENT_SECONDS = 60.0
"""Without a byte in either direction: a client that stops for longer, or a session that stands still."""

UNDO_SECONDS = 5.0
"""For a tool to take back what it began."""

HEAD_BYTES = 16 << 10
"""A tool's first line is shorter."""

LIST_BYTES = 16 << 20
"""Of a folder's list, some 150,000 entries."""

_T = TypeVar("_T")

_CODES = {
    "not_found": Code.NOT_FOUND,
    "denied": Code.FORBIDDEN,
    "wrong_kind": Code.CONFLICT,
    "not_empty": Code.CONFLICT,
    "full": Code.NO_SPACE,
    "unreachable": Code.UPSTREAM_ERROR,
    "invalid": Code.BAD_REQUEST,
}


class _Head(msgspec.Struct, frozen=True):
    """A tool's first line: exactly one of `ok` and `why`. It comes from the guest, so it may be anything."""

    ok: msgspec.Raw = msgspec.Raw(b"null")
    why: str | None = None
    message: str | None = None


class Readable(msgspec.Struct, frozen=True):
    """What a tool tells of a file before its bytes."""

    mode: int
    bytes: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """None: to its end, wherever that is."""


class Written(msgspec.Struct, frozen=True):
    bytes: int


class Unpacked(msgspec.Struct, frozen=True):
    entries: int


class _Entry(msgspec.Struct, frozen=True):
    name: str
    type: str
    bytes: int
    mode: int
    mtime: int


class Tool:
    """One tool at work."""

    def __init__(self, facade: Facade, session: Session, reader: ExecReader) -> None:
        self._facade = facade
        self._session = session
        self._reader = reader
        self._rest = b""

    async def told(self, kind: type[_T]) -> _T:
        """What it says first. Raises `Refusal`: why it did nothing."""
        line = b""
        async for data in self._output():
            line += data
            if b"\n" in line or len(line) > HEAD_BYTES:
                break
        line, _, self._rest = line.partition(b"\n")
        return head_of(line, kind)

    async def content(self) -> AsyncIterator[bytes]:
        """All that comes after what was `told`. Raises `ConnectionError` where it breaks off."""
        if self._rest:
            yield self._rest
            self._rest = b""
        async for data in self._output(to_the_end=True):
            yield data

    async def take(self, content: AsyncIterator[bytes]) -> None:
        """Give it what it is to work with. Returns early where it wants no more: `told` says why."""
        try:
            async for data in content:
                await self._write(len(data).to_bytes(4, "big") + data)
            await self._write(bytes(4))
        except CommandRefused:
            return  # It has ended: that can only be an early end.
        except BaseException:
            await self._take_back()
            raise

    async def _write(self, data: bytes, *, end: bool = False) -> None:
        deadline = asyncio.get_running_loop().time() + SILENT_SECONDS
        await self._facade.write(self._session, self._reader.id, data, end=end, deadline=deadline)

    async def _take_back(self) -> None:
        """Let it see that this is not all, and wait until it has dealt with that."""
        with suppress(ForktreeError, ConnectionError, TimeoutError):
            async with asyncio.timeout(UNDO_SECONDS):
                await self._write(b"", end=True)
                async for _ in self._output(to_the_end=True):
                    pass

    async def _output(self, *, to_the_end: bool = False) -> AsyncGenerator[bytes]:
        """Its standard output. With `to_the_end` its exit code has to be 0."""
        while True:
            match await self._reader.next(deadline=asyncio.get_running_loop().time() + SILENT_SECONDS):
                case ExecChunk(stream=ExecStream.STDOUT, data=data):
                    yield data
                case ExecChunk():
                    continue  # Only where it crashes.
                case ExecEnd(exit_code=0):
                    return
                case ExecEnd() if not to_the_end:
                    return
                case _:
                    raise ConnectionError("the session's file tool broke off")


def head_of(line: bytes, kind: type[_T]) -> _T:
    """What a tool says first. Raises `Refusal`: why it did nothing."""
    try:
        head = msgspec.json.decode(line, type=_Head)
        if head.why is None:
            return msgspec.json.decode(head.ok, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise _odd() from None
    message = (head.message or "the session's tool gave no reason")[:500]
    raise Refusal(_CODES.get(head.why, Code.INTERNAL), message)


@asynccontextmanager
async def tool(
    facade: Facade, session: Session, *argv: str, start_by: float, request_id: str
) -> AsyncGenerator[Tool]:
    """A tool at work in a session of this node, which must run by `start_by`. Leaving ends it.

    Raises `Refusal`, and what the engine raises.
    """
    session = await running(facade, session, start_by)
    command = Command(
        argv=argv, id=request_id, cwd="/", stdin_open=True, builtin=True, timeout_seconds=TRANSFER_SECONDS
    )
    begun = facade.streaming(session, command, deadline=start_by + BEGIN_SECONDS)
    async with begun as reader:
        yield Tool(facade, session, reader)


async def listed(at_work: Tool) -> tuple[FileEntry, ...]:
    """What a `list` tool tells. Raises `Refusal`."""
    count = await at_work.told(int)
    lines = bytearray()
    try:
        async for data in at_work.content():
            lines += data
            if len(lines) > LIST_BYTES:
                raise Refusal(Code.LIMIT_REACHED, f"the list of its {count} entries is too long to be sent")
        # As long as a guest likes: a third of a second for the longest, which is no time of others'.
        return await asyncio.to_thread(_entries, bytes(lines))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ConnectionError):
        raise _odd() from None


def _entries(lines: bytes) -> tuple[FileEntry, ...]:
    return tuple(
        FileEntry(name=each.name, type=each.type, bytes=each.bytes, mode=octal(each.mode), mtime=each.mtime)
        for each in msgspec.json.Decoder(_Entry).decode_lines(lines)
    )


class Received:
    """What a client sends, counted and hashed as it passes. Raises `Refusal` for what need not be begun."""

    def __init__(self, request: web.Request) -> None:
        if request.headers.get("Content-Encoding", "identity").strip().lower() not in {"", "identity"}:
            raise Refusal(Code.BAD_REQUEST, "send files and archives plain, without a Content-Encoding")
        if (request.content_length or 0) > MAX_TRANSFER_BYTES:
            raise _too_large()
        self._request = request
        self._hash = hashlib.sha256()
        self.bytes = 0

    @property
    def sha256(self) -> str:
        return self._hash.hexdigest()

    async def pieces(self) -> AsyncGenerator[bytes]:
        """All of it. Raises `Refusal` for what is too long, slow, or not sent to its end."""
        while data := await self._next():
            self.bytes += len(data)
            if self.bytes > MAX_TRANSFER_BYTES:
                raise _too_large()
            self._hash.update(data)  # Half a millisecond a MiB.
            yield data

    async def _next(self) -> bytes:
        try:
            async with asyncio.timeout(SILENT_SECONDS):
                return await self._request.content.readany()
        except TimeoutError as err:
            sentence = f"nothing more of the body came for {SILENT_SECONDS:g} seconds"
            raise Refusal(Code.BAD_REQUEST, sentence) from err
        except web.RequestPayloadError as err:
            sentence = "the body does not end as its Content-Length or its chunks say"
            raise Refusal(Code.BAD_REQUEST, sentence) from err


def octal(mode: int) -> str:
    return f"{mode & 0o7777:04o}"


def _too_large() -> Refusal:
    return Refusal(Code.BODY_TOO_LARGE, f"one transfer can have at most {MAX_TRANSFER_BYTES} bytes")


def _odd() -> Refusal:
    return Refusal(Code.INTERNAL, "the session's tool said nothing that makes sense")
