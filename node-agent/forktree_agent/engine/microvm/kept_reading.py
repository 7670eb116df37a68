"""One command whose output is kept, and those who read it at their own pace."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Protocol, TypeVar

from forktree_agent.engine.contract import (
    Command,
    EngineError,
    ExecChunk,
    ExecEnd,
    ExecResult,
    ExecState,
    ExecStream,
    MachineGone,
)
from forktree_agent.engine.microvm import guest_frames as frames
from forktree_agent.engine.microvm.guest_execs import Ending
from forktree_agent.engine.microvm.kept_output import STREAM_BYTES, KeptStream

WINDOW_BYTES = 256 << 10
"""What the guest may send ahead of the slowest reader."""
UNREAD_BYTES = 16 << 20
"""What it may send while nobody reads. Beyond that it keeps the end to itself, until somebody does."""
PIECE_BYTES = 64 << 10
"""The longest piece that a reader gets."""

_T = TypeVar("_T")


class Line(Protocol):
    """The way to the guest."""

    def send(self, request: frames.Request) -> None: ...

    def cancel(self, exec_id: str) -> None: ...

    def is_behind(self, more_than_bytes: int) -> bool: ...

    async def taken(self, but_for_bytes: int) -> None: ...

    def start(self, exec_id: str, command: Command, generation: str, flow: frames.Flow | None) -> None: ...

    async def wait(self, future: asyncio.Future[_T], what: str, deadline: float) -> _T: ...

    def refusal(self, failed: frames.ExecFailed) -> EngineError: ...


class Bell:
    """Wakes all who wait for something to change."""

    def __init__(self) -> None:
        self._waiting: set[asyncio.Future[None]] = set()

    def ring(self) -> None:
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_result(None)

    async def heard(self, deadline: float) -> bool:
        """Until it rings. False at the deadline."""
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(waiting)
        try:
            async with asyncio.timeout_at(None if math.isinf(deadline) else deadline):
                await waiting
        except TimeoutError:
            return False
        finally:
            self._waiting.discard(waiting)
        return True


class KeptExec:
    """One of them."""

    def __init__(self, exec_id: str, generation: str | None, line: Line) -> None:
        """`generation`: the machine's where we began it; None where we did not."""
        self._loop = asyncio.get_running_loop()
        self._line = line
        self.id = exec_id
        self.generation = generation
        self.began_at = None if generation is None else self._loop.time()
        self.begun: asyncio.Future[None] = self._loop.create_future()
        self.ended: asyncio.Future[Ending] = self._loop.create_future()
        self.replayed: asyncio.Future[frames.Replayed] | None = None
        self.streams = {stream: KeptStream() for stream in frames.Stream}
        self.readers: set[Reader] = set()
        self.changed = Bell()
        self.stdin_open = False
        self.stdin_sent = 0
        self.stdin_taken = 0
        self.stdin_turn = asyncio.Lock()
        self._received = 0
        self.granted: tuple[int, bool] = (UNREAD_BYTES, False)
        """What the guest was told last: how much, and whether the command waits with more."""

    @property
    def is_carried(self) -> bool:
        return self.generation is None

    @property
    def kept_bytes(self) -> int:
        return sum(len(each) for each in self.streams.values())

    def add(self, output: frames.Output) -> int:
        """Take output, and return how much more is kept than before."""
        before = self.kept_bytes
        stream = self.streams[output.stream]
        self._received += stream.add(output.offset, output.data)
        stream.trim(max(0, len(stream) - STREAM_BYTES))
        return self.kept_bytes - before

    def trim(self, count: int) -> int:
        """Forget so much, or a little more, of the longer stream first. Returns how much that was."""
        trimmed = 0
        for stream in sorted(self.streams.values(), key=len, reverse=True):
            trimmed += stream.trim(count - trimmed)
        return trimmed

    def drop_output(self) -> int:
        return sum(stream.trim(len(stream)) for stream in self.streams.values())

    def grant(self) -> None:
        """Tell the guest how much more it may send, where that has changed enough to be worth a frame."""
        if self.ended.done():
            return
        waits = bool(self.readers)
        ahead = max((each.backlog() for each in self.readers), default=0)
        granted = max(0, self._received + (WINDOW_BYTES if waits else UNREAD_BYTES) - ahead)
        before, waited = self.granted
        if waits != waited or (waits and abs(granted - before) >= WINDOW_BYTES // 2):
            self._line.send(frames.Grant(id=self.id, granted=granted, waits=waits))
            self.granted = (granted, waits)

    def end(self) -> ExecEnd:
        """How it ended. It has. Raises what `ExecReader.next` does."""
        if (err := self.ended.exception()) is not None:
            assert isinstance(err, MachineGone)
            raise type(err)(err.message)  # One exception raised many times would collect the traces of all.
        ended = self.ended.result()
        if isinstance(ended, frames.ExecFailed):
            raise self._line.refusal(ended)
        code = -1 if ended.timed_out else ended.code
        return ExecEnd(exit_code=code, timed_out=ended.timed_out, truncated=ended.truncated)

    def result(self, ended: frames.Exited) -> ExecResult:
        stdout, stderr = self.streams[frames.Stream.STDOUT], self.streams[frames.Stream.STDERR]
        return ExecResult(
            stdout=stdout.whole(),
            stderr=stderr.whole(),
            exit_code=-1 if ended.timed_out else ended.code,
            timed_out=ended.timed_out,
            truncated=ended.truncated or stdout.is_cut or stderr.is_cut,
        )

    def state(self) -> ExecState:
        has_ended = self.ended.done() and self.ended.exception() is None
        ended = self.ended.result() if has_ended else None
        end = self.end() if isinstance(ended, frames.Exited) else None
        return ExecState(
            id=self.id,
            ended=has_ended,
            end=end,
            age_seconds=None if self.began_at is None else self._loop.time() - self.began_at,
            stdout_bytes=self.streams[frames.Stream.STDOUT].end,
            stderr_bytes=self.streams[frames.Stream.STDERR].end,
        )


class Reader:
    """Implements `ExecReader`."""

    def __init__(
        self,
        known: KeptExec,
        stdout_offset: int,
        stderr_offset: int,
        *,
        dealt_with: Callable[[], None] = lambda: None,
    ) -> None:
        """`dealt_with` is called whenever all that came before `next_of` was."""
        self._known = known
        self._dealt_with = dealt_with
        self._next = {frames.Stream.STDOUT: stdout_offset, frames.Stream.STDERR: stderr_offset}
        self._unread = 0
        """Of what was returned last."""

    @property
    def id(self) -> str:
        return self._known.id

    def next_of(self, stream: frames.Stream) -> int:
        """Where it reads on."""
        return self._next[stream]

    def backlog(self) -> int:
        """What is here and not dealt with yet."""
        streams = self._known.streams
        return self._unread + sum(
            max(0, streams[each].end - max(at, streams[each].start)) for each, at in self._next.items()
        )

    async def next(self, *, deadline: float) -> ExecChunk | ExecEnd | None:
        self._unread = 0
        self._dealt_with()
        known = self._known
        while True:
            chunk = self._piece()
            known.grant()
            if chunk is not None:
                return chunk
            if known.ended.done():
                return known.end()
            if not await known.changed.heard(deadline):
                return None

    def _piece(self) -> ExecChunk | None:
        for which in tuple(self._next):
            stream = self._known.streams[which]
            at = max(self._next.pop(which), stream.start)
            data = stream.piece(at, PIECE_BYTES) if at < stream.end else b""
            self._next[which] = at + len(data)  # At the end of the row: each gets its turn.
            if data:
                self._unread = len(data)
                return ExecChunk(stream=ExecStream(which.value), offset=at, data=data)
        return None
