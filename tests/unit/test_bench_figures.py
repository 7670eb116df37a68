"""Benchmarks' numbers: what a series of values says, and what is kept of it."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from rich.console import Console

from forktree_bench import __main__ as bench
from forktree_bench.facts import Load, Machine
from forktree_bench.figures import Figure, Row, Series, median, percentile, ratios, slope
from forktree_bench.plots import Plot
from forktree_bench.report import Report, told
from forktree_bench.requests_seen import counted
from forktree_bench.suite import Scope, Suite
from forktree_bench.tables import clocks, grids

PAUSE = Figure(name="pause", clock="stopped → runs; agent's")
FORK = Figure(name="fork", clock="stopped → child runs; agent's")
MACHINE = Machine(
    cpu="cpu",
    cores=2,
    memory_mb=1,
    kernel="k",
    qemu="q",
    python="3",
    commit="c",
    at="2026-01-01T00:00:00+00:00",
)
QUIET = Load(average_1min=0.0, busy_percent=0.0)


def report_in(folder: Path) -> Report:
    return Report(
        suite="s",
        machine=MACHINE,
        before=QUIET,
        console=Console(file=io.StringIO(), width=120),
        folder=folder,
        accelerator="tcg",
    )


def kept(report: Report) -> dict[str, object]:
    body: dict[str, object] = json.loads(report.path.read_text())
    return body


def test_a_percentile_is_a_value_that_was_measured() -> None:
    values = [5.0, 1.0, 4.0, 2.0, 3.0, 10.0, 9.0, 8.0, 7.0, 6.0]
    assert (median(values), percentile(values, 0.9)) == (5.5, 9.0)
    assert (median([3.0]), percentile([3.0], 0.9)) == (3.0, 3.0)
    assert median([3.0, 1.0, 2.0]) == 2.0
    assert percentile([1.0, 2.0], 0.9) == 2.0


def test_each_value_is_compared_with_the_floor_of_its_own_run() -> None:
    assert ratios([4.0, 9.0], [2.0, 3.0]) == [2.0, 3.0]
    with pytest.raises(ValueError, match="shorter"):
        ratios([4.0, 9.0], [2.0])


def test_growth_is_a_slope_and_noise_is_none() -> None:
    assert slope([(0, 1.0), (10, 21.0), (20, 41.0)]) == pytest.approx(2.0)
    assert slope([(0, 1.0), (1, 2.0), (2, 1.0)]) == pytest.approx(0.0)
    assert slope([]) == slope([(5, 1.0), (5, 9.0)]) == 0.0


def test_a_row_has_all_that_a_reader_needs_to_compare_it() -> None:
    row = PAUSE.row([2.34567, 1.0, 30.0], "tcg", {"children": 3})
    assert row.to_json() == {
        "figure": "pause",
        "unit": "ms",
        "clock": "stopped → runs; agent's",
        "accelerator": "tcg",
        "params": {"children": 3},
        "n": 3,
        "min": 1.0,
        "median": 2.346,
        "p90": 30.0,
    }


def test_clocks_that_a_run_does_not_have_are_left_out() -> None:
    series = Series()
    series.add(PAUSE, None)
    series.add(FORK, 2.0)
    assert (series.of(PAUSE), series.of(FORK)) == ([], [2.0])


async def test_a_part_that_fails_is_told_in_its_row_and_the_next_is_measured(tmp_path: Path) -> None:
    report = report_in(tmp_path / "made")
    async with report.part("first", PAUSE, children=1):
        raise ExceptionGroup("two", [ValueError("no such thing"), ExceptionGroup("", [OSError("full")])])
    async with report.part("second", PAUSE, children=3):
        report.add(PAUSE, [1.0], children=3)
    first, second = report.rows
    assert (first.n, first.error) == (0, "ValueError: no such thing; OSError: full")
    assert (second.n, second.error) == (1, None)
    assert report.failed
    rows = kept(report)["rows"]
    assert isinstance(rows, list)
    assert [row.get("error") for row in rows] == [first.error, None]


def test_a_figure_without_values_is_no_success(tmp_path: Path) -> None:
    report = report_in(tmp_path)
    report.add(PAUSE, [], children=1)
    assert report.failed
    assert report.rows[0].error == "no run gave a value"


def suite_of(seconds: float, *, fails: bool = False, stuck: asyncio.Event | None = None) -> Suite:
    """One part that is measured, and one that never ends; in it, `stuck` is set."""

    async def run(report: Report, scope: Scope) -> None:
        async with report.part("quick one", PAUSE, children=1):
            report.add(PAUSE, [1.0], children=1)
        if fails:
            raise RuntimeError("it broke")
        async with report.part("one that never ends", PAUSE, children=3):
            if stuck is not None:
                stuck.set()
            await asyncio.Event().wait()

    return Suite(name="s", measures="nothing", run=run, seconds=seconds)


async def test_a_suite_that_runs_out_of_time_keeps_what_it_has(tmp_path: Path) -> None:
    report = report_in(tmp_path)
    await bench.measure(suite_of(0.0), report, Scope(quick=True))
    report.write()
    assert report.ended_early == "not all was measured within its 0 seconds"
    assert kept(report)["ended_early"] == report.ended_early


async def test_a_suite_that_is_interrupted_keeps_what_it_has_and_says_so(tmp_path: Path) -> None:
    report = report_in(tmp_path)
    stuck = asyncio.Event()
    task = asyncio.create_task(bench.measure(suite_of(3600, stuck=stuck), report, Scope(quick=True)))
    await stuck.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert report.ended_early == "it was interrupted"
    assert [row.n for row in report.rows] == [1]


async def test_a_suite_that_breaks_is_told_and_does_not_take_the_others_along(tmp_path: Path) -> None:
    report = report_in(tmp_path)
    await bench.measure(suite_of(3600, fails=True), report, Scope(quick=True))
    assert report.ended_early == "RuntimeError: it broke"
    assert report.failed


async def test_what_takes_too_long_inside_is_not_taken_for_the_suites_own_end(tmp_path: Path) -> None:
    async def run(report: Report, scope: Scope) -> None:
        raise TimeoutError("a machine did not answer")

    report = report_in(tmp_path)
    suite = Suite(name="s", measures="nothing", run=run, seconds=3600)
    await bench.measure(suite, report, Scope(quick=True))
    assert report.ended_early == "TimeoutError: a machine did not answer"


def test_suites_are_chosen_by_name() -> None:
    assert [suite.name for suite in bench.chosen("")] == list(bench.SUITES)
    assert [suite.name for suite in bench.chosen("soak, engine")] == ["soak", "engine"]
    with pytest.raises(ValueError, match=r"no suite nonsense.*control-plane"):
        bench.chosen("engine,nonsense")
    assert sum(suite.seconds for suite in bench.SUITES.values()) <= 25 * 60


def rows(figure: Figure, by_params: Mapping[int, float]) -> list[Row]:
    return [
        figure.row([value], "tcg", {"children": count, "guest_mb": 256}) for count, value in by_params.items()
    ]


def test_a_table_says_once_what_all_its_rows_have_in_common() -> None:
    (grid,) = grids("engine", [*rows(PAUSE, {1: 2.0, 3: 2.5}), *rows(FORK, {1: 4.0, 3: 123.4})])
    assert grid.title == "engine, tcg: guest_mb 256"
    assert grid.headings == ("median (min-p90)", "children 1", "children 3")
    assert grid.lines == (
        ("n", "1", "1"),
        ("pause, ms", "2.00", "2.50"),
        ("fork, ms", "4.00", "123"),
    )
    assert "| fork, ms | 4.00 | 123 |" in grid.to_markdown()


def test_a_table_of_many_circumstances_has_a_line_for_each() -> None:
    (grid,) = grids("engine", rows(PAUSE, {1: 2.0, 3: 2.5, 8: 3.0}))
    assert grid.headings == ("children", "pause, ms", "n")
    assert grid.lines == (("1", "2.00", "1"), ("3", "2.50", "1"), ("8", "3.00", "1"))


def test_a_table_shows_the_spread_what_failed_and_whose_clock_it_was() -> None:
    spread = PAUSE.row([1.0, 2.0, 3.0], "tcg", {"children": 1})
    failed = FORK.missing("no room | none", "tcg", {"children": 1})
    (grid,) = grids("engine", [spread, failed])
    assert grid.lines[1:] == (("pause, ms", "2.00 (1.00-3.00)"), ("fork, ms", "failed: no room | none"))
    assert "no room \\| none" in grid.to_markdown()
    assert clocks([spread, failed]).lines == ((PAUSE.name, PAUSE.clock), (FORK.name, FORK.clock))


def test_a_plot_takes_the_rows_that_it_is_about_in_order() -> None:
    plot = Plot(
        name="p", title="t", figures=("pause", "fork"), x="children", y_label="ms", where={"guest_mb": 256}
    )
    other = PAUSE.row([9.0], "tcg", {"children": 5, "guest_mb": 1024})
    failed = PAUSE.missing("broke", "tcg", {"children": 4, "guest_mb": 256})
    again = PAUSE.row([7.0], "tcg", {"guest_mb": 256, "children": 1, "depth": 2})
    curves = plot.curves([*rows(PAUSE, {3: 2.5, 1: 2.0}), other, failed, again, *rows(FORK, {1: 4.0})])
    assert curves == {"pause": [(1.0, 2.0), (3.0, 2.5)], "fork": [(1.0, 4.0)]}


def test_requests_are_counted_as_the_server_counted_them() -> None:
    metrics = """
# HELP apiserver_request_total Counter
apiserver_request_total{code="201",resource="forks",scope="resource",subresource="",verb="POST"} 5
apiserver_request_total{code="409",resource="forks",scope="resource",subresource="",verb="POST"} 1
apiserver_request_total{code="200",resource="forks",subresource="status",verb="PATCH"} 1.2e+01
apiserver_request_total{code="200",resource="",subresource="",verb="GET"} 3
apiserver_request_duration_seconds_count{resource="forks",verb="POST"} 99
"""
    assert counted(metrics) == {"POST forks": 6, "PATCH forks/status": 12, "GET other": 3}


def test_a_failure_of_several_tasks_is_told_once() -> None:
    same = [ValueError("gone"), ValueError("gone")]
    assert told(ExceptionGroup("x", same)) == "ValueError: gone"
