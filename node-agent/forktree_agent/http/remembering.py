"""A small memory of recent answers, bounded in time and in size."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Remembered(Generic[K, V]):
    """Answers that count for a while. The least recently used one goes first where there are too many."""

    def __init__(self, limit: int, now: Callable[[], float]) -> None:
        self._limit = limit
        self._now = now
        self._entries: OrderedDict[K, tuple[float, V]] = OrderedDict()

    def get(self, key: K) -> V | None:
        """The answer kept for `key`, unless its time is over."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        until, value = entry
        if self._now() >= until:
            del self._entries[key]
            return None
        self._entries.move_to_end(key)
        return value

    def keep(self, key: K, value: V, seconds: float) -> None:
        """Keep `value` for `seconds`; nothing is kept for a time that is over."""
        if seconds <= 0:
            return
        self._entries[key] = (self._now() + seconds, value)
        self._entries.move_to_end(key)
        while len(self._entries) > self._limit:
            self._entries.popitem(last=False)

    def __len__(self) -> int:
        return len(self._entries)
