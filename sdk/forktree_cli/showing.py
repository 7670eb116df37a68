"""How things are printed: for people in columns, for programs as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence

import pydantic
from rich.console import Console
from rich.table import Table
from rich.text import Text

from forktree.models.reasons import SessionPhase

_WIDE = 400
"""Columns where nobody looks: a line that is read by a program is not broken."""


def console() -> Console:
    """Standard output; without colours where it is no terminal or NO_COLOR is set."""
    shown = Console(highlight=False, markup=False, emoji=False)
    return shown if shown.is_terminal else Console(highlight=False, markup=False, emoji=False, width=_WIDE)


def clean(text: str) -> str:
    """Text that a session or a server gave, unable to drive a terminal."""
    return "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in text)


Cell = Text | str | None


def table(columns: Sequence[str], rows: Iterable[Sequence[Cell]]) -> Table:
    """In columns. Those in which nothing stands are left out."""
    filled = [[_text(cell) for cell in row] for row in rows]
    wanted = [at for at in range(len(columns)) if not filled or any(row[at].plain for row in filled)]
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for at in wanted:
        made.add_column(columns[at], no_wrap=True)
    for row in filled:
        made.add_row(*(row[at] for at in wanted))
    return made


def _text(cell: Cell) -> Text:
    if isinstance(cell, Text):
        return cell
    return Text(clean(cell or ""))


def dumped(model: pydantic.BaseModel) -> dict[str, object]:
    """As the HTTP API says it: what is not set is left out."""
    found: dict[str, object] = model.model_dump(mode="json", exclude_none=True)
    return found


def print_json(value: object, *, line: bool = False) -> None:
    """`line`: all on one."""
    text = json.dumps(value, ensure_ascii=False, indent=None if line else 2)
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def print_names(names: Iterable[str]) -> None:
    for name in names:
        sys.stdout.write(name + "\n")
    sys.stdout.flush()


_STYLES = {
    SessionPhase.RUNNING: "green",
    SessionPhase.PAUSED: "yellow",
    SessionPhase.FAILED: "red",
    SessionPhase.RELEASED: "bright_black",
}


def phase(at: SessionPhase, reason: str | None) -> Text:
    return Text(at if reason is None else f"{at} ({clean(reason)})", style=_STYLES.get(at, "cyan"))


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def size(count: float | None) -> str:
    if count is None:
        return ""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def age(seconds: float | None) -> str:
    if seconds is None:
        return ""
    for unit, length in (("d", 86_400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f}{unit}"
    return f"{max(0.0, seconds):.0f}s"
