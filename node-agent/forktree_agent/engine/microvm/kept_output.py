"""The end of what a command wrote, kept for whoever asks later, within bounds of a machine and of a node."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

STREAM_BYTES = 1 << 20
"""Kept of each stream of a command."""
MACHINE_BYTES = 16 << 20
"""Kept of all commands of one machine."""
NODE_BYTES = 256 << 20
"""Kept of all commands of all machines of this agent."""
_OLDER_BYTES = 256 << 10
"""Of what comes once more. The guest keeps less."""


class KeptStream:
    """What is kept of one stream: one piece of it, its end."""

    def __init__(self) -> None:
        self.start: int = 0
        """What the stream had before the piece."""
        self.is_cut = False
        """Something was here, or should have been, and is not kept."""
        self._data = bytearray()
        self._older_start: int = 0
        self._older = bytearray()

    def __len__(self) -> int:
        """All that it takes, also what is told once more and does not reach the piece yet."""
        return sum(map(len, self.pieces))

    @property
    def pieces(self) -> tuple[bytearray, bytearray]:
        return self._older, self._data

    @property
    def end(self) -> int:
        """What it has had so far, as far as was told."""
        return self.start + len(self._data)

    def whole(self) -> bytes:
        return bytes(self._data)

    def piece(self, offset: int, longest: int) -> bytes:
        """What lies at `offset`, which is neither before the start nor beyond the end."""
        at = offset - self.start
        return bytes(self._data[at : at + longest])

    def add(self, offset: int, data: bytes) -> int:
        """Take what the stream had at `offset`, and return how much of that is new at its end."""
        if offset < self.start:
            self._add_older(offset, data)
            return 0
        if offset > self.end:  # What was told between is lost, and a hole is not kept.
            self.is_cut |= self.end > 0
            self.start, self._data = offset, bytearray()
        new = data[self.end - offset :]
        self._data += new
        return len(new)

    def trim(self, count: int) -> int:
        """Forget so much of what came first, or a little more. Returns how much that was."""
        older = 0
        if count > 0:
            older, self._older = len(self._older), bytearray()
        newer = min(max(0, count - older), len(self._data))
        self.is_cut |= newer > 0
        del self._data[:newer]  # Cheap: a bytearray only moves its beginning.
        self.start += newer
        return older + newer

    def forget_before(self, offset: int) -> int:
        """Nobody asks for what came before it. Returns how much that was."""
        count = min(max(0, offset - self.start), len(self._data))
        del self._data[:count]
        self.start += count
        return count

    def _add_older(self, offset: int, data: bytes) -> None:
        """The guest tells its own rest once more, in order: it counts once it reaches what we have."""
        if offset != self._older_start + len(self._older) or len(self._older) > _OLDER_BYTES:
            self._older_start, self._older = offset, bytearray()
        self._older += data
        missing = self.start - self._older_start
        if len(self._older) >= missing:
            self._data[:0] = self._older[:missing]
            self.start = self._older_start
            self._older = bytearray()


class Allowance:
    """How much may be kept. Where there is no room, the output of what has ended goes, the oldest first."""

    def __init__(self, limit_bytes: int) -> None:
        self._left = limit_bytes
        self._idle: OrderedDict[object, Callable[[], int]] = OrderedDict()

    def claim(self, count: int) -> int:
        """How much of `count` may be kept; it counts as kept then."""
        while self._left < count and self._idle:
            _, drop = self._idle.popitem(last=False)
            self._left += drop()
        granted = min(count, self._left)
        self._left -= granted
        return granted

    def give_back(self, count: int) -> None:
        self._left += count

    def idle(self, key: object, drop: Callable[[], int]) -> None:
        """What `key` holds may go: `drop` forgets it, and returns how much that was."""
        self._idle[key] = drop

    def in_use(self, key: object) -> None:
        """It may not, or not any more: it is read, or it holds nothing."""
        self._idle.pop(key, None)
