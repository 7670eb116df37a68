"""Commands that are tied to nobody: whoever asks for one by its id gets the rest of its output and its end.

Those begun to be, those that ran at the fork of their machine, and those that an agent before us began.
While somebody reads, the guest sends no more than a window ahead of the slowest reader, and the command
waits. While nobody does, it goes on, and the end of what it writes is kept here and, shorter, in the guest,
which has it still when this agent is gone. What a guest sends beyond what it was granted is kept like the
rest: all bounds are ours.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, TypeVar

import msgspec

from forktree_agent.engine.contract import (
    AtCapacity,
    Command,
    CommandRefused,
    DeadlineExceeded,
    EngineError,
    ExecNotFound,
    ExecOutcome,
    ExecReader,
    MachineGone,
    TerminalSize,
)
from forktree_agent.engine.microvm import guest_frames as frames
from forktree_agent.engine.microvm.guest_execs import Ending, ExecTally, outcome_of
from forktree_agent.engine.microvm.kept_output import MACHINE_BYTES, Allowance
from forktree_agent.engine.microvm.kept_reading import (
    UNREAD_BYTES,
    WINDOW_BYTES,
    KeptExec,
    Line,
    Reader,
)

MAX_RUNNING = 128
"""As many run at once in our init."""
MAX_ENDED = 64
"""How many that have ended are kept of one machine."""
ENDED_SECONDS = 600.0
"""How long."""
TAIL_BYTES = 64 << 10
"""What the guest keeps of each stream's end."""
INPUT_WINDOW_BYTES = 256 << 10
"""What a command's input may be ahead of the command."""
UNSENT_INPUT_BYTES = 1 << 20
"""What may wait to be read by the guest before more input does, whatever the guest says that it has taken."""
INPUT_PIECE_BYTES = 48 << 10
"""Of one frame: others get their turn in between."""
EXCUSE_CHARACTERS = 600
"""Of why a command did not start: somewhat more than is shown."""
RECALL_SECONDS = 5.0
"""For the guest to tell what it has kept: milliseconds. One that does not is read without that."""

_T = TypeVar("_T")


