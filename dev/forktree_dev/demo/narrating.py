"""Telling what happens: bars on a terminal, plain lines anywhere else."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from rich.console import Console, RenderableType
from rich.markup import escape
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
            self._print(f"... {escape(title)}")
        try:
            yield Step(self._progress, task)
        except BaseException:
            self._print(f"[red]✗[/red] {escape(title)} ({time.monotonic() - began:.1f} s)")
            raise
        finally:
            if self._progress and task is not None:
                self._progress.remove_task(task)
        if self._progress and self._overall is not None:
            self._progress.advance(self._overall)
        self._print(f"[green]✓[/green] {escape(title)} ({time.monotonic() - began:.1f} s)")

    def say(self, text: str) -> None:
        """A fact found on the way."""
        self._print(f"  {escape(text)}")

    def _print(self, text: str) -> None:
        # A line of ours is one line in a log, however wide the log believes to be.
        self._console.print(text, highlight=False, soft_wrap=True)

    def show(self, what: RenderableType) -> None:
        """A tree or a table."""
        self._console.print(what)
