"""Telling what happens: bars on a terminal, plain lines anywhere else."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)


class Step:
    """One thing being done."""

    def __init__(self, progress: Progress | None, task: TaskID | None) -> None:
        self._progress, self._task = progress, task

    def reached(self, done: int) -> None:
        """So many of the step's total are done."""
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=done)


class Narrator:
    """Where all output of the demo goes. A context manager: it holds the terminal's last lines."""

    def __init__(self, console: Console, steps: int) -> None:
        """`steps`: how many `step` blocks there will be, for the overall bar."""
        self._console = console
        self._progress = (
            Progress(
                SpinnerColumn(),
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                console=console,
                transient=True,
            )
            if console.is_terminal
            else None
        )
        self._overall = self._progress.add_task("[bold]demo", total=steps) if self._progress else None

    def __enter__(self) -> Self:
        if self._progress:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress:
            self._progress.stop()

    @contextmanager
    def step(self, title: str, *, total: int | None = None) -> Generator[Step]:
        """Inside the block `title` is being done; then it has been, and how long it took is printed."""
        began = time.monotonic()
        task = self._progress.add_task(title, total=total) if self._progress else None
        if self._progress is None:
            self._console.print(f"... {title}", highlight=False)
        try:
            yield Step(self._progress, task)
        except BaseException:
            self._console.print(f"[red]✗[/red] {title} ({time.monotonic() - began:.1f} s)", highlight=False)
            raise
        finally:
            if self._progress and task is not None:
                self._progress.remove_task(task)
        if self._progress and self._overall is not None:
            self._progress.advance(self._overall)
        self._console.print(f"[green]✓[/green] {title} ({time.monotonic() - began:.1f} s)", highlight=False)

    def say(self, text: str) -> None:
        """A fact found on the way."""
        self._console.print(f"  {text}", highlight=False)

    def show(self, what: RenderableType) -> None:
        """A tree or a table."""
        self._console.print(what)
