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
    SHORT_RUN_PAGES,
    TARGET_RUNS,
    Run,
    check_mappings,
    layer_bytes,
    mappings_with,
    whole_pages,
)

VERSION = 2
REPLY_MAX_BYTES = 72
MAX_STRAY_REPLIES = 256
"""Each question that was given up leaves one. Reading what is there does not let other tasks run, deadlines
included, so whoever never stops talking must not be listened to for ever."""

_HEADER = struct.Struct("<HHI")  # version, op, id
_RESULT = struct.Struct("<Ii")  # status, errno
_U64 = struct.Struct("<Q")
_MAP_TABLE = struct.Struct("<QII")
_DUMP = struct.Struct("<IIQQ")
_U64_U64 = struct.Struct("<QQ")
_COUNTED = struct.Struct("<QQQ")
_DUMPED = struct.Struct("<QQQIIQQQ")


class Op(IntEnum):
    """What can be asked."""

    HELLO = 1
    MAP_TABLE = 2
    MAP_RUN = 3
    PREPARE = 4
    DUMP = 5
    FINISH = 6
    STAT = 7
    TRACK = 8
    ALLOCATE = 9
    ARM = 10


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
    NOT_TRACKED = 10


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
    Status.NOT_TRACKED: "it was not told to note what is written, so no dump can have a mark",
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
    since: int
    """Mark of the dump that this one is a difference to; 0: all that is the machine's own is in it."""

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
    """Guest pages that only this machine has."""
    written_pages: int
    """Those of them that a dump would have to copy."""


def encode_request(op: Op, request_id: int, body: bytes = b"") -> bytes:
    """One packet for the shim."""
    return _HEADER.pack(VERSION, op, request_id) + body


def encode_hello(ram_bytes: int) -> bytes:
    """The body of HELLO; those below likewise."""
    return _U64.pack(ram_bytes)


def encode_map_table(table_offset: int, runs: int, copy_below: int) -> bytes:
    return _MAP_TABLE.pack(table_offset, runs, copy_below)


def encode_map_run(run: Run) -> bytes:
    return run.encode()


def encode_prepare(size_bytes: int) -> bytes:
    return _U64.pack(size_bytes)


def encode_dump(gap_pages: int, target_runs: int, since: int, mark: int) -> bytes:
    return _DUMP.pack(gap_pages, target_runs, since, mark)


def encode_stat(since: int) -> bytes:
    return _U64.pack(since)


def encode_allocate(offset: int, size_bytes: int) -> bytes:
    return _U64_U64.pack(offset, size_bytes)


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
    pages, dirty_pages, table_offset, runs, gap_pages, scan_ns, copy_ns, since = _unpack(_DUMPED, body)
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
        since=since,
    )


def decode_stat(body: bytes) -> Stat:
    """The body of a reply to STAT."""
    mappings, private_pages, written_pages = _unpack(_COUNTED, body)
    return Stat(mappings=mappings, private_pages=private_pages, written_pages=written_pages)


def decode_number(body: bytes) -> int:
    """A body of one number: HELLO's and MAP's mappings, FINISH's bytes, ARM's pages, a refusal's detail."""
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

    async def map_layer(
        self, fd: int, table_offset: int, runs: int, copied_runs: int = 0, *, deadline: float
    ) -> int:
        """Back the pages of layer `fd` by it, copy-on-write; the machine stands still. Oldest layer first.

        `copied_runs` says how many of the runs are short ones; if any, they are copied instead of mapped.
        Returns the most mappings that the process can have now. Raises `TooFragmented` before anything is
        changed, `RamHalfMapped` when the machine has to be killed.
        """
        check_mappings(mappings_with(self._mappings, runs - copied_runs))
        request = encode_map_table(table_offset, runs, SHORT_RUN_PAGES if copied_runs else 0)
        self._mappings = decode_number(await self._ask(Op.MAP_TABLE, request, fd, deadline=deadline))
        return self._mappings

    async def prepare(self, fd: int, size_bytes: int, *, deadline: float) -> None:
        """Make the empty memory file `fd` the next layer, `size_bytes` of it in memory and charged to QEMU.

        Takes the place of one prepared before. Costs 1-10 us a page. A dump that needs more lets it grow.
        """
        await self._ask(Op.PREPARE, encode_prepare(whole_pages(size_bytes)), fd, deadline=deadline)

    async def track(self, device_fd: int, *, deadline: float) -> None:
        """Have the shim note what is written, by `/dev/userfaultfd`. Harmless when it does already.

        Raises `ShimError` where the kernel cannot.
        """
        await self._ask(Op.TRACK, fd=device_fd, deadline=deadline)

    async def allocate(self, fd: int, offset: int, size_bytes: int, *, deadline: float) -> None:
        """Have these bytes of a memory file in memory, charged to QEMU whoever fills them. 0.3 us a page."""
        await self._ask(Op.ALLOCATE, encode_allocate(offset, size_bytes), fd, deadline=deadline)

    async def arm(self, since: int, *, deadline: float) -> int:
        """Make ready for a dump since `since`, which then takes less time. The machine may run.

        Returns how many pages the dump would copy if it came now.
        """
        return decode_number(await self._ask(Op.ARM, encode_stat(since), deadline=deadline))

    async def dump(self, gap_pages: int, *, since: int = 0, mark: int = 0, deadline: float) -> Dump:
        """Copy what the stopped machine has written since the dump marked `since` into the prepared layer.

        With `since` 0, or when that is not its last dump, every page that is its own; the reply says which.
        Only after a dump with a `mark` can another be a difference to it, so a layer that has one must be
        kept for as long as differences to it are. Up to `gap_pages` clean pages between two dirty ones are
        copied to join their runs.
        """
        request = encode_dump(gap_pages, TARGET_RUNS, since, mark)
        dump = decode_dump(await self._ask(Op.DUMP, request, deadline=deadline))
        if dump.since not in (since, 0):
            raise NoShim(f"the fork shim made a difference to {dump.since} and was asked for one to {since}")
        return dump

    async def finish(self, *, deadline: float) -> int:
        """Let go of the layer, cut to the size returned. It can be sealed then. Harmless without one."""
        return decode_number(await self._ask(Op.FINISH, deadline=deadline))

    async def stat(self, *, since: int = 0, deadline: float) -> Stat:
        """Count mappings, private pages, and what a dump since `since` would copy of them.

        Takes milliseconds, in which the machine runs on.
        """
        stat = decode_stat(await self._ask(Op.STAT, encode_stat(since), deadline=deadline))
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
