"""The line to a guest: frames out as fast as they are taken, frames in as fast as others get their turn.

What comes from the guest is a stranger's word: what is no frame is stepped over, and a guest that goes on
talking nonsense is not listened to any more.
"""

from __future__ import annotations

import asyncio
import logging
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import asynccontextmanager
from itertools import chain, islice
from typing import TYPE_CHECKING, TypeVar

from forktree_agent.commons import Commons
from forktree_agent.engine.contract import AtCapacity, CommandRefused, DeadlineExceeded, MachineGone
from forktree_agent.engine.microvm import guest_frames as frames
from forktree_agent.engine.microvm.kept_reading import Bell

if TYPE_CHECKING:
    import socket

log = logging.getLogger(__name__)

_READ_BYTES = 256 << 10
LINES_AT_ONCE = 256
"""Are read of one guest, in some 0.5 ms; then others get their turn."""
_REST_SECONDS = 0.005
"""After so many lines at once, until the guest has its turn again: a flood gets a tenth of our time. Our init
sends 48 KiB of output a line, so this slows none but the smallest of them."""
BACKLOG_BYTES = 64 << 20
"""Commands are refused while this much waits to be taken by the guest."""
NODE_BACKLOG_BYTES = 256 << 20
"""The same of all guests of an agent together, of which one leaves as much to others as it has."""
_MAX_NOISE_LINES = 100
"""A fork and a change of agents leave one cut line each; more than this is not chance."""
_QUOTED_CHARACTERS = 500
"""Of a guest's sentence in ours."""

_T = TypeVar("_T")


class GuestError(MachineGone):
    """The guest does not do what our init does, so nothing can be asked of it: the machine is lost."""


