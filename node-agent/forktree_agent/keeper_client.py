"""The agent's side of the keeper: start and end machines, hold files, and hear of exits.

The keeper owns the processes; this client only asks. After a deadline or a cancellation a request may still
be carried out, so whoever gives up on `start` kills and forgets the machine by its name.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import socket
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypeVar

from forktree_keeper.protocol import (
    LOG_FOLDER,
    VERSION,
    Answer,
    Channel,
    ChannelType,
    Code,
    Companion,
    CompanionExit,
    Done,
    Drop,
    DropCgroup,
    Exit,
    Failure,
    FilePage,
    Forget,
    Greeting,
    Hello,
    Hold,
    Kill,
    Launched,
    Lend,
    LendFile,
    Lent,
    LimitCgroup,
    ListFiles,
    ListMachines,
    MachineEntry,
    MachinePage,
    RaiseWall,
    Refusal,
    Request,
    Result,
    Start,
    Weigh,
    Weight,
    child_descriptor,
    close_all,
    decode_packet,
    encode_request,
    read_body,
    receive_packet,
    send_packet,
    socket_address,
)

__all__ = [
    "Channel",
    "ChannelType",
    "Code",
    "Companion",
    "CompanionExit",
    "Exit",
    "Keeper",
    "KeeperError",
    "KeeperGone",
    "Listing",
    "MachineEntry",
    "StaleEpoch",
    "Started",
    "child_descriptor",
]

MAX_UNREAD_EXITS = 65_536
"""More than a node has machines: beyond, nobody reads, and the connection is given up."""
_NAMES_PER_DROP = 400

_R = TypeVar("_R", bound=Result)


class KeeperError(Exception):
    """The keeper refused or failed at a request. What it says holds: nothing has changed."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class KeeperGone(Exception):
    """No connection (any more). The keeper may have ended, and then all machines with it."""


class StaleEpoch(Exception):
    """Another agent has taken charge. This one must stop: nothing here is its own any more."""


@dataclass(frozen=True, slots=True)
class Started:
    """A running process. The caller owns the sockets; closing one closes only this duplicate."""

    pid: int
    channels: dict[str, socket.socket]


@dataclass(frozen=True, slots=True)
class Listing:
    """What the keeper holds, by name."""

    machines: tuple[MachineEntry, ...]
    files: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Reply:
    """A result with the descriptors that came with it, owned by whoever has the reply."""

    body: object
    files: list[int]


