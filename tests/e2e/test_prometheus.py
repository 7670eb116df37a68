"""A real Prometheus scrapes a system that works: all that stands on the metrics has something to show."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from forktree.metrics import table
from forktree.metrics.table import METRICS, Kind, Metric
from forktree_dev.monitoring import alerts, dashboard
from forktree_dev.monitoring.server import Prometheus
from forktree_dev.monitoring.working import Work, metrics_urls
from forktree_dev.system import Artifacts, Sizes, System

# Under emulation, and while others are at work, the scenario takes a minute or two.
pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

SECONDS = 120.0
AGENT, OPERATOR = "node-1", "operator"
STANDING = {table.CAPACITY_BYTES, table.CANARY_PASSED, table.LEADER, table.NODES}
"""They say how things stand, and nothing here changes that."""
MOVED_ELSEWHERE = {table.SWEPT}
"""A sweep ends what only a crash can leave: `test_agent_control_pruning.py` makes one."""


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def scraped(
    artifacts: Artifacts, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Prometheus]:
    """What it knows after a while of searches, mistakes and an outage; everything still runs."""
    folder = tmp_path_factory.mktemp("prometheus")
    sizes = Sizes(memory_limit_bytes=6 << 30)
    async with (
        System.running(folder / "system", sizes=sizes, artifacts=artifacts) as system,
        Prometheus.running(folder / "prometheus") as prometheus,
        Work.begun(system) as work,
    ):
        await prometheus.scrape(lambda: metrics_urls(system))
        # Twice each: a series that begins with its first event has no rate before the second.
        for _ in range(2):
            await work.search(depth=2, width=2)
            await work.by_objects()
            await work.mistakes()
        await work.outage(lambda: until_it_knows(prometheus, "forktree_unrecorded_forks > 0"))
        await prometheus.scrape(lambda: metrics_urls(system))
        await until_it_knows(prometheus, "forktree_unrecorded_forks == 0")
        await until_it_knows(prometheus, "forktree_operator_leader == 1")
        await until_it_knows(prometheus, 'forktree_sweeps_total{outcome="done"} > 1')
        yield prometheus


async def until_it_knows(prometheus: Prometheus, expr: str) -> None:
    """It tells nobody of what it scrapes, so it is asked again and again."""
    async with asyncio.timeout(SECONDS):
        while not await prometheus.now(expr):  # noqa: ASYNC110
            await asyncio.sleep(0.2)


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
async def test_every_metric_on_the_page_is_there_and_moves(scraped: Prometheus, metric: Metric) -> None:
    series = metric.name + ("_count" if metric.kind is Kind.HISTOGRAM else "")
    for program in metric.programs:
        instance = AGENT if program is table.Program.AGENT else OPERATOR
        # Now or a while ago: who was started anew says nothing yet of what has not happened since.
        found = await scraped.now(f'last_over_time({series}{{instance="{instance}"}}[1h])')
        assert found
        assert {label.name for label in metric.labels} <= found[0].labels.keys()
    if metric in MOVED_ELSEWHERE:
        return
    over = "sum by (instance) ({}(" + series + "[1h]))"
    (most, *_) = await scraped.now(f"max({over.format('max_over_time')})")
    assert most.values[-1][1] > 0
    if metric not in STANDING and metric.kind is not Kind.HISTOGRAM:  # Of nothing it says nothing.
        assert await scraped.now(f"{over.format('max_over_time')} != {over.format('min_over_time')}")


@pytest.mark.parametrize(
    ("row", "panel"),
    [(row, panel) for row in dashboard.ROWS for panel in row.panels],
    ids=lambda part: part.title,
)
async def test_every_panel_has_lines(scraped: Prometheus, row: dashboard.Row, panel: dashboard.Panel) -> None:
    del row  # It names the case: there are two panels "Machines".
    for line in panel.lines:
        found = await scraped.now(dashboard.asked(line.expr, window="10m", span="1h"))
        assert found, line.expr
        known = [each for each in found if not math.isnan(each.values[-1][1])]
        assert known, line.expr
        for name in dashboard.labels_of(line.legend):
            assert all(each.labels.get(name) for each in found), (line.expr, line.legend)


async def test_prometheus_evaluates_every_alert_and_tells_of_what_happened(scraped: Prometheus) -> None:
    expressions = {each.name: each.expr for each in alerts.ALERTS}
    for expr in expressions.values():
        await scraped.now(expr)  # Raises what is wrong with it.
    rules = await scraped.rules()
    assert rules.keys() == expressions.keys()
    assert {name: rule["health"] for name, rule in rules.items()} == dict.fromkeys(rules, "ok")
    states = {name: rule["state"] for name, rule in rules.items()}
    assert states["ForktreeMachinesLost"] in {"pending", "firing"}
    assert states["ForktreeOperatorWithoutLeader"] == states["ForktreeCanaryFailed"] == "inactive"
    (lost,) = rules["ForktreeMachinesLost"]["alerts"]
    assert lost["annotations"]["summary"] == f"Machines of {AGENT} ended although nobody asked for it."
