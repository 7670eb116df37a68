"""Figures as numbers (pure): what a series of values says, and how two series compare."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

Param: TypeAlias = int | float | str
Params: TypeAlias = Mapping[str, Param]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One figure under one set of circumstances. Without values it says why there are none."""

    figure: str
    unit: str
    clock: str
    """From what to what, and whose clock."""
    accelerator: str
    params: Params
    n: int
    min: float | None = None
    median: float | None = None
    p90: float | None = None
    error: str | None = None

    def to_json(self) -> dict[str, object]:
        """As it stands in a suite's file; `error` only where there is one."""
        body: dict[str, object] = {
            "figure": self.figure,
            "unit": self.unit,
            "clock": self.clock,
            "accelerator": self.accelerator,
            "params": dict(self.params),
            "n": self.n,
            "min": _rounded(self.min),
            "median": _rounded(self.median),
            "p90": _rounded(self.p90),
        }
        return body if self.error is None else {**body, "error": self.error}


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """What is measured, apart from how often and under which circumstances."""

    name: str
    clock: str
    unit: str = "ms"

    def row(self, values: Sequence[float], accelerator: str, params: Params) -> Row:
        """Raises `ValueError` without values: use `missing`."""
        return Row(
            figure=self.name,
            unit=self.unit,
            clock=self.clock,
            accelerator=accelerator,
            params=params,
            n=len(values),
            min=min(values),
            median=median(values),
            p90=percentile(values, 0.9),
        )

    def missing(self, error: str, accelerator: str, params: Params) -> Row:
        return Row(
            figure=self.name,
            unit=self.unit,
            clock=self.clock,
            accelerator=accelerator,
            params=params,
            n=0,
            error=error,
        )


@dataclass(slots=True)
class Series:
    """Values of several figures, gathered run by run under the same circumstances."""

    values: dict[Figure, list[float]] = field(default_factory=dict[Figure, list[float]])

    def add(self, figure: Figure, value: float | None) -> None:
        """None: this run has no such value, as a clock that does not exist."""
        if value is not None:
            self.values.setdefault(figure, []).append(value)

    def of(self, figure: Figure) -> list[float]:
        return self.values.get(figure, [])


def median(values: Sequence[float]) -> float:
    """The middle one; of an even number the mean of the two in the middle."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of all do not exceed: always one that was measured."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def ratios(values: Sequence[float], floors: Sequence[float]) -> list[float]:
    """Each value to the floor of its own run, so that what slows a run down counts on both sides."""
    return [value / floor for value, floor in zip(values, floors, strict=True)]


def slope(points: Sequence[tuple[float, float]]) -> float:
    """How much y grows with x, by least squares; 0 where x does not vary."""
    count = len(points)
    if count == 0:
        return 0.0
    mean_x = sum(x for x, _ in points) / count
    mean_y = sum(y for _, y in points) / count
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    if spread == 0:
        return 0.0
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread


def _rounded(value: float | None) -> float | None:
    """Four significant digits: more would claim more than was measured."""
    if value is None or value == 0:
        return value
    return round(value, 3 - math.floor(math.log10(abs(value))))