class Keeper:
    """A connection in charge. Methods may be called concurrently; the order of the calls is kept.

    Every method raises `TimeoutError` at its deadline, `KeeperGone` or `StaleEpoch` when the connection is
    lost, and `KeeperError` when the keeper refuses.
    """

    def __init__(self, sock: socket.socket, state_dir: Path) -> None:
        self._sock = sock
        self._state_dir = state_dir
        self._loop = asyncio.get_running_loop()
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[_Reply]] = {}
        self._sending = asyncio.Lock()
        self._unread_exits: deque[Exit | CompanionExit] = deque()
        self._exits_changed = asyncio.Event()
        self._room: asyncio.Future[None] | None = None
        self._lost: KeeperGone | StaleEpoch | None = None
        self.epoch = 0
        """Grows with every agent that takes charge of this keeper process."""
        self.boot_id = ""
        """Of the node, as the keeper read it when it started."""

    @classmethod
    @asynccontextmanager
    async def connected(cls, socket_path: Path, *, deadline: float) -> AsyncGenerator[Self]:
        """Take charge, and tell an earlier agent so. Raises `KeeperGone` at once when no keeper listens."""
        sock = _connect(socket_path)
        keeper = cls(sock, socket_path.parent)
        keeper._loop.add_reader(sock.fileno(), keeper._read_all)
        try:
            greeting = await keeper._ask(Hello(VERSION), Greeting, deadline=deadline)
            keeper.epoch, keeper.boot_id = greeting.epoch, greeting.boot_id
            yield keeper
        finally:
            keeper._lose(KeeperGone("the connection was closed on this side"))

    async def start(
        self,
        machine: str,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        uid: int,
        gid: int,
        cgroup: str | None,
        network_namespace: bool,
        files: Sequence[int] = (),
        channels: Sequence[Channel] = (),
        nice: int | None = None,
        companion: Companion | None = None,
        deadline: float,
    ) -> Started:
        """Start a process; returns when its program runs.

        In it `files` are the descriptors `child_descriptor(0)`, ... and the far ends of `channels` follow;
        `env` is all of its environment. Output goes to its log. It cannot outlive the keeper. The socket
        to its companion is the last descriptor.
        """
        try:
            request = Start(
                machine=machine,
                argv=tuple(argv),
                env=dict(env),
                uid=uid,
                gid=gid,
                cgroup=cgroup,
                network_namespace=network_namespace,
                nice=nice,
                channels=tuple(channels),
                companion=companion,
            )
        except ValueError as error:
            raise KeeperError(Code.BAD_REQUEST, str(error)) from error
        launched, ends = await self._call(request, Launched, files, deadline=deadline)
        return Started(launched.pid, self._named(tuple(channel.name for channel in channels), ends))

    async def lend(self, machine: str, *, deadline: float) -> dict[str, socket.socket]:
        """Duplicates of the agent's ends of a machine's channels, which the caller owns.

        They share one open file with the keeper's own: close them, but never `shutdown` them.
        """
        lent, ends = await self._call(Lend(machine), Lent, deadline=deadline)
        return self._named(lent.channels, ends)

    async def hold(self, name: str, fd: int, *, deadline: float) -> None:
        """Let the keeper keep a duplicate of `fd`. Repeating it with the same file changes nothing."""
        try:
            request = Hold(name)
        except ValueError as error:
            raise KeeperError(Code.BAD_REQUEST, str(error)) from error
        await self._ask(request, Done, [fd], deadline=deadline)

    async def lend_file(self, name: str, *, deadline: float) -> int:
        """A duplicate of a held descriptor, which the caller owns."""
        _, files = await self._call(LendFile(name), Done, deadline=deadline)
        if len(files) != 1:
            raise self._broken(f"{len(files)} descriptors for one file", files)
        return files[0]

    async def drop(self, *names: str, deadline: float) -> None:
        """Hold these no longer. Idempotent."""
        for first in range(0, len(names), _NAMES_PER_DROP):
            await self._ask(Drop(names[first : first + _NAMES_PER_DROP]), Done, deadline=deadline)

    async def listing(self, *, deadline: float) -> Listing:
        """All machines, exited ones too until they are forgotten, and all held files.

        It is read in pages: what comes or goes meanwhile may be in it or not.
        """
        machines: list[MachineEntry] = []
        more = True
        while more:
            after = machines[-1].machine if machines else ""
            machine_page = await self._ask(ListMachines(after), MachinePage, deadline=deadline)
            machines += machine_page.entries
            more = machine_page.more
        files: list[str] = []
        more = True
        while more:
            file_page = await self._ask(ListFiles(files[-1] if files else ""), FilePage, deadline=deadline)
            files += file_page.names
            more = file_page.more
        return Listing(tuple(machines), tuple(files))

    async def kill(self, machine: str, *, deadline: float) -> Exit:
        """SIGKILL, and how it ended: returns when it is reaped. An earlier exit is told again."""
        return await self._ask(Kill(machine), Exit, deadline=deadline)

    async def forget(self, machine: str, *, deadline: float) -> None:
        """Free what is kept for an exited machine: channels, log and name. Idempotent."""
        await self._ask(Forget(machine), Done, deadline=deadline)

    async def own_bytes(self, machine: str, *, deadline: float) -> int:
        """How much memory a machine's process has for itself alone. Costs the keeper 0.1 ms."""
        return (await self._ask(Weigh(machine), Weight, deadline=deadline)).own_bytes

    async def limit_cgroup(self, cgroup: str, memory_bytes: int | None, *, deadline: float) -> None:
        """Limit a group's memory, making the group when missing; None: no limit."""
        try:
            request = LimitCgroup(cgroup, memory_bytes)
        except ValueError as error:
            raise KeeperError(Code.BAD_REQUEST, str(error)) from error
        await self._ask(request, Done, deadline=deadline)

    async def drop_cgroup(self, cgroup: str, *, deadline: float) -> None:
        """Remove an empty group. Idempotent; `KeeperError` with `cgroup_busy` while it holds a process."""
        try:
            request = DropCgroup(cgroup)
        except ValueError as error:
            raise KeeperError(Code.BAD_REQUEST, str(error)) from error
        await self._ask(request, Done, deadline=deadline)

    async def raise_wall(
        self, *, first_uid: int, uids: int, allow: Sequence[str], deny: Sequence[str], deadline: float
    ) -> None:
        """Put up what machines with companions are behind, see `RaiseWall`; replaces an earlier one.

        `KeeperError` with `wall_failed` where it cannot be: then no companion can be started.
        """
        try:
            request = RaiseWall(first_uid=first_uid, uids=uids, allow=tuple(allow), deny=tuple(deny))
        except ValueError as error:
            raise KeeperError(Code.BAD_REQUEST, str(error)) from error
        await self._ask(request, Done, deadline=deadline)

    def log_tail(self, machine: str, limit_bytes: int = 2000) -> str:
        """The last of what a machine wrote to its standard output and error; empty if there is nothing.

        Reads a small piece of a file in memory, so it does not leave the event loop.
        """
        try:
            with (self._state_dir / LOG_FOLDER / f"{machine}.log").open("rb") as log:
                log.seek(max(0, os.fstat(log.fileno()).st_size - limit_bytes))
                return log.read(limit_bytes).decode(errors="replace")
        except FileNotFoundError:
            return ""

    async def exits(self) -> AsyncIterator[Exit | CompanionExit]:
        """Exits as they happen, those that `kill` asked for too, and of companions those that were not. One
        consumer.

        Ends only by `KeeperGone` or `StaleEpoch`. Exits from before the connection are in the listing.
        """
        while True:
            while self._unread_exits:
                yield self._unread_exits.popleft()
            if self._lost is not None:
                raise self._lost
            self._exits_changed.clear()
            await self._exits_changed.wait()

    async def _ask(
        self, request: Request, kind: type[_R], files: Sequence[int] = (), *, deadline: float
    ) -> _R:
        """A call whose result comes without descriptors."""
        result, received = await self._call(request, kind, files, deadline=deadline)
        if received:
            raise self._broken("descriptors that nobody asked for", received)
        return result

    async def _call(
        self, request: Request, kind: type[_R], files: Sequence[int] = (), *, deadline: float
    ) -> tuple[_R, list[int]]:
        """The result and its descriptors, which the caller owns."""
        request_id = next(self._ids)
        try:
            data = encode_request(request_id, request)
        except Refusal as refusal:
            raise KeeperError(refusal.code, refusal.message) from refusal
        reply = self._waiting[request_id] = self._loop.create_future()
        try:
            async with asyncio.timeout_at(deadline):
                await self._send(data, files)
                await reply
        except BaseException:
            # It may have come in the very moment of the deadline or the cancellation.
            if reply.done() and not reply.cancelled() and reply.exception() is None:
                close_all(reply.result().files)
            raise
        finally:
            self._waiting.pop(request_id, None)
        received = reply.result()
        try:
            return read_body(kind, received.body), received.files
        except ValueError as error:
            raise self._broken(str(error), received.files) from error

    async def _send(self, data: bytes, files: Sequence[int]) -> None:
        async with self._sending:
            while True:
                if self._lost is not None:
                    raise self._lost
                try:
                    return send_packet(self._sock, data, files)
                except BlockingIOError:
                    await self._writable()
                except OSError as error:
                    if error.errno == errno.EBADF:  # One of the files; our own socket is open.
                        raise
                    # What the keeper last said may still lie unread, and then tells why it has closed.
                    self._read_all()
                    self._lose(KeeperGone(f"cannot send: {error.strerror}"))

    async def _writable(self) -> None:
        """Until there may be room, or the connection is lost."""
        number = self._sock.fileno()
        room: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_writer(number, _finish, room)
        self._room = room
        try:
            await room
        finally:
            self._room = None
            if self._lost is None:
                self._loop.remove_writer(number)

    def _read_all(self) -> None:
        while self._lost is None:
            try:
                data, files = receive_packet(self._sock)
            except BlockingIOError:
                return
            except (OSError, ValueError) as error:
                self._lose(KeeperGone(f"the connection failed: {error}"))
                return
            if not data:
                self._lose(KeeperGone("the keeper has closed the connection"))
                return
            try:
                packet = decode_packet(data)
            except ValueError as error:
                self._broken(f"what is no answer: {error}", files)
                return
            self._on_packet(packet, files)

    def _on_packet(self, packet: Answer | Failure | Exit | CompanionExit, files: list[int]) -> None:
        match packet:
            case Answer(request_id, body):
                waiting = self._waiting.pop(request_id, None)
                if waiting is not None and not waiting.done():
                    waiting.set_result(_Reply(body, files))
                    return
            case Failure(request_id, code, message):
                if code is Code.STALE_EPOCH:
                    self._lose(StaleEpoch(message))
                elif request_id is None:
                    self._lose(KeeperGone(f"the keeper refuses this connection: {message}"))
                else:
                    waiting = self._waiting.pop(request_id, None)
                    if waiting is not None and not waiting.done():
                        waiting.set_exception(KeeperError(code, message))
            case Exit() | CompanionExit():
                self._unread_exits.append(packet)
                self._exits_changed.set()
                if len(self._unread_exits) > MAX_UNREAD_EXITS:
                    self._lose(KeeperGone("nobody reads the exits"))
        close_all(files)

    def _named(self, names: Sequence[str], files: list[int]) -> dict[str, socket.socket]:
        if len(names) != len(files):
            raise self._broken(f"{len(files)} descriptors for {len(names)} channels", files)
        return {name: socket.socket(fileno=file) for name, file in zip(names, files, strict=True)}

    def _broken(self, what: str, files: list[int]) -> KeeperGone:
        """The keeper does not keep to the protocol: nothing of it can be relied on any more."""
        close_all(files)
        gone = KeeperGone(f"the keeper sent {what}")
        self._lose(gone)
        return gone

    def _lose(self, error: KeeperGone | StaleEpoch) -> None:
        """Close, and let everybody who waits know why. Idempotent: the first reason stays."""
        if self._lost is not None:
            return
        self._lost = error
        self._loop.remove_reader(self._sock.fileno())
        self._loop.remove_writer(self._sock.fileno())
        self._sock.close()
        if self._room is not None:
            _finish(self._room)
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(error)
        self._waiting.clear()
        self._exits_changed.set()


def _finish(waited: asyncio.Future[None]) -> None:
    if not waited.done():
        waited.set_result(None)


def _connect(socket_path: Path) -> socket.socket:
    """Never waits: a Unix socket's connect succeeds or fails at once."""
    try:
        folder = os.open(socket_path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise KeeperGone(f"no keeper at {socket_path}: {error.strerror}") from error
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    try:
        sock.connect(socket_address(folder))
    except OSError as error:
        sock.close()
        raise KeeperGone(f"no keeper at {socket_path}: {error.strerror}") from error
    finally:
        os.close(folder)
    return sock
