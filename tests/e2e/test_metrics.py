"""A real scrape of a whole system: every metric is there, and the main ones move with what is done."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from e2e.whole import SECONDS, Whole
from forktree.metrics.table import METRICS, Kind, Program
from forktree_dev.node import metrics_url

pytestmark = pytest.mark.asyncio(loop_scope="session")

Sample = tuple[str, frozenset[tuple[str, str]]]


class Scrape:
    """What one program said at one moment."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.samples: dict[Sample, float] = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def total(self, name: str, **labels: str) -> float:
        """All series of that name that have these labels, together."""
        wanted = set(labels.items())
        return sum(value for (each, has), value in self.samples.items() if each == name and wanted <= has)

    def names(self) -> set[str]:
        return {name for name, _ in self.samples}


async def scraped(url: str) -> Scrape:
    async with aiohttp.ClientSession() as http, http.get(url) as answer:
        assert answer.status == 200
        return Scrape(await answer.text())


async def scraped_when(url: str, there: Callable[[Scrape], bool]) -> Scrape:
    """A scrape as Prometheus makes them, one after the other, until one shows it."""
    async with asyncio.timeout(SECONDS):
        while not there(found := await scraped(url)):  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    return found


async def test_sessions_forks_commands_and_pruning_move_what_counts_them(whole: Whole) -> None:
    agent, operator = whole.node.metrics_url, metrics_url(whole.system.operator)
    before, operator_before = await scraped(agent), await scraped(operator)

    await whole.template()
    await whole.session()
    (child,) = await whole.forked("first")
    assert await whole.sh(child, "echo hello") == "hello\n"
    status, early = await whole.post(f"sessions/{child}/fork", {"replicas": 2})
    assert status in {200, 201}, early
    status, _ = await whole.post("sessions/root/exec", {"command": "exit 3"})
    assert status == 200
    status, _ = await whole.get("sessions/nobody")
    assert status == 404
    await whole.apply("Fork", "hopeless", {"source": {"session": {"name": "root"}}, "replicas": 200})
    after = await scraped_when(
        agent, lambda now: now.total("forktree_at_capacity_refusals_total", road="object") > 0
    )
    after = await scraped_when(agent, lambda now: now.total("forktree_unrecorded_forks") == 0)

    def moved(name: str, **labels: str) -> float:
        return after.total(name, **labels) - before.total(name, **labels)

    for road in ("root", "object", "early"):
        assert moved("forktree_fork_seconds_count", stage="fork", road=road) == 1, road
        assert moved("forktree_fork_seconds_count", stage="total", road=road) == 1, road
    for road in ("object", "early"):
        assert moved("forktree_fork_seconds_count", stage="pause", road=road) == 1, road
        assert moved("forktree_fork_seconds_count", stage="ready", road=road) == 1, road
    assert moved("forktree_machines") == 4
    assert after.total("forktree_sessions", phase="Running") >= 4
    assert moved("forktree_memory_reserved_bytes") >= 4 * (128 << 20)
    assert after.total("forktree_point_bytes") > 0
    assert moved("forktree_execs_ended_total", outcome="ok") >= 1
    assert moved("forktree_execs_ended_total", outcome="failed") == 1
    session = "/v1/sessions/{session_id}"
    assert moved("forktree_http_requests_total", method="POST", route=f"{session}/exec", status="2xx") == 2
    assert moved("forktree_http_requests_total", method="GET", route=session, status="4xx") == 1
    assert moved("forktree_http_request_seconds_count", method="POST", route=f"{session}/fork") == 1
    assert moved("forktree_api_writes_total", verb="create", outcome="ok") > 0
    assert after.total("forktree_canary_passed") == 1

    operator_after = await scraped(operator)
    assert operator_after.total("forktree_operator_leader") == 1
    assert operator_after.total("forktree_operator_nodes", state="ready") == 1
    for name in ("placements_total", "routes_total", "decision_seconds_count", "sweep_seconds_count"):
        series = f"forktree_operator_{name}"
        assert operator_after.total(series) > operator_before.total(series), series

    await whole.delete("session", "root")
    pruned = await scraped_when(agent, lambda now: now.total("forktree_machines") < 1)
    assert pruned.total("forktree_sessions", phase="Running") == 0
    assert pruned.total("forktree_machines_lost_total") == before.total("forktree_machines_lost_total")

    for program, scrape in ((Program.AGENT, pruned), (Program.OPERATOR, operator_after)):
        for metric in METRICS:
            if program in metric.programs:
                series = metric.name + ("_count" if metric.kind is Kind.HISTOGRAM else "")
                assert series in scrape.names(), series
        for name in (whole.namespace, whole.node.name, "tiny", "first", child):
            assert f'"{name}"' not in scrape.text
