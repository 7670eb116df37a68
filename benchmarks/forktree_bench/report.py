"""One suite's results as they come in, and the file that they are kept in.

The file is written after every part, and says so where a part failed or the suite was ended early.
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from rich.console import Console
from rich.markup import escape

from forktree_bench.facts import Load, Machine
from forktree_bench.figures import Figure, Param, Row, Series

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Report:
    """What a suite found. `accelerator` is what ran the guests; a suite may set it once it knows."""

    suite: str
    machine: Machine
    before: Load
    console: Console
    folder: Path
    accelerator: str = "not known"
    after: Load | None = None
    rows: list[Row] = field(default_factory=list[Row])
    notes: list[str] = field(default_factory=list[str])
    """What a reader must know beside the figures."""
    ended_early: str | None = None
    """Why not all was measured."""

    @property
    def failed(self) -> bool:
        return self.ended_early is not None or any(row.error for row in self.rows)

    @property
    def path(self) -> Path:
        return self.folder / f"{self.suite}.json"

    def add(self, figure: Figure, values: Sequence[float], **params: Param) -> None:
        """A row of these values, or one that says that there were none."""
        if values:
            self.rows.append(figure.row(values, self.accelerator, params))
        else:
            self.rows.append(figure.missing("no run gave a value", self.accelerator, params))

    def add_all(self, series: Series, **params: Param) -> None:
        for figure, values in series.values.items():
            self.add(figure, values, **params)

    @asynccontextmanager
    async def part(self, title: str, figure: Figure, **params: Param) -> AsyncGenerator[None]:
        """Inside the block one part of the suite is measured. If it fails, a row of `figure` says why.

        A cancellation, which is how a suite is interrupted or runs out of time, goes on.
        """
        self.console.print(f"... {escape(title)}", highlight=False, soft_wrap=True)
        try:
            yield
        except Exception as err:
            log.info("part_failed title=%s", title, exc_info=True)
            sentence = told(err)
            self.console.print(f"[red]✗[/red] {escape(title)}: {escape(sentence)}", soft_wrap=True)
            self.rows.append(figure.missing(sentence, self.accelerator, params))
        finally:
            self.write()

    def write(self) -> None:
        """All so far. A reader sees the old file or the new one, never a half."""
        self.folder.mkdir(parents=True, exist_ok=True)
        draft = self.path.with_suffix(".draft")
        draft.write_text(json.dumps(self.to_json(), indent=1) + "\n")
        draft.rename(self.path)

    def to_json(self) -> dict[str, object]:
        body: dict[str, object] = {
            "suite": self.suite,
            "machine": self.machine.to_json(),
            "accelerator": self.accelerator,
            "load_before": self.before.to_json(),
            "load_after": None if self.after is None else self.after.to_json(),
            "notes": self.notes,
            "rows": [row.to_json() for row in self.rows],
        }
        return body if self.ended_early is None else {**body, "ended_early": self.ended_early}


def told(failure: BaseException) -> str:
    """What went wrong, in a line: of a group its members, which say more than the group does."""
    if isinstance(failure, BaseExceptionGroup):
        members = cast("BaseExceptionGroup[BaseException]", failure).exceptions
        return "; ".join(dict.fromkeys(map(told, members)))
    return f"{type(failure).__name__}: {failure}"
