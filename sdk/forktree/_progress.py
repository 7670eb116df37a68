"""A search's progress, on the terminal or to whoever asks for it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step of a search was done."""

    done: int
    of: int
    """There may be fewer in the end."""
    best_score: float


Progress = bool | Callable[[Step], None]
"""True: a bar on the terminal or in the notebook, by `rich`."""


@contextmanager
def shown(progress: Progress, name: str, of: int) -> Generator[Callable[[float], None]]:
    """In the block, what it gives is called after each step with the best score."""
    if progress is False:
        yield lambda _: None
        return
    if progress is not True:
        yield _counted(progress, of)
    elif importlib.util.find_spec("rich"):
        with _rich_bar(name, of) as tell:
            yield tell
    else:
        sentence = "a progress bar needs `rich`: install it, or give a function instead of True"
        raise ModuleNotFoundError(sentence)


def _counted(call: Callable[[Step], None], of: int) -> Callable[[float], None]:
    done = 0

    def tell(best_score: float) -> None:
        nonlocal done
        done += 1
        call(Step(done=done, of=of, best_score=best_score))

    return tell


@contextmanager
def _rich_bar(name: str, of: int) -> Generator[Callable[[float], None]]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: PLC0415

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("best {task.fields[best]}")) as bars:
        bar = bars.add_task(name, total=of, best="-")
        yield lambda best_score: bars.update(bar, advance=1, best=f"{best_score:.4g}")
