"""The keeper itself: one thread, who is in charge, and what is done for each request.

It has no policy. It does what the connection in charge asks, and apart from that only notices exits.
"""

from __future__ import annotations

import logging
import os
import resource
import socket
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from forktree_keeper import companions
from forktree_keeper.cgroups import ControlGroups
from forktree_keeper.connection import Connection
from forktree_keeper.machines import Machines, Waiter
from forktree_keeper.protocol import (
    FILES_PER_PAGE,
    LOG_FOLDER,
    MACHINES_PER_PAGE,
    MAX_DESCRIPTORS,
    VERSION,
    Code,
    Done,
    Drop,
    DropCgroup,
    FilePage,
    Forget,
    Greeting,
    Hello,
    Hold,
    Kill,
    Lend,
    LendFile,
    Lent,
    LimitCgroup,
    ListFiles,
    ListMachines,
    MachinePage,
    RaiseWall,
    Refusal,
    Request,
    Result,
    Start,
    Weigh,
    close_all,
    decode_request,
    encode_failure,
    encode_result,
)
from forktree_keeper.ready_loop import ReadyLoop
from forktree_keeper.wall import Wall, WallFailed

MAX_CONNECTIONS = 16
"""One is in charge; the others are stale, or have not said hello yet."""
SPARE_DESCRIPTORS = 2 * MAX_DESCRIPTORS
"""Kept free, so that a packet full of descriptors and a child's own copies never meet the limit."""
LOG_CHECK_SECONDS = 10.0

_log = logging.getLogger("forktree_keeper")