class GuestLine(ABC):
    """A stream socket that it owns, and frames in both directions while `running()`.

    Made inside a running event loop. What is queued before it runs is sent as far as the socket takes it at
    once.
    """

    def __init__(self, sock: socket.socket, name: str, backlog: Commons | None = None) -> None:
        """`name` is the machine's, for messages. `backlog`: for what waits to be taken, by all guests."""
        self._loop = asyncio.get_running_loop()
        self._socket = sock
        self._socket.setblocking(False)
        self._name = name
        self._cutter = frames.LineCutter()
        self._noise_lines = 0
        # Ends a line that an agent before us, or the parent's agent before a fork, did not.
        self._unsent: deque[memoryview] = deque([memoryview(b"\n")])
        self._unsent_bytes = 1
        self._backlog = backlog or Commons(NODE_BACKLOG_BYTES)
        self._of_backlog = 0
        """How much of that is for what waits here."""
        self._sent = Bell()
        self._is_read = False
        self._lines: Iterator[bytes] = iter(())
        self._resting: asyncio.TimerHandle | None = None
        self.lines_read = 0
        """So far, those that were no frames too."""
        self._end: MachineGone | None = None

    @abstractmethod
    def _take(self, report: frames.Report) -> None:
        """A frame came."""

    @abstractmethod
    def _ended(self, end: MachineGone) -> None:
        """Nothing comes any more."""

    @property
    def name(self) -> str:
        """The machine's, for messages."""
        return self._name

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Listen to the guest until left, then close the socket. Enter once.

        If the channel breaks meanwhile, every wait fails with `MachineGone`, or `GuestError` if it was the
        guest that broke it, and so does whatever is asked afterwards.
        """
        if self._end is None:
            self._is_read = True
            self._loop.add_reader(self._socket, self._on_readable)
            self._flush()
        try:
            yield
        finally:
            self.close()

    def close(self) -> None:
        """Let go of the channel; the machine runs on. Waits fail with `MachineGone`. Idempotent."""
        self._break(MachineGone(f"the channel to machine {self._name} was closed"))
        self._socket.close()

    async def wait(self, future: asyncio.Future[_T], what: str, deadline: float) -> _T:
        """What the guest answers. Raises `DeadlineExceeded`, `MachineGone`."""
        if self._end is not None:
            raise _again(self._end)
        try:
            async with asyncio.timeout_at(deadline):
                # Shielded: one that gives up must not take the answer away from the others.
                return await asyncio.shield(future)
        except TimeoutError:
            raise DeadlineExceeded(f"machine {self._name} did not {what} before the deadline") from None

    @property
    def unsent_bytes(self) -> int:
        """What waits to be read by the guest."""
        return self._unsent_bytes

    @property
    def is_resting(self) -> bool:
        """Whether not all that was read of the guest is dealt with yet."""
        return self._resting is not None

    def is_behind(self, more_than_bytes: int) -> bool:
        """Whether more than so much waits to be read by the guest. Nothing waits for one that is gone."""
        return self._unsent_bytes > more_than_bytes

    async def taken(self, but_for_bytes: int) -> None:
        """Until no more than so much waits, or the guest is gone. Only reading it counts, not saying so."""
        while self.is_behind(but_for_bytes):
            await self._sent.heard(math.inf)

    def send(self, request: frames.Request) -> None:
        """Raises `MachineGone`, `AtCapacity`, and `CommandRefused` for text that is not Unicode."""
        self._send_if_read(self._encode(request))

    def _encode(self, request: frames.Request) -> bytes:
        try:
            return frames.encode(request)
        except UnicodeEncodeError:
            raise CommandRefused("text for the guest is not valid Unicode") from None

    # Sending

    def _send_if_read(self, line: bytes) -> None:
        if self._end is None:
            given = self._backlog.take(len(line), {self._name: 1.0})
            self._of_backlog += given
            if given < len(line) or self._unsent_bytes > BACKLOG_BYTES:
                self._settle_backlog()
                raise AtCapacity(f"{self._unsent_bytes} bytes wait to be read by machine {self._name}")
        self._send(line)

    def _send(self, line: bytes) -> None:
        if self._end is not None:
            raise _again(self._end)
        self._unsent.append(memoryview(line))
        self._unsent_bytes += len(line)
        self._flush()

    def _settle_backlog(self) -> None:
        """What was taken since, or never came to wait, is no longer for this guest."""
        if (too_much := self._of_backlog - self._unsent_bytes) > 0:
            self._of_backlog -= too_much
            self._backlog.give_back(too_much, [self._name])

    def _flush(self) -> None:
        try:
            self._send_all()
        finally:
            self._settle_backlog()

    def _send_all(self) -> None:
        while self._unsent:
            try:
                sent = self._socket.send(self._unsent[0])
            except BlockingIOError:
                if self._is_read:
                    self._loop.add_writer(self._socket, self._flush)
                return
            except OSError as err:
                self._break(MachineGone(f"machine {self._name} ended: {err}"))
                return
            self._unsent_bytes -= sent
            self._sent.ring()
            if sent == len(self._unsent[0]):
                self._unsent.popleft()
            else:
                self._unsent[0] = self._unsent[0][sent:]
        self._loop.remove_writer(self._socket)

    # Receiving

    def _on_readable(self) -> None:
        try:
            chunk = self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError as err:
            self._break(MachineGone(f"machine {self._name} ended: {err}"))
            return
        if not chunk:
            self._break(MachineGone(f"machine {self._name} ended"))
            return
        self._lines = self._cutter.feed(chunk)
        self._take_lines()

    def _take_lines(self) -> None:
        """As many as there may be at once of what was read. While some are left, no more is read."""
        was_resting, self._resting = self._resting is not None, None
        try:
            for line in islice(self._lines, LINES_AT_ONCE):
                self.lines_read += 1
                self._take_line(line)
                if self._end is not None:
                    return
            rest = next(self._lines, None)
        except frames.LineTooLong:
            self._distrust("sent a line without end")
            return
        if rest is None and was_resting:
            self._loop.add_reader(self._socket, self._on_readable)
        elif rest is not None:
            self._lines = chain((rest,), self._lines)
            self._loop.remove_reader(self._socket)
            self._resting = self._loop.call_later(_REST_SECONDS, self._take_lines)

    def _take_line(self, line: bytes) -> None:
        if not line:
            return
        report = frames.decode(line)
        if report is not None:
            self._take(report)
            return
        self._noise_lines += 1
        log.debug("guest_noise machine=%s lines=%d bytes=%d", self._name, self._noise_lines, len(line))
        if self._noise_lines > _MAX_NOISE_LINES:
            self._distrust(f"sent {self._noise_lines} lines that are no frames")

    # Ending

    def _distrust(self, what: str) -> None:
        log.warning("guest_channel_broken machine=%s cause=%r", self._name, what)
        self._break(GuestError(f"machine {self._name} {what}; it is not listened to any more"))

    def _break(self, end: MachineGone) -> None:
        """The first end counts. The socket is open until `close`: its number must not be given out again."""
        if self._end is not None:
            return
        self._end = end
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        if self._resting is not None:
            self._resting.cancel()
        self._lines = iter(())
        self._unsent.clear()
        self._unsent_bytes = 0
        self._settle_backlog()
        self._sent.ring()
        self._ended(end)


def _again(end: MachineGone) -> MachineGone:
    """The same: one exception raised many times would collect the traces of all."""
    return type(end)(end.message)


def settle(future: asyncio.Future[_T] | None, value: _T) -> None:
    """The first answer counts; what nobody asked for has no future."""
    if future is not None and not future.done():
        future.set_result(value)


def fail(futures: Iterable[asyncio.Future[_T]], end: MachineGone) -> None:
    for future in futures:
        if not future.done():
            future.set_exception(end)
            future.exception()  # Counts as retrieved: nobody has to wait for it.


def quoted(text: str) -> str:
    return text if len(text) <= _QUOTED_CHARACTERS else f"{text[:_QUOTED_CHARACTERS]}…"
