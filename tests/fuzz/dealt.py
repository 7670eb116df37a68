"""Bytes as a source of decisions: the same bytes decide the same, and each of them matters somewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Dealt:
    """Deals them out from the first to the last, and zeros after that."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def __bool__(self) -> bool:
        """Whether there are more."""
        return self._at < len(self._data)

    def byte(self) -> int:
        self._at += 1
        return self._data[self._at - 1] if self._at <= len(self._data) else 0

    def one_of(self, choices: Sequence[T]) -> T:
        return choices[self.byte() % len(choices)]

    def piece(self, longest: int) -> bytes:
        """So many as the next byte says, at most `longest`."""
        count = min(self.byte(), longest, max(0, len(self._data) - self._at))
        self._at += count
        return self._data[self._at - count : self._at]

    def rest(self) -> bytes:
        at, self._at = self._at, len(self._data)
        return self._data[at:]
