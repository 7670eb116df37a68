"""`python -m forktree_bench`: runs suites one after the other. `make bench` calls it.

From the environment: `SUITE` (names with commas; default all), `OUT` (the folder for results; default
`benchmarks/results`), `QUICK` (anything but empty: few runs of everything, to see that it works),
`MORE_MINUTES` (a soak so much longer, and as much more time for each of the others to end by itself).

Exit code 0 means: everything was measured. Ctrl-C ends the suite that runs, its machines included, and keeps
what there is.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

import uvloop
from rich.console import Console
from rich.markup import escape

from forktree_bench import plots, tables
from forktree_bench.facts import Load, Machine
from forktree_bench.report import Report, told
from forktree_bench.suite import Scope, Suite
from forktree_bench.suites import control_plane, engine, search, soak, tree
from forktree_dev.checkout import CHECKOUT

SUITES: Mapping[str, Suite] = {
    each.SUITE.name: each.SUITE for each in (engine, tree, search, control_plane, soak)
}
LOG_COLUMNS = 140
DEFAULT_OUT = CHECKOUT / "benchmarks" / "results"


def chosen(text: str) -> list[Suite]:
    """The suites that `text` names, all where it is empty. Raises `ValueError` for one that is none."""
    names = [name.strip() for name in text.split(",") if name.strip()] or list(SUITES)
    unknown = sorted(set(names) - set(SUITES))
    if unknown:
        raise ValueError(f"there is no suite {', '.join(unknown)}: choose from {', '.join(SUITES)}")
    return [SUITES[name] for name in names]


async def measure(suite: Suite, report: Report, scope: Scope) -> None:
    """Run one suite within its time. What ends it early is told in the report, and goes on if it came from
    outside."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    seconds = suite.seconds + scope.more_seconds
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            await suite.run(report, scope)
    except TimeoutError as err:
        late = f"not all was measured within its {seconds:g} seconds"
        report.ended_early = late if limit.expired() else told(err)
    except asyncio.CancelledError:
        report.ended_early = "it was interrupted"
        raise
    except Exception as err:
        report.ended_early = told(err)
        logging.getLogger(__name__).info("suite_failed", exc_info=True)


def run(suite: Suite, scope: Scope, machine: Machine, folder: Path, console: Console) -> Report:
    """Raises `KeyboardInterrupt` or `CancelledError` when interrupted, with the file written."""
    console.rule(f"{suite.name}: {suite.measures}", align="left")
    before = Load.now()
    if not before.quiet:
        console.print(f"[yellow]The machine is {before.busy_percent:g} % busy: figures will be too high.[/]")
    report = Report(suite=suite.name, machine=machine, before=before, console=console, folder=folder)
    try:
        uvloop.run(measure(suite, report, scope))
    finally:
        report.after = Load.now()
        report.write()
        show(report, suite, console)
    return report


def show(report: Report, suite: Suite, console: Console) -> None:
    """The tables, on the terminal and beside the file; the plots; what went wrong."""
    shown = [*tables.grids(report.suite, report.rows), *([tables.clocks(report.rows)] if report.rows else [])]
    for grid in shown:
        console.print(f"\n[bold]{escape(grid.title)}[/]", soft_wrap=True, highlight=False)
        console.print(grid.to_rich())
    report.path.with_suffix(".md").write_text("\n".join(grid.to_markdown() for grid in shown))
    for note in report.notes:
        console.print(escape(note), soft_wrap=True)
    if plots.can_draw():
        for path in plots.draw(suite.plots, report.rows, report.folder):
            console.print(f"drawn: {path.name}", soft_wrap=True)
    if report.ended_early is not None:
        console.print(f"[red]Ended early:[/] {escape(report.ended_early)}", soft_wrap=True)


def main() -> int:
    logging.basicConfig(
        level=os.environ.get("LOG_LEVEL", "error").upper(),
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
    )
    # What is no terminal has no width of its own; a log's lines may be long.
    console = Console() if sys.stdout.isatty() else Console(width=LOG_COLUMNS)
    try:
        suites = chosen(os.environ.get("SUITE", ""))
    except ValueError as err:
        console.print(escape(str(err)), soft_wrap=True)
        return 2
    folder = Path(os.environ.get("OUT") or DEFAULT_OUT)
    scope = Scope(
        quick=bool(os.environ.get("QUICK")), more_seconds=60 * float(os.environ.get("MORE_MINUTES") or 0)
    )
    machine = Machine.here()
    try:
        reports = [run(suite, scope, machine, folder, console) for suite in suites]
    except (KeyboardInterrupt, asyncio.CancelledError):
        console.print("[red]Interrupted.[/] What was measured is kept.")
        return 130
    console.print(f"Results: {folder}", soft_wrap=True, highlight=False)
    failed = [report.suite for report in reports if report.failed]
    if failed:
        console.print(f"[red]Not all was measured:[/] {', '.join(failed)}", soft_wrap=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
