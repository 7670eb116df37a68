"""Curves where a curve says more than a table. Drawn with Matplotlib, which is there if extra `bench` is.

Without it the suites measure and write all the same: nothing but the picture is missing.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, cast

from forktree_bench.figures import Param, Params, Row

_INCHES = (7.0, 4.2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """Which rows are drawn, and how. Of each row the median is."""

    name: str
    """Of the file, without its suffix."""
    title: str
    figures: tuple[str, ...]
    x: str
    """The param along the horizontal axis."""
    y_label: str
    where: Params = field(default_factory=dict[str, Param])
    """Rows with other values of these params are left out."""
    by: tuple[str, ...] = ()
    """Params that make curves of their own, besides the figure."""
    logarithmic: bool = False
    """Both axes."""

    def curves(self, rows: Sequence[Row]) -> Mapping[str, list[tuple[float, float]]]:
        """Points by the name of their curve, in order of x (pure). What was measured twice is drawn once."""
        found: dict[str, dict[float, float]] = {}
        for row in rows:
            x, y = row.params.get(self.x), row.median
            if row.figure not in self.figures or y is None or isinstance(x, str) or x is None:
                continue
            if all(row.params.get(name) == value for name, value in self.where.items()):
                label = " ".join(
                    [
                        *([row.figure] if len(self.figures) > 1 else []),
                        *(f"{name}={row.params[name]}" for name in self.by if name in row.params),
                    ]
                )
                found.setdefault(label or row.figure, {}).setdefault(float(x), y)
        return {label: sorted(points.items()) for label, points in found.items()}


class _Axes(Protocol):
    """As much of Matplotlib as is used here: the checkout, where this is checked, need not have it."""

    def plot(self, x: Sequence[float], y: Sequence[float], *, marker: str, label: str) -> object: ...
    def set(self, *, title: str, xlabel: str, ylabel: str, xscale: str, yscale: str) -> object: ...
    def grid(self, visible: bool, *, alpha: float) -> object: ...
    def legend(self) -> object: ...


class _Canvas(Protocol):
    def subplots(self) -> _Axes: ...
    def tight_layout(self) -> object: ...
    def savefig(self, path: str, *, metadata: Mapping[str, str | None]) -> object: ...


class _Figures(Protocol):
    def Figure(self, *, figsize: tuple[float, float]) -> _Canvas: ...


class _Settings(Protocol):
    rcParams: dict[str, object]


def can_draw() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def draw(plots: Sequence[Plot], rows: Sequence[Row], folder: Path) -> list[Path]:
    """One SVG for each plot that has at least two points. Raises `ImportError` unless `can_draw`."""
    settings = cast("_Settings", importlib.import_module("matplotlib"))
    settings.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "forktree"})  # Same rows, same bytes.
    figures = cast("_Figures", importlib.import_module("matplotlib.figure"))
    drawn: list[Path] = []
    for plot in plots:
        curves = plot.curves(rows)
        if max(map(len, curves.values()), default=0) < 2:
            continue
        canvas = figures.Figure(figsize=_INCHES)
        axes = canvas.subplots()
        for label, points in curves.items():
            axes.plot([x for x, _ in points], [y for _, y in points], marker="o", label=label)
        scale = "log" if plot.logarithmic else "linear"
        axes.set(title=plot.title, xlabel=plot.x, ylabel=plot.y_label, xscale=scale, yscale=scale)
        axes.grid(True, alpha=0.3)
        axes.legend()
        canvas.tight_layout()
        path = folder / f"{plot.name}.svg"
        canvas.savefig(str(path), metadata={"Date": None})
        drawn.append(path)
    return drawn