class Server:
    """Serves a listening socket until `stop`, then ends every machine. Call `serve` once."""

    def __init__(
        self, listener: socket.socket, state_dir: Path, groups: ControlGroups, wall: Wall, boot_id: str
    ) -> None:
        self._listener = listener
        self._wall = wall
        self._groups = groups
        self._boot_id = boot_id
        self._descriptor_limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._loop = ReadyLoop()
        self._connections: list[Connection] = []
        self._in_charge: Connection | None = None
        self._epoch = 0
        self._machines = Machines(self._loop, groups, wall, state_dir / LOG_FOLDER, lambda: self._in_charge)
        self._files: dict[str, int] = {}
        self._stopping = False

    def stop(self) -> None:
        """Make `serve` return. Safe to call from a signal handler."""
        self._stopping = True

    def serve(self, wakeup: socket.socket) -> None:
        """`wakeup` becomes readable when a signal has arrived."""
        self._listener.setblocking(False)
        self._loop.watch(self._listener, self._on_connect)
        self._loop.watch(wakeup, lambda: wakeup.recv(4096))
        next_log_check = time.monotonic()
        try:
            while not self._stopping:
                self._loop.step(max(0.0, next_log_check - time.monotonic()))
                if time.monotonic() >= next_log_check:
                    self._machines.bound_logs()
                    next_log_check = time.monotonic() + LOG_CHECK_SECONDS
        finally:
            self._end()

    # Connections.

    def _on_connect(self) -> None:
        with suppress(OSError):  # It may have gone again.
            sock, _address = self._listener.accept()
            if len(self._connections) >= MAX_CONNECTIONS:
                # The longest useless one goes, so that dead agents' connections cannot lock a new one out.
                next(each for each in self._connections if each is not self._in_charge).close()
            connection = Connection(
                sock, self._loop.selector, handle=self._on_packet, on_closed=self._on_closed
            )
            self._connections.append(connection)

    def _on_closed(self, connection: Connection) -> None:
        self._connections.remove(connection)
        if connection is self._in_charge:
            self._in_charge = None
            _log.info("agent_gone epoch=%d", self._epoch)

    def _on_packet(self, connection: Connection, data: bytes, files: list[int]) -> None:
        try:
            request_id, request = decode_request(data)
        except Refusal as refusal:
            connection.refuse(refusal.request_id, refusal)
            if refusal.code is Code.BAD_MESSAGE:
                connection.close()
            return
        try:
            self._check_in_charge(connection, request)
            if isinstance(request, Hello):
                self._greet(connection, request_id, request)
            else:
                self._carry_out(Waiter(connection, request_id), request, files)
        except Refusal as refusal:
            connection.refuse(request_id, refusal)
            if refusal.code in (Code.NOT_IN_CHARGE, Code.STALE_EPOCH):
                connection.close()

    def _greet(self, connection: Connection, request_id: int, hello: Hello) -> None:
        if hello.version != VERSION:
            raise Refusal(
                Code.VERSION_MISMATCH,
                f"this keeper speaks version {VERSION}, not {hello.version} of the protocol",
            )
        earlier, self._in_charge = self._in_charge, connection
        self._epoch += 1
        connection.greeted = True
        _log.info("agent_in_charge epoch=%d", self._epoch)
        if earlier is not None and earlier is not connection:
            # Told at once, or it would wait for exits that now go elsewhere.
            earlier.send(encode_failure(None, Code.STALE_EPOCH, "another agent has taken charge"))
        greeting = Greeting(
            version=VERSION,
            epoch=self._epoch,
            boot_id=self._boot_id,
            machines=len(self._machines),
            files=len(self._files),
        )
        connection.send(encode_result(request_id, greeting))

    def _check_in_charge(self, connection: Connection, request: Request) -> None:
        if connection is self._in_charge:
            return
        if connection.greeted:
            raise Refusal(Code.STALE_EPOCH, "another agent has taken charge")
        if not isinstance(request, Hello):
            raise Refusal(Code.NOT_IN_CHARGE, "say hello first")

    def _carry_out(self, waiter: Waiter, request: Request, files: list[int]) -> None:
        """Answers, or leaves the waiter with the machine. Takes what it keeps out of `files`."""
        if files and not isinstance(request, Start | Hold):
            raise Refusal(Code.BAD_REQUEST, f"{len(files)} descriptors with a request that takes none")
        result: Result = Done()
        lent: Sequence[int] = ()
        match request:
            case Start():
                beside = 0 if request.companion is None else 2 + companions.DESCRIPTORS
                self._check_room(len(files) + 2 * len(request.channels) + 3 + beside)
                self._machines.start(waiter, request, files)
                return
            case Kill(machine):
                self._machines.kill(waiter, machine)
                return
            case Lend(machine):
                lender = self._machines.get(machine)
                result, lent = Lent(tuple(lender.channels)), lender.channel_descriptors()
            case Hold(name):
                self._hold(name, files)
            case LendFile(name):
                lent = (self._file(name),)
            case Drop(names):
                close_all(self._files.pop(name) for name in names if name in self._files)
            case ListMachines(after):
                names, more = _page(self._machines.names(), after, MACHINES_PER_PAGE)
                result = MachinePage(tuple(self._machines.get(name).entry() for name in names), more)
            case ListFiles(after):
                result = FilePage(*_page(self._files, after, FILES_PER_PAGE))
            case Forget(machine):
                self._machines.forget(machine)
            case Weigh(machine):
                result = self._machines.weigh(machine)
            case LimitCgroup(cgroup, memory_bytes):
                self._groups.make(cgroup)
                self._groups.limit_memory(cgroup, memory_bytes)
            case DropCgroup(cgroup):
                self._groups.drop(cgroup)
            case RaiseWall():
                self._raise_wall(request)
            case Hello():
                raise AssertionError("answered before")
        waiter.connection.send(encode_result(waiter.request_id, result), lent)

    # The wall.

    def _raise_wall(self, wanted: RaiseWall) -> None:
        watched = self._wall.changes
        try:
            self._wall.raise_up(wanted)
        except WallFailed as failed:
            raise Refusal(Code.WALL_FAILED, str(failed)) from failed
        finally:
            if watched is None and self._wall.changes is not None:
                self._loop.watch(self._wall.changes, self._on_filter_changed)

    def _on_filter_changed(self) -> None:
        try:
            self._wall.check()
        except WallFailed as failed:
            _log.error("wall_lost error=%r", str(failed))  # No machine reaches the outside any more.
            self._machines.end_companions()

    # Files and descriptors.

    def _hold(self, name: str, files: list[int]) -> None:
        if len(files) != 1:
            raise Refusal(Code.BAD_REQUEST, f"hold takes one descriptor, not {len(files)}")
        held = self._files.get(name)
        if held is None:
            self._check_room(0)
            self._files[name] = files.pop()
        elif not os.path.samestat(os.fstat(held), os.fstat(files[0])):
            raise Refusal(Code.FILE_EXISTS, f"another file is held as {name}")

    def _file(self, name: str) -> int:
        try:
            return self._files[name]
        except KeyError as error:
            raise Refusal(Code.NO_SUCH_FILE, f"no file {name[:200]}") from error

    def _check_room(self, needed: int) -> None:
        """Refuse while everything still works: at the limit not even a connection could be accepted."""
        used = len(self._files) + self._machines.descriptors() + len(self._connections) + needed
        if used + SPARE_DESCRIPTORS > self._descriptor_limit:
            raise Refusal(
                Code.DESCRIPTORS_EXHAUSTED,
                f"{used} descriptors of {self._descriptor_limit} would be in use,"
                f" and {SPARE_DESCRIPTORS} are kept free",
            )

    # The end.

    def _end(self) -> None:
        """Kill and reap every machine, drop every connection and file."""
        for connection in list(self._connections):
            connection.close()
        self._loop.unwatch(self._listener)
        self._machines.end()
        if self._wall.changes is not None:
            self._loop.unwatch(self._wall.changes)
        self._loop.close()
        close_all(self._files.values())
        self._files.clear()


def _page(names: Iterable[str], after: str, size: int) -> tuple[tuple[str, ...], bool]:
    """The next names in order, and whether there are more."""
    rest = sorted(name for name in names if name > after)
    return tuple(rest[:size]), len(rest) > size
