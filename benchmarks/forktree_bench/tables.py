"""A suite's rows as tables: on the terminal, and as Markdown to be kept.

Figures against what their rows differ in, whichever way is shorter; what is alike stands in the title.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeAlias

from rich.markup import escape
from rich.table import Table

from forktree_bench.figures import Param, Row

COLUMNS = 6
"""More do not fit a terminal: the next ones go into a further table."""
NUMBERS = "median (min-p90)"


Column: TypeAlias = "tuple[tuple[Param, ...], list[Row | None]]"
"""Circumstances, and what was measured under them, in order of the figures."""


@dataclass(frozen=True, slots=True)
class Grid:
    """A table as text."""

    title: str
    headings: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]

    def to_rich(self) -> Table:
        """Without the title, which would be as narrow as the table."""
        table = Table()
        for heading in self.headings:
            table.add_column(escape(heading), overflow="fold")
        for line in self.lines:
            table.add_row(*map(escape, line))
        return table

    def to_markdown(self) -> str:
        marks = ("---",) * len(self.headings)
        lines = [
            "| " + " | ".join(each.replace("|", "\\|").replace("\n", " ") for each in line) + " |"
            for line in (self.headings, marks, *self.lines)
        ]
        return "\n".join([f"**{self.title}**", "", *lines, ""])


def grids(suite: str, rows: Sequence[Row]) -> Iterator[Grid]:
    """In the order of the rows. Neighbours whose params have the same names stand together."""
    for (_, accelerator), group in groupby(rows, key=lambda row: (tuple(row.params), row.accelerator)):
        yield from _grids(f"{suite}, {accelerator}", list(group))


def clocks(rows: Sequence[Row]) -> Grid:
    """From what to what each figure goes, once for all its rows."""
    known = dict.fromkeys((row.figure, row.clock) for row in rows)
    return Grid("Clocks", ("figure", "from what to what; whose clock"), tuple(known))


def _grids(title: str, rows: Sequence[Row]) -> Iterator[Grid]:
    names = tuple(rows[0].params)
    alike = {name: rows[0].params[name] for name in names if len({row.params[name] for row in rows}) == 1}
    varying = tuple(name for name in names if name not in alike)
    circumstances = ", ".join(f"{name} {_shown(value)}" for name, value in alike.items())
    title = f"{title}: {circumstances}" if circumstances else title
    # A figure that was measured twice under the same circumstances has its last row shown.
    cells = {(tuple(row.params[name] for name in varying), _figure(row)): row for row in rows}
    where = list(dict.fromkeys(params for params, _ in cells))
    figures = list(dict.fromkeys(figure for _, figure in cells))
    columns = [(params, [cells.get((params, figure)) for figure in figures]) for params in where]
    if len(columns) > len(figures):
        yield _by_circumstances(title, varying, columns, figures)
    else:
        for first in range(0, len(columns), COLUMNS):
            yield _by_figures(title, varying, columns[first : first + COLUMNS], figures)


def _by_figures(
    title: str, names: tuple[str, ...], columns: Sequence[Column], figures: Sequence[str]
) -> Grid:
    """A line for each figure."""
    headings = (
        ", ".join(f"{name} {_shown(value)}" for name, value in zip(names, params, strict=True))
        for params, _ in columns
    )
    lines = ((figure, *(_cell(rows[index]) for _, rows in columns)) for index, figure in enumerate(figures))
    counts = ("n", *(_counts(rows) for _, rows in columns))
    return Grid(title, (NUMBERS, *headings), (counts, *lines))


def _by_circumstances(
    title: str, names: tuple[str, ...], columns: Sequence[Column], figures: Sequence[str]
) -> Grid:
    """A line for each of the circumstances."""
    lines = ((*map(_shown, params), *map(_cell, rows), _counts(rows)) for params, rows in columns)
    return Grid(f"{title} ({NUMBERS})", (*names, *figures, "n"), tuple(lines))


def _figure(row: Row) -> str:
    return f"{row.figure}, {row.unit}" if row.unit else row.figure


def _counts(column: Sequence[Row | None]) -> str:
    counts = {row.n for row in column if row is not None}
    low, high = min(counts), max(counts)
    return str(low) if low == high else f"{low} to {high}"


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    if row.error is not None:
        return f"failed: {row.error}"
    low, middle, high = (_number(value) for value in (row.min, row.median, row.p90))
    return middle if row.n == 1 else f"{middle} ({low}-{high})"


def _shown(value: Param) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _number(value: float | None) -> str:
    """As many digits as tell something."""
    if value is None:
        return "-"
    size = abs(value)
    return f"{value:.0f}" if size >= 100 or value == 0 else f"{value:.1f}" if size >= 10 else f"{value:.2f}"
