"""Commands in a guest as this side knows them: those that somebody waits for, and those that were carried on.

A command that runs when its machine is forked runs on in the child, under the same id; one that an agent
began runs on when that agent dies. Nobody here asked for those, so what they write is kept for whoever asks
by their id, within a bound for all of one machine together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field

from forktree_agent.engine.contract import ExecResult
from forktree_agent.engine.microvm import guest_frames as frames

MAX_CARRIED = 128
"""As many as run at once in our init. A guest that names more is not believed."""
CARRIED_OUTPUT_BYTES = 1 << 20
"""Of all carried commands of one machine: they may be many machines, and perhaps nobody ever asks."""

READ_FOR_END_BYTES = 64 << 20
"""Of a command of which only the end is kept: what an agent spends seconds on, but not minutes."""

Ending = frames.Exited | frames.ExecFailed


@dataclass(slots=True)
class GuestExec:
    """A command in the guest, and what came from it so far."""

    generation: str
    output_left: int
    ended: asyncio.Future[Ending]
    stdout: bytearray = field(default_factory=bytearray)
    stderr: bytearray = field(default_factory=bytearray)
    truncated: bool = False
    end_bytes: int | None = None
    """Of each stream its last so many bytes are kept. None: what came first."""

    def take(self, output: frames.Output) -> int:
        """Keep what there is room for, and return how much that was: a guest that sends more than it was
        asked for does not fill our memory."""
        kept = output.data[: max(0, self.output_left)]
        self.truncated |= len(kept) < len(output.data)
        self.output_left -= len(kept)
        stream = self.stdout if output.stream is frames.Stream.STDOUT else self.stderr
        stream.extend(kept)
        if self.end_bytes is not None and len(stream) > self.end_bytes:
            self.truncated = True
            del stream[: len(stream) - self.end_bytes]  # Cheap: a bytearray only moves its beginning.
        return len(kept)

    def result(self, ended: frames.Exited) -> ExecResult:
        return ExecResult(
            stdout=bytes(self.stdout),
            stderr=bytes(self.stderr),
            exit_code=-1 if ended.timed_out else ended.code,
            timed_out=ended.timed_out,
            truncated=ended.truncated or self.truncated,
            end_lost=self.end_bytes is not None and (ended.truncated or self.output_left <= 0),
        )


class CarriedExecs:
    """Commands that ran in the guest before this channel did. Closed to the guest until opened."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._execs: dict[str, GuestExec] = {}
        self._output_left = CARRIED_OUTPUT_BYTES
        self._open = False

    def open(self) -> None:
        """From here until `confirm`, what a command unknown to us sends is that of a carried one.

        Also under another generation than the channel's: it was read from the command before the guest took
        on its identity, and nobody else is going to have it.
        """
        self._open = True

    def confirm(self, ids: Iterable[str]) -> None:
        """The guest says which commands run. Those that it spoke of and that neither run nor ended, do not
        exist."""
        if not self._open:
            return
        self._open = False
        running = set(ids)
        for exec_id in [each for each, seen in self._execs.items() if not seen.ended.done()]:
            if exec_id not in running:
                del self._execs[exec_id]
        for exec_id in sorted(running):
            self._entry(exec_id, create=True)

    def ids(self) -> tuple[str, ...]:
        """All of them, those that have ended too, in order of their names."""
        return tuple(sorted(self._execs))

    def get(self, exec_id: str) -> GuestExec | None:
        return self._execs.get(exec_id)

    def forget(self, exec_id: str) -> bool:
        """Make room for a new command of this id. False if one runs."""
        carried = self._execs.get(exec_id)
        if carried is not None and not carried.ended.done():
            return False
        self._execs.pop(exec_id, None)
        return True

    def take(self, report: frames.Output | frames.Exited | frames.ExecFailed) -> None:
        """What the guest tells of a command that nobody here asked for."""
        carried = self._entry(report.id, create=self._open)
        if carried is None or carried.ended.done():
            return
        if isinstance(report, frames.Output):
            carried.output_left = self._output_left
            self._output_left -= carried.take(report)
        else:
            carried.ended.set_result(report)

    def futures(self) -> list[asyncio.Future[Ending]]:
        return [carried.ended for carried in self._execs.values()]

    def _entry(self, exec_id: str, *, create: bool) -> GuestExec | None:
        known = self._execs.get(exec_id)
        if known is None and create and len(self._execs) < MAX_CARRIED:
            known = self._execs[exec_id] = GuestExec("", 0, self._loop.create_future())
        return known
