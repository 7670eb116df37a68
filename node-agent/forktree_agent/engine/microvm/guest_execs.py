"""Commands that somebody waits for: what came from the guest of each so far."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field

from forktree_agent.engine.contract import ExecOutcome, ExecResult, ExecState, Room
from forktree_agent.engine.microvm import guest_frames as frames

READ_FOR_END_BYTES = 64 << 20
"""Of a command of which only the end is kept: what an agent spends seconds on, but not minutes."""

Ending = frames.Exited | frames.ExecFailed

ExecTally = Counter[ExecOutcome]
"""How the commands of all machines ended."""


def outcome_of(ending: Ending) -> ExecOutcome:
    match ending:
        case frames.ExecFailed():
            return ExecOutcome.REFUSED
        case frames.Exited(timed_out=True):
            return ExecOutcome.TIMED_OUT
        case frames.Exited(code=0):
            return ExecOutcome.OK
        case frames.Exited():
            return ExecOutcome.FAILED


@dataclass(slots=True)
class GuestExec:
    """A command in the guest, and what came from it so far."""

    generation: str
    output_left: int
    ended: asyncio.Future[Ending]
    stdout: bytearray = field(default_factory=bytearray)
    stderr: bytearray = field(default_factory=bytearray)
    truncated: bool = False
    began_at: float = field(default_factory=lambda: asyncio.get_running_loop().time())
    end_bytes: int | None = None
    """Of each stream its last so many bytes are kept. None: what came first."""
    room: Room | None = None
    """None: there is always some."""
    _result: ExecResult | None = None

    def take(self, output: frames.Output) -> int:
        """Keep what there is room for, and return how much that was: a guest that sends more than it was
        asked for does not fill our memory."""
        kept = self._fitting(output.data)
        self.truncated |= len(kept) < len(output.data)
        self.output_left -= len(kept)
        stream = self.stdout if output.stream is frames.Stream.STDOUT else self.stderr
        stream.extend(kept)
        if self.end_bytes is not None and len(stream) > self.end_bytes:
            self.truncated = True
            del stream[: len(stream) - self.end_bytes]  # Cheap: a bytearray only moves its beginning.
        return len(kept)

    def _fitting(self, data: bytes) -> bytes:
        data = data[: max(0, self.output_left)]
        if self.room is None or not data:
            return data
        granted = self.room.claim(len(data))
        if granted < len(data):
            self.output_left = granted  # Nothing after a gap is kept either.
        return data[:granted]

    def state(self, exec_id: str) -> ExecState:
        """As long as somebody waits for it, it runs."""
        return ExecState(
            id=exec_id,
            ended=False,
            end=None,
            age_seconds=self.ended.get_loop().time() - self.began_at,
            stdout_bytes=len(self.stdout),
            stderr_bytes=len(self.stderr),
        )

    def result(self, ended: frames.Exited) -> ExecResult:
        """The same for all who ask, however many: no copy for each."""
        if self._result is None:
            self._result = ExecResult(
                stdout=bytes(self.stdout),
                stderr=bytes(self.stderr),
                exit_code=-1 if ended.timed_out else ended.code,
                timed_out=ended.timed_out,
                truncated=ended.truncated or self.truncated,
                end_lost=self.end_bytes is not None and (ended.truncated or self.output_left <= 0),
            )
            self.stdout, self.stderr = bytearray(), bytearray()
        return self._result
