"""Metrics as programs record them, count writes and serve them."""

from __future__ import annotations

import asyncio
import re
import time
from datetime import UTC, datetime, timedelta

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from forktree.kube.errors import Conflict, Forbidden, NotFound, Unavailable
from forktree.metrics import serving, table
from forktree.metrics.api_writes import counting_writes
from forktree.metrics.instruments import Instruments
from forktree.metrics.serving import serving_metrics
from forktree.metrics.table import METRICS, CommandEnd, Kind, Program, Road, Stage
from forktree.models.base import ObjectMeta
from forktree.models.reasons import Mode, Reason, SessionPhase
from forktree.plain_http import CannotListen
from forktree_agent.engine.contract import Counts, ExecOutcome, ForkClocks, Usage
from forktree_agent.metrics import Metrics
from forktree_operator.metrics import Metrics as OperatorMetrics


def scraped(instruments: Instruments) -> dict[str, float]:
    """Every sample, named as PromQL would name it."""
    instruments.read()
    families = text_string_to_metric_families(instruments.text().decode())
    return {
        sample.name + "".join(f" {key}={value}" for key, value in sorted(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


def test_names_follow_the_convention_and_each_says_what_it_is() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    for metric in METRICS:
        assert re.fullmatch(r"forktree_[a-z_]+", metric.name)
        assert metric.name.endswith("_total") == (metric.kind is Kind.COUNTER), metric.name
        assert metric.help.endswith("."), metric.name
        assert bool(metric.buckets) == (metric.kind is Kind.HISTOGRAM), metric.name
        assert metric.kind is not Kind.HISTOGRAM or metric.name.endswith("_seconds")
        assert list(metric.buckets) == sorted(set(metric.buckets))


def test_no_label_can_hold_what_a_user_chooses() -> None:
    for metric in METRICS:
        for label in metric.labels:
            assert label.values or label is metric.labels[-1] or label.name == "route", (
                metric.name,
                label.name,
            )
            assert label.name not in {"namespace", "session", "name", "uid", "node", "path", "user"}


def test_the_engine_and_the_table_have_the_same_words_for_how_a_command_ends() -> None:
    assert [each.value for each in CommandEnd] == [each.value for each in ExecOutcome]


def test_two_programs_in_one_process_share_nothing() -> None:
    one, other = Metrics(), Metrics()
    one.machine_lost()
    assert scraped(one.instruments)["forktree_machines_lost_total"] == 1
    assert scraped(other.instruments)["forktree_machines_lost_total"] == 0


def test_counters_of_known_labels_begin_at_zero_and_nothing_tells_when_it_was_made() -> None:
    there = scraped(Metrics().instruments)
    assert there["forktree_fork_failures_total reason=ForkFailed"] == 0
    assert there["forktree_execs_ended_total outcome=timed_out"] == 0
    assert not [name for name in there if "_created" in name]


def test_a_fork_counts_once_under_each_clock_that_it_has() -> None:
    metrics = Metrics()
    metrics.forked(Road.EARLY, Mode.FORK, ForkClocks(pause_ms=2.0, fork_ms=40.0, ready_ms=None))
    metrics.fork_took(Road.EARLY, Mode.FORK, Stage.READY, 60.0)
    there = scraped(metrics.instruments)
    clocks = {
        stage: there.get(f"forktree_fork_seconds_sum mode=Fork road=early stage={stage}") for stage in Stage
    }
    assert clocks == {"pause": 0.002, "fork": 0.04, "ready": 0.06, "total": None}


def test_how_the_node_stands_is_read_at_each_scrape() -> None:
    metrics = Metrics()
    ended: dict[ExecOutcome, int] = {}
    phases = [SessionPhase.RUNNING, SessionPhase.RUNNING, SessionPhase.PAUSED, SessionPhase.FAILED]

    def stands() -> None:
        counts = Counts(
            machines=3, points=2, point_bytes=4096, standby=1, execs_running=5, execs_ended=dict(ended)
        )
        usage = Usage(capacity_bytes=100, reserved_bytes=40)
        metrics.node_is(counts, usage, phases=phases, unrecorded=7)

    unwatched = metrics.instruments.before_each_scrape(stands)
    ended[ExecOutcome.OK] = 2
    there = scraped(metrics.instruments)
    assert there["forktree_sessions phase=Running"] == 2
    assert there["forktree_sessions phase=Pending"] == 0
    assert "forktree_sessions phase=Failed" not in there
    assert there["forktree_memory_reserved_bytes"] == 40
    assert there["forktree_unrecorded_forks"] == 7
    ended[ExecOutcome.OK] = 3
    assert scraped(metrics.instruments)["forktree_execs_ended_total outcome=ok"] == 3
    phases.clear()
    assert scraped(metrics.instruments)["forktree_sessions phase=Running"] == 0
    unwatched()
    ended[ExecOutcome.OK] = 4
    assert scraped(metrics.instruments)["forktree_execs_ended_total outcome=ok"] == 3


def test_an_unheard_of_method_is_no_label() -> None:
    metrics = Metrics()
    metrics.answered("BREW", "unknown", 405, 0.01)
    metrics.answered("GET", "/v1/sessions", None, 0.01)
    there = scraped(metrics.instruments)
    assert there["forktree_http_requests_total method=other route=unknown status=4xx"] == 1
    assert there["forktree_http_requests_total method=GET route=/v1/sessions status=abandoned"] == 1


def test_an_operator_that_leads_no_more_knows_no_nodes() -> None:
    metrics = OperatorMetrics()
    with metrics.leading():
        metrics.nodes_are([table.NodeState.READY, table.NodeState.SILENT])
        there = scraped(metrics.instruments)
        assert there["forktree_operator_leader"] == 1
        assert there["forktree_operator_nodes state=ready"] == 1
    after = scraped(metrics.instruments)
    assert (after["forktree_operator_leader"], after["forktree_operator_nodes state=ready"]) == (0, 0)


def test_writes_are_counted_and_questions_are_not() -> None:
    instruments = Instruments(Program.OPERATOR)
    observe = counting_writes(instruments)
    observe("GET", "/api/v1/nodes", None)
    observe("POST", "/apis/authentication.k8s.io/v1/tokenreviews", None)
    observe("POST", "/apis/authorization.k8s.io/v1/subjectaccessreviews", Forbidden("no"))
    path = "/apis/forktree.dev/v1alpha1/namespaces/a/sessions/b"
    for error in (None, Conflict("c"), NotFound("n"), Forbidden("f"), Unavailable("u")):
        observe("PATCH", path, error)
    found = {name: value for name, value in scraped(instruments).items() if "api_writes" in name and value}
    assert found == {
        f"forktree_api_writes_total outcome={outcome} verb=patch": 1.0
        for outcome in ("ok", "conflict", "not_found", "refused", "unavailable")
    }


async def test_only_metrics_are_served_to_get_and_head() -> None:
    instruments = OperatorMetrics().instruments
    async with (
        serving_metrics(("127.0.0.1", 0), instruments) as port,
        aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http,
    ):
        async with http.get("/metrics") as answer:
            assert answer.status == 200
            assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            assert "forktree_operator_leader 0.0" in await answer.text()
        for method, path, status in (
            ("GET", "/", 404),
            ("GET", "/metrics/x", 404),
            ("POST", "/metrics", 405),
        ):
            async with http.request(method, path) as answer:
                assert answer.status == status, path


async def test_a_flood_of_scrapes_is_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    instruments = OperatorMetrics().instruments
    reading, go_on = asyncio.Event(), asyncio.Event()
    plain = asyncio.to_thread

    async def slowly(work: object) -> bytes:
        reading.set()
        await go_on.wait()
        return await plain(instruments.text)

    monkeypatch.setattr(asyncio, "to_thread", slowly)

    async def status(http: aiohttp.ClientSession) -> int:
        async with http.get("/metrics") as answer:
            return answer.status

    async with (
        serving_metrics(("127.0.0.1", 0), instruments) as port,
        aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http,
    ):
        asked = [asyncio.create_task(status(http)) for _ in range(serving.SCRAPES_AT_ONCE + 3)]
        turned_away: list[int] = []
        for first in asyncio.as_completed(asked):
            turned_away.append(await first)
            if len(turned_away) == 3:
                break
        assert turned_away == [503, 503, 503]
        go_on.set()
        assert sorted(await asyncio.gather(*asked)) == [200] * serving.SCRAPES_AT_ONCE + [503] * 3


async def test_an_address_that_cannot_be_had_is_one_sentence() -> None:
    instruments = OperatorMetrics().instruments
    async with serving_metrics(("127.0.0.1", 0), instruments) as port:
        with pytest.raises(
            CannotListen, match=rf"metrics cannot be served at 127\.0\.0\.1:{port}: Address already in use"
        ):
            async with serving_metrics(("127.0.0.1", port), instruments):
                pass


async def test_a_host_that_nobody_knows_is_one_sentence() -> None:
    with pytest.raises(CannotListen, match=r"metrics cannot be served at no\.such\.invalid:1: \D+$"):
        async with serving_metrics(("no.such.invalid", 1), OperatorMetrics().instruments):
            pass


async def test_without_an_address_nothing_is_served() -> None:
    async with serving_metrics(None, OperatorMetrics().instruments) as port:
        assert port == 0


def test_the_operator_tells_what_it_decided_and_how_long_that_took() -> None:
    metrics = OperatorMetrics()
    created = datetime.now(UTC) - timedelta(seconds=20)
    metrics.placed(ObjectMeta(name="a", creation_timestamp=created))
    metrics.routed(ObjectMeta(name="b", creation_timestamp=datetime.now(UTC) + timedelta(seconds=5)))
    metrics.rejected(Reason.SOURCE_NOT_FOUND)
    there = scraped(metrics.instruments)
    assert there["forktree_operator_placements_total"] == 1
    assert there["forktree_operator_rejections_total reason=SourceNotFound"] == 1
    assert there["forktree_operator_decision_seconds_sum kind=session"] >= 20
    assert there["forktree_operator_decision_seconds_sum kind=fork"] == 0, "another clock was ahead"


async def test_a_loop_that_is_held_up_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forktree_agent.metrics.LOOK_SECONDS", 0.01)
    metrics = Metrics()
    async with metrics.watching_the_loop():
        await asyncio.sleep(0)  # It has begun to wait.
        time.sleep(0.2)  # noqa: ASYNC251  # This is the hold-up.
        while not scraped(metrics.instruments)["forktree_event_loop_lag_seconds_count"]:  # noqa: ASYNC110
            await asyncio.sleep(0)
    assert scraped(metrics.instruments)["forktree_event_loop_lag_seconds_sum"] >= 0.1