class KeptExecs:
    """All of one machine. Closed to what the guest says of commands that we did not begin, until opened."""

    def __init__(self, name: str, line: Line, node: Allowance, tally: ExecTally) -> None:
        self._loop = asyncio.get_running_loop()
        self._name = name
        self._line = line
        self._execs: dict[str, KeptExec] = {}
        self._ended: dict[str, asyncio.TimerHandle] = {}
        self._node = node
        self._tally = tally
        self._left = MACHINE_BYTES
        self._told: asyncio.Future[None] | None = None
        """Set once the guest has said which commands there are; None where it was not asked."""

    # Asked by others -----------------------------------------------------------------------------------

    async def begin(self, command: Command, exec_id: str, generation: str, *, deadline: float) -> None:
        """Until the command runs. `exec_id` is free. If this is given up, the command is killed."""
        await self._begin(KeptExec(exec_id, generation, self._line), command, waits=False, deadline=deadline)

    @asynccontextmanager
    async def streaming(
        self, command: Command, exec_id: str, generation: str, *, deadline: float
    ) -> AsyncGenerator[ExecReader]:
        """The same, and read it from its first byte on."""
        known = KeptExec(exec_id, generation, self._line)
        # What a tool said is read once, and may fill no room that others need: theirs would be cut.
        forget = partial(self._forget_read, known) if command.builtin else _nothing
        reader = Reader(known, 0, 0, dealt_with=lambda: forget(reader))
        known.readers.add(reader)
        try:
            await self._begin(known, command, waits=True, deadline=deadline)
            yield reader
        finally:
            self._leave(known, reader)
            if command.builtin:
                self._drop(known)

    @asynccontextmanager
    async def reading(
        self, exec_id: str, *, stdout_offset: int, stderr_offset: int, deadline: float
    ) -> AsyncGenerator[ExecReader]:
        """Read one that began before."""
        known = await self.find(exec_id, deadline=deadline)
        await self.recall(known, deadline=deadline)
        reader = Reader(known, stdout_offset, stderr_offset)
        known.readers.add(reader)
        self._node.in_use(known)
        try:
            yield reader
        finally:
            self._leave(known, reader)

    async def write(self, exec_id: str, data: bytes, *, end: bool, deadline: float) -> None:
        """Give it input, as fast as it takes that."""
        known = await self.find(exec_id, deadline=deadline)
        await self.recall(known, deadline=deadline)
        try:
            async with asyncio.timeout_at(deadline), known.stdin_turn:
                await self._write(known, memoryview(data), end=end)
        except TimeoutError:
            raise DeadlineExceeded(f"command {exec_id} did not take its input before the deadline") from None

    def resize(self, exec_id: str, size: TerminalSize) -> None:
        known = self.of(exec_id)
        if not known.ended.done():
            self._line.send(frames.Resize(id=exec_id, rows=size.rows, cols=size.cols))

    async def recall(self, known: KeptExec, *, deadline: float) -> None:
        """Have the guest tell, once, what it has kept of a command that we did not begin."""
        if not known.is_carried:
            return
        if known.replayed is None:
            known.replayed = self._loop.create_future()
            self._line.send(frames.Replay(id=known.id))
        try:
            soon = min(deadline, self._loop.time() + RECALL_SECONDS)
            await self._line.wait(known.replayed, "tell what it has kept", soon)
        except DeadlineExceeded:
            return  # What it sends from now on is read all the same.

    async def find(self, exec_id: str, *, deadline: float) -> KeptExec:
        """The command of this id, also just after another agent's: the guest is about to tell of those."""
        if exec_id not in self._execs:
            await self.told(deadline=deadline)
        return self.of(exec_id)

    async def told(self, *, deadline: float) -> None:
        """Until the guest has said which commands there are, where it is to say so."""
        if self._told is not None:
            soon = min(deadline, self._loop.time() + RECALL_SECONDS)
            with suppress(DeadlineExceeded):  # It says nothing, so it has none.
                await self._line.wait(self._told, "tell which commands it has", soon)

    def of(self, exec_id: str) -> KeptExec:
        known = self._execs.get(exec_id)
        if known is None:
            raise ExecNotFound(f"machine {self._name} knows of no command {exec_id}")
        return known

    def get(self, exec_id: str) -> KeptExec | None:
        return self._execs.get(exec_id)

    def all(self) -> Iterable[KeptExec]:
        return self._execs.values()

    def forget(self, exec_id: str) -> bool:
        """Make room for a new command of this id. False if one runs."""
        known = self._execs.get(exec_id)
        if known is not None and not known.ended.done():
            return False
        self._remove(exec_id)
        return True

    # Told by the guest ---------------------------------------------------------------------------------

    def open(self) -> None:
        """From here until `confirm`, what a command unknown to us sends is that of a carried one.

        Also under another generation than the channel's: it was read from the command before the guest took
        on its identity, and nobody else is going to have it.
        """
        if self._told is None or self._told.done():
            self._told = self._loop.create_future()

    def confirm(self, ids: Iterable[str]) -> None:
        """The guest says which commands there are. Those that it spoke of and that neither run nor ended, do
        not exist."""
        if self._told is None or self._told.done():
            return
        there = set(ids)
        for known in [each for each in self._execs.values() if each.is_carried and not each.ended.done()]:
            if known.id not in there:
                self._remove(known.id)
        for exec_id in sorted(there):
            self._entry(exec_id, create=True)
        self._told.set_result(None)

    def take(self, report: frames.Begun | frames.Output | frames.StdinTaken | Ending) -> None:
        """What the guest tells of a command that nobody waits for with `exec`."""
        known = self._entry(report.id, create=self._listens and isinstance(report, frames.Output | Ending))
        if known is None or known.generation not in {None, report.generation}:
            return
        recalls = known.replayed is not None and not known.replayed.done()
        if known.ended.done() and not (recalls and isinstance(report, frames.Output)):
            return
        match report:
            case frames.Output():
                self._keep(known, report)
            case frames.Begun():
                _settle(known.begun, None)
            case frames.StdinTaken():
                known.stdin_taken = max(known.stdin_taken, min(report.bytes, known.stdin_sent))
                known.stdin_open &= report.open
            case frames.Exited() | frames.ExecFailed():
                self._end(known, report)
        known.changed.ring()

    def replayed(self, report: frames.Replayed) -> None:
        known = self._execs.get(report.id)
        if known is None or known.replayed is None or known.replayed.done():
            return
        known.stdin_open = report.stdin_open
        known.stdin_sent = known.stdin_taken = report.stdin_bytes
        known.replayed.set_result(report)

    def close(self, end: MachineGone) -> None:
        """The channel is gone."""
        _fail(self._told, end)
        for timer in self._ended.values():
            timer.cancel()
        for known in self._execs.values():
            if not known.ended.done():
                self._tally[ExecOutcome.LOST] += 1
            for future in (known.begun, known.ended, known.replayed):
                _fail(future, end)
            self._node.in_use(known)
            self._node.give_back(known.kept_bytes)
            known.changed.ring()
        self._execs.clear()

    @property
    def _listens(self) -> bool:
        return self._told is not None and not self._told.done()

    # Inside --------------------------------------------------------------------------------------------

    async def _write(self, known: KeptExec, rest: memoryview, *, end: bool) -> None:
        while rest or end:
            if known.ended.done():
                known.end()  # Says it better, where the machine is gone or it never ran.
                raise CommandRefused(f"command {known.id} has ended and takes no input")
            if not known.stdin_open:
                raise CommandRefused(f"the input of command {known.id} is not open")
            room = min(known.stdin_taken + INPUT_WINDOW_BYTES - known.stdin_sent, INPUT_PIECE_BYTES)
            if room <= 0:
                await known.changed.heard(float("inf"))
                continue
            if self._line.is_behind(UNSENT_INPUT_BYTES):
                await self._line.taken(UNSENT_INPUT_BYTES)
                continue
            piece, rest = rest[:room], rest[room:]
            last = end and not rest
            known.stdin_sent += len(piece)
            known.stdin_open = not last
            self._line.send(frames.Stdin(id=known.id, data=bytes(piece), end=last))
            if last:
                return

    async def _begin(self, known: KeptExec, command: Command, *, waits: bool, deadline: float) -> None:
        flow = frames.Flow(
            granted=WINDOW_BYTES if waits else UNREAD_BYTES,
            waits=waits,
            tail_bytes=0 if command.builtin else TAIL_BYTES,
        )
        self._line.start(known.id, command, known.generation or "", flow)
        self._execs[known.id] = known
        known.granted = (flow.granted, flow.waits)
        known.stdin_open = command.stdin_open or command.terminal is not None
        try:
            await self._line.wait(
                known.begun, f"run {command.argv[0]!r}" if command.argv else "run", deadline
            )
            if known.ended.done():
                known.end()  # Raises where it never ran.
        except (DeadlineExceeded, asyncio.CancelledError):
            with suppress(MachineGone):
                self._line.cancel(known.id)
            raise
        except EngineError:
            self._remove(known.id)
            raise
        if known.stdin_open and command.stdin:
            await self.write(known.id, command.stdin, end=False, deadline=deadline)

    def _leave(self, known: KeptExec, reader: Reader) -> None:
        known.readers.discard(reader)
        if known.ended.done():
            self._may_go(known)
        with suppress(MachineGone, AtCapacity):  # Then nobody is there to be told, or hears of it later.
            known.grant()

    def _drop(self, known: KeptExec) -> None:
        """A tool is its caller's alone: it ends with it, and nobody asks for what it said."""
        if self._execs.get(known.id) is not known:
            return
        if not known.ended.done():
            with suppress(MachineGone):
                self._line.cancel(known.id)
        self._remove(known.id)

    def _forget_read(self, known: KeptExec, reader: Reader) -> None:
        read = sum(stream.forget_before(reader.next_of(each)) for each, stream in known.streams.items())
        self._left += read
        self._node.give_back(read)

    def _may_go(self, known: KeptExec) -> None:
        """It has ended: its output is kept while there is room, unless somebody reads it."""
        if known.readers or self._execs.get(known.id) is not known:
            return

        def drop() -> int:
            dropped = known.drop_output()
            self._left += dropped
            return dropped

        self._node.idle(known, drop)

    def _keep(self, known: KeptExec, output: frames.Output) -> None:
        more = known.add(output)
        if more <= 0:
            self._left -= more
            self._node.give_back(-more)
            return
        room = self._node.claim(min(more, self._left))
        self._left -= room
        if room < more:
            beyond = known.trim(more - room) - (more - room)
            self._left += beyond
            self._node.give_back(beyond)

    def _end(self, known: KeptExec, ending: Ending) -> None:
        if isinstance(ending, frames.ExecFailed):  # Kept for minutes, and as long as the guest likes.
            ending = msgspec.structs.replace(ending, message=ending.message[:EXCUSE_CHARACTERS])
        known.ended.set_result(ending)
        self._tally[outcome_of(ending)] += 1
        _settle(known.begun, None)
        self._may_go(known)
        self._ended[known.id] = self._loop.call_later(ENDED_SECONDS, self._expire, known.id)
        while len(self._ended) > MAX_ENDED:
            self._remove(next(iter(self._ended)))

    def _expire(self, exec_id: str) -> None:
        if self._execs[exec_id].readers:
            self._ended[exec_id] = self._loop.call_later(ENDED_SECONDS, self._expire, exec_id)
        else:
            self._remove(exec_id)

    def _remove(self, exec_id: str) -> None:
        if (timer := self._ended.pop(exec_id, None)) is not None:
            timer.cancel()
        if (known := self._execs.pop(exec_id, None)) is not None:
            self._node.in_use(known)
            held = known.drop_output()
            self._node.give_back(held)
            self._left += held

    def _entry(self, exec_id: str, *, create: bool) -> KeptExec | None:
        known = self._execs.get(exec_id)
        if known is None and create and len(self._execs) < MAX_RUNNING + MAX_ENDED:
            known = self._execs[exec_id] = KeptExec(exec_id, None, self._line)
        return known


def _nothing(_: Reader) -> None:
    pass


def _fail(future: asyncio.Future[Any] | None, end: MachineGone) -> None:
    if future is not None and not future.done():
        future.set_exception(end)
        future.exception()  # Counts as retrieved: nobody has to wait for it.


def _settle(future: asyncio.Future[_T], value: _T) -> None:
    if not future.done():
        future.set_result(value)
