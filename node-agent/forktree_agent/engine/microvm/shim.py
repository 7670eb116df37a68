"""The agent's end of the fork shim, the library inside QEMU that maps guest RAM and copies it.

Packets are fixed little-endian structs, one per request and reply, over a SEQPACKET socket: none can be cut
in half, so an agent goes on where a dead one stopped. Every request has a fresh id and a reply with another
id is dropped: it answers a question whose asker gave up. `tests/golden/shim_packets.txt` has one of each.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from forktree_agent.engine.contract import DeadlineExceeded, EngineError, MachineGone
from forktree_agent.engine.microvm.layers import (
    PAGE_BYTES,
    TARGET_RUNS,
    Run,
    check_mappings,
    layer_bytes,
    mappings_with,
    whole_pages,
)

VERSION = 1
REPLY_MAX_BYTES = 64
MAX_STRAY_REPLIES = 256
"""Each question that was given up leaves one. Reading what is there does not let other tasks run, deadlines
included, so whoever never stops talking must not be listened to for ever."""

_HEADER = struct.Struct("<HHI")  # version, op, id
_RESULT = struct.Struct("<Ii")  # status, errno
_U64 = struct.Struct("<Q")
_U64_U32 = struct.Struct("<QI")
_U32_U32 = struct.Struct("<II")
_U64_U64 = struct.Struct("<QQ")
_DUMPED = struct.Struct("<QQQIIQQ")


class Op(IntEnum):
    """What can be asked."""

    HELLO = 1
    MAP_TABLE = 2
    MAP_RUN = 3
    PREPARE = 4
    DUMP = 5
    FINISH = 6
    STAT = 7


class Status(IntEnum):
    """How a request ended. Only after `HALF_MAPPED` is guest RAM changed."""

    OK = 0
    MALFORMED = 1
    NO_HELLO = 2
    RAM_NOT_FOUND = 3
    RAM_SHARED = 4
    BAD_LAYER = 5
    BAD_RUN = 6
    NO_LAYER = 7
    OS = 8
    HALF_MAPPED = 9


_STATUSES = frozenset(Status)
_SENTENCES = {
    Status.MALFORMED: "it does not know this request; shim and agent are of different versions",
    Status.NO_HELLO: "it has not been told yet how large guest RAM is",
    Status.RAM_NOT_FOUND: "guest RAM cannot be told from other memory: {detail} file mappings have its size",
    Status.RAM_SHARED: "guest RAM is a shared mapping, so what is written to it is not this machine's alone",
    Status.BAD_LAYER: "the file is no layer: too short for its table, not of whole pages, or too many runs",
    Status.BAD_RUN: "run {detail} of the layer does not lie in order within guest RAM and the layer",
    Status.NO_LAYER: "no layer was prepared for the dump",
    Status.OS: "{errno}",
    Status.HALF_MAPPED: "{errno} at run {detail}, after guest RAM was changed: the machine has to be killed",
}


class ShimError(EngineError):
    """The shim refused. Guest RAM is as it was, and a layer that was being made is given up."""

    def __init__(self, op: Op, status: Status, errno: int = 0, detail: int = 0) -> None:
        sentence = _SENTENCES[status].format(errno=os.strerror(errno), detail=detail)
        super().__init__(f"the fork shim refused {op.name}: {sentence}")
        self.status = status


class RamHalfMapped(ShimError):
    """The shim failed half-way through a map. Nothing that this machine does from here on can be trusted."""


class NoShim(MachineGone):
    """What came is no reply. A guest that broke out may be speaking: nothing there can be trusted."""


class Reply(NamedTuple):
    """One decoded packet."""

    op: int
    id: int
    status: Status
    errno: int
    body: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Dump:
    """What went into a layer, and how long both parts took in the shim (its monotonic clock)."""

    pages: int
    """Dirty pages, and clean ones in bridged gaps."""
    dirty_pages: int
    runs: int
    table_offset: int
    gap_pages: int
    """The widest gap that was bridged: more than asked for where runs were too many."""
    scan_ns: int
    copy_ns: int

    @property
    def bytes(self) -> int:
        """Size of the layer, its run table included."""
        return layer_bytes(self.table_offset, self.runs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stat:
    """How one QEMU uses memory now."""

    mappings: int
    """Of the whole process, counted."""
    private_pages: int
    """Guest pages that only this machine has: what a dump would have to copy."""


def encode_request(op: Op, request_id: int, body: bytes = b"") -> bytes:
    """One packet for the shim."""
    return _HEADER.pack(VERSION, op, request_id) + body


def encode_hello(ram_bytes: int) -> bytes:
    """The body of HELLO; those below likewise."""
    return _U64.pack(ram_bytes)


def encode_map_table(table_offset: int, runs: int) -> bytes:
    return _U64_U32.pack(table_offset, runs)


def encode_map_run(run: Run) -> bytes:
    return run.encode()


def encode_prepare(size_bytes: int) -> bytes:
    return _U64.pack(size_bytes)


def encode_dump(gap_pages: int, target_runs: int) -> bytes:
    return _U32_U32.pack(gap_pages, target_runs)


def decode_reply(packet: bytes) -> Reply:
    """Raises `NoShim` for what no shim of this version sends."""
    head = _HEADER.size + _RESULT.size
    if len(packet) < head:
        raise NoShim(f"the fork shim sent a reply of {len(packet)} bytes")
    version, op, request_id = _HEADER.unpack_from(packet)
    status, errno = _RESULT.unpack_from(packet, _HEADER.size)
    if version != VERSION or status not in _STATUSES:
        raise NoShim(f"the fork shim sent a reply of version {version}, status {status}")
    return Reply(op, request_id, Status(status), errno, packet[head:])


def decode_dump(body: bytes) -> Dump:
    """The body of a reply to DUMP. Raises `NoShim` when it cannot be true, as the three below."""
    pages, dirty_pages, table_offset, runs, gap_pages, scan_ns, copy_ns = _unpack(_DUMPED, body)
    if table_offset != pages * PAGE_BYTES or not runs <= dirty_pages <= pages:
        raise NoShim(f"the fork shim says that {runs} runs of {pages} pages end at {table_offset}")
    return Dump(
        pages=pages,
        dirty_pages=dirty_pages,
        runs=runs,
        table_offset=table_offset,
        gap_pages=gap_pages,
        scan_ns=scan_ns,
        copy_ns=copy_ns,
    )


def decode_stat(body: bytes) -> Stat:
    """The body of a reply to STAT."""
    mappings, private_pages = _unpack(_U64_U64, body)
    return Stat(mappings=mappings, private_pages=private_pages)


def decode_number(body: bytes) -> int:
    """A body of one number: HELLO's and MAP's mappings, FINISH's bytes, a refusal's detail."""
    (number,) = _unpack(_U64, body)
    return number


def _unpack(form: struct.Struct, body: bytes) -> tuple[int, ...]:
    if len(body) != form.size:
        raise NoShim(f"the fork shim sent {len(body)} bytes where {form.size} belong")
    return form.unpack(body)


class ShimClient:
    """Asks one shim, one question at a time. Callers that ask at once wait for their turn.

    Every method raises `MachineGone` when the shim's end is closed or does not speak as a shim, `ShimError`
    when it refuses, and `DeadlineExceeded` when there is no answer by `deadline` (loop time); what was asked
    for may still be done then.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._turn = asyncio.Lock()
        # Not from 0: replies to an agent that died may still be in the socket.
        self._last_id = secrets.randbits(32)
        self._mappings = 0

    def close(self) -> None:
        """Let go of the socket. The shim serves whoever holds another descriptor of it."""
        self._sock.close()

    async def hello(self, ram_bytes: int, *, deadline: float) -> int:
        """Have the shim find guest RAM. Comes first; repeating it is harmless. Returns QEMU's mappings."""
        body = await self._ask(Op.HELLO, encode_hello(ram_bytes), deadline=deadline)
        self._mappings = decode_number(body)
        return self._mappings

    async def map_all(self, fd: int, ram_bytes: int, *, deadline: float) -> int:
        """Back all of guest RAM by the file `fd`, copy-on-write. Like `map_layer`."""
        whole = Run(0, ram_bytes // PAGE_BYTES, 0)
        body = await self._ask(Op.MAP_RUN, encode_map_run(whole), fd, deadline=deadline)
        self._mappings = decode_number(body)
        return self._mappings

    async def map_layer(self, fd: int, table_offset: int, runs: int, *, deadline: float) -> int:
        """Back the pages of layer `fd` by it, copy-on-write; the machine stands still. Oldest layer first.

        Returns the most mappings that the process can have now. Raises `TooFragmented` before anything is
        changed, `RamHalfMapped` when the machine has to be killed.
        """
        check_mappings(mappings_with(self._mappings, runs))
        request = encode_map_table(table_offset, runs)
        self._mappings = decode_number(await self._ask(Op.MAP_TABLE, request, fd, deadline=deadline))
        return self._mappings

    async def prepare(self, fd: int, size_bytes: int, *, deadline: float) -> None:
        """Make the empty memory file `fd` the next layer, `size_bytes` of it in memory and charged to QEMU.

        Takes the place of one prepared before. Costs 1-10 us a page. A dump that needs more lets it grow.
        """
        await self._ask(Op.PREPARE, encode_prepare(whole_pages(size_bytes)), fd, deadline=deadline)

    async def dump(self, gap_pages: int, *, deadline: float) -> Dump:
        """Copy every page that is the stopped machine's own into the prepared layer.

        Up to `gap_pages` clean pages between two dirty ones are copied to join their runs.
        """
        request = encode_dump(gap_pages, TARGET_RUNS)
        return decode_dump(await self._ask(Op.DUMP, request, deadline=deadline))

    async def finish(self, *, deadline: float) -> int:
        """Let go of the layer, cut to the size returned. It can be sealed then. Harmless without one."""
        return decode_number(await self._ask(Op.FINISH, deadline=deadline))

    async def stat(self, *, deadline: float) -> Stat:
        """Count mappings and private pages. Takes milliseconds, in which the machine runs on."""
        stat = decode_stat(await self._ask(Op.STAT, deadline=deadline))
        self._mappings = stat.mappings
        return stat

    async def resume(self, *, deadline: float) -> None:
        """Go on where an agent that died stopped: its requests are done first, its layer is let go of."""
        await self.finish(deadline=deadline)

    async def _ask(self, op: Op, body: bytes = b"", fd: int | None = None, *, deadline: float) -> bytes:
        try:
            async with asyncio.timeout_at(deadline), self._turn:
                reply = await self._exchange(op, body, fd)
        except TimeoutError as err:
            raise DeadlineExceeded(f"the fork shim did not answer {op.name} in time") from err
        except OSError as err:
            raise MachineGone(f"the fork shim was lost at {op.name}: {err.strerror}") from err
        if reply.status is Status.HALF_MAPPED:
            raise RamHalfMapped(op, reply.status, reply.errno, _detail(reply))
        if reply.status is not Status.OK:
            raise ShimError(op, reply.status, reply.errno, _detail(reply))
        return reply.body

    async def _exchange(self, op: Op, body: bytes, fd: int | None) -> Reply:
        self._last_id = (self._last_id + 1) % (1 << 32)
        # Never waits: requests are tens of bytes and answered one by one. Where the socket is full after all,
        # the shim has not read for hundreds of them, and the error says so.
        socket.send_fds(self._sock, [encode_request(op, self._last_id, body)], [fd] if fd is not None else [])
        loop = asyncio.get_running_loop()
        for _ in range(MAX_STRAY_REPLIES):
            packet = await loop.sock_recv(self._sock, REPLY_MAX_BYTES)
            if not packet:
                raise MachineGone(f"the fork shim closed its socket at {op.name}")
            reply = decode_reply(packet)
            if reply.id == self._last_id:
                return reply
        raise NoShim(f"the fork shim sent {MAX_STRAY_REPLIES} replies to what nobody asked")


def _detail(reply: Reply) -> int:
    return decode_number(reply.body)
