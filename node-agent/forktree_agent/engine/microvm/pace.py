"""How long a machine's next stop is going to take, from what its copies and its stops took lately (pure).

A stop is some time whatever is copied, and the rest by what is. An estimate, and a hopeful one: of the stops
that are remembered it takes the shortest. One that a busy node made long must not have forks refused for
ever, since a refused fork teaches nothing; so what is old is forgotten, too.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

from forktree_agent.engine.contract import PauseOverBudget

REMEMBERED: Final = 8
KNOWN_SECONDS: Final = 60.0
FIRST_BYTES_PER_SECOND: Final = 1 << 30
"""Of a machine of which nothing was copied lately. Most copy more; then copying ahead shows it."""
MEASURABLE_BYTES: Final = 1 << 20
"""A copy of less takes as long as asking for it."""
MILLISECONDS: Final = 1000.0


@dataclass(frozen=True, slots=True)
class _Taken:
    at: float
    bytes: int
    seconds: float


def _remembered() -> deque[_Taken]:
    return deque(maxlen=REMEMBERED)


@dataclass(slots=True)
class Pace:
    """Of one machine. `now` is seconds of any one clock."""

    _copies: deque[_Taken] = field(default_factory=_remembered)
    _stops: deque[_Taken] = field(default_factory=_remembered)

    def copied(self, size_bytes: int, seconds: float, *, now: float) -> None:
        """So much was copied in so much time."""
        if size_bytes >= MEASURABLE_BYTES and seconds > 0:
            self._copies.append(_Taken(now, size_bytes, seconds))

    def stopped(self, size_bytes: int, seconds: float, *, now: float) -> None:
        """It stood still for so long, in which so much was copied."""
        self._stops.append(_Taken(now, size_bytes, seconds))

    def stop_seconds(self, size_bytes: int, *, now: float) -> float:
        """How long it would stand still for so much."""
        speed = self._bytes_per_second(now)
        beside = (max(0.0, each.seconds - each.bytes / speed) for each in _recent(self._stops, now))
        return min(beside, default=0.0) + size_bytes / speed

    def _bytes_per_second(self, now: float) -> float:
        copies = _recent(self._copies, now)
        if not copies:
            return FIRST_BYTES_PER_SECOND
        return sum(each.bytes for each in copies) / sum(each.seconds for each in copies)


def _recent(taken: deque[_Taken], now: float) -> list[_Taken]:
    return [each for each in taken if now - each.at <= KNOWN_SECONDS]


def over_budget(
    name: str, pace: Pace, size_bytes: int, budget_ms: float | None, *, now: float
) -> PauseOverBudget | None:
    """Why a machine must not be stopped to copy so much; None: it may."""
    expected_ms = pace.stop_seconds(size_bytes, now=now) * MILLISECONDS
    if budget_ms is None or expected_ms <= budget_ms:
        return None
    return PauseOverBudget(
        f"machine {name} would stand still for about {expected_ms:.3g} ms, with {size_bytes >> 10} KiB that "
        f"it wrote and that are not copied yet; treeLimits.pauseBudgetMs allows {budget_ms:g} ms. It runs "
        "on: fork it when it writes less, or while it is paused"
    )
