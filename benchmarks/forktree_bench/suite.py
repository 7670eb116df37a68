"""What every suite is: a coroutine that fills a report, within its time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from forktree_bench.plots import Plot
from forktree_bench.report import Report


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """How much is measured. `quick` shows that all works, with fewer runs than any comparison needs."""

    quick: bool
    more_seconds: float = 0.0
    """For each suite beyond its own time; the soak lasts as much longer."""

    def runs(self, many: int, few: int = 2) -> int:
        return few if self.quick else many


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    name: str
    measures: str
    """In one sentence."""
    run: Callable[[Report, Scope], Awaitable[None]]
    """Adds rows part by part. Whatever it started is ended when it returns, raises or is cancelled."""
    seconds: float
    """It is ended after these, with what it has. All suites together stay below 25 minutes."""
    plots: Sequence[Plot] = ()
