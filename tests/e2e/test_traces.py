"""Traces of a whole system, as a collector receives them: the request, the fork below it, its stages and its
children, and the operator's part. And that a collector which is down costs nothing."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any

import pytest

from collector import Collector, Received, collecting, drawn
from e2e.restarted import restarted_with
from e2e.whole import Whole, until
from forktree import AsyncClient
from forktree.models.names import TRACE_ANNOTATION
from forktree_dev import ports
from forktree_dev.processes import Service
from forktree_dev.system import System

pytestmark = pytest.mark.asyncio(loop_scope="session")

EXEC = "POST /ns/{namespace}/v1/sessions/{session_id}/exec"

STOPS_SECONDS = 20.0
"""Far more than an agent takes to stop, and far less than a library waits for a collector by itself."""


def sending_to(system: System, url: str, *parts: Service) -> AbstractAsyncContextManager[dict[str, int]]:
    """These parts, started anew so that they send traces there; and at the end as they were."""
    return restarted_with(system, parts, f"--otlp-endpoint={url}")


def named(spans: Sequence[Received], name: str, trace_id: str | None = None) -> list[Received]:
    return [each for each in spans if each.name == name and trace_id in {None, each.trace_id}]


def only(spans: Sequence[Received], name: str, trace_id: str) -> Received:
    (found,) = named(spans, name, trace_id)
    return found


async def traced_post(
    whole: Whole, path: str, body: dict[str, object], traceparent: str
) -> tuple[int, dict[str, Any]]:
    url = f"{whole.node.url}/ns/{whole.namespace}/v1/{path}"
    async with whole.http.post(url, json=body, headers={"traceparent": traceparent}) as answer:
        return answer.status, await answer.json()


def parent() -> tuple[str, str, str]:
    """A caller's trace and span, and how it says so."""
    trace_id, span_id = secrets.token_hex(16), secrets.token_hex(8)
    return trace_id, span_id, f"00-{trace_id}-{span_id}-01"


async def test_a_fork_is_a_span_of_its_callers_trace_with_its_stages_and_linked_to_where_it_came_from(
    whole: Whole,
) -> None:
    async with (
        collecting() as collector,
        sending_to(whole.system, collector.url, whole.node.agent, whole.system.operator),
    ):
        await whole.answered()
        await whole.template()
        await whole.session("root")
        first_trace, first_caller, header = parent()
        status, forked = await traced_post(whole, "sessions/root/fork", {"replicas": 2}, header)
        assert status == 201, forked
        child: str = forked["children"][0]["session_id"]

        def has_fork(trace_id: str) -> bool:
            return bool(named(collector.spans, "fork", trace_id))

        spans = await collector.until(lambda _: has_fork(first_trace))
        request = only(spans, "POST /ns/{namespace}/v1/sessions/{session_id}/fork", first_trace)
        assert (request.parent, request.is_server) == (first_caller, True)
        assert request.attributes["http.request.method"] == "POST"
        assert request.attributes["http.response.status_code"] == 201
        assert request.attributes["forktree.session.name"] == "root"
        assert request.service == "forktree-agent"
        assert request.about["k8s.node.name"] == whole.node.name

        fork = only(spans, "fork", first_trace)
        assert fork.parent == request.span_id
        assert fork.attributes["forktree.children"] == 2
        assert fork.attributes["forktree.road"] == "early"
        stages = {
            name: only(spans, f"fork {name}", first_trace)
            for name in ("prepare", "pause", "copy", "run", "ready")
        }
        assert {each.parent for each in stages.values()} == {fork.span_id}
        # What is told later is dated anew, by two clocks that are read one after the other.
        assert stages["prepare"].began_ns == pytest.approx(fork.began_ns, abs=1e6)
        assert stages["prepare"].ended_ns == stages["run"].began_ns == stages["pause"].began_ns
        assert stages["run"].ended_ns == pytest.approx(stages["ready"].began_ns, abs=1e6)
        assert stages["ready"].ended_ns == fork.ended_ns
        added = sum(stages[name].seconds for name in ("prepare", "run", "ready"))
        assert added == pytest.approx(fork.seconds, abs=1e-6)
        assert stages["pause"].began_ns <= stages["copy"].began_ns
        assert stages["copy"].ended_ns <= stages["pause"].ended_ns
        # What the caller was told, and not another measurement.
        assert stages["pause"].seconds * 1000 == pytest.approx(forked["pause_time_ms"], abs=0.01)
        assert stages["run"].seconds * 1000 == pytest.approx(forked["fork_time_ms"], abs=0.01)
        assert request.began_ns <= fork.began_ns

        print(drawn(spans, first_trace))

        children = named(spans, "session start", first_trace)
        assert [each.attributes["forktree.child.index"] for each in children] == [0, 1]
        (root,) = [
            each
            for each in named(spans, "session start")
            if each.attributes["forktree.session.name"] == "root"
        ]
        for each in children:
            assert each.parent == fork.span_id
            assert each.links == ((root.trace_id, root.span_id),)
        assert fork.links == ((root.trace_id, root.span_id),)

        # A root that nobody's trace was given for has its uid for one, with the operator and the agent alike.
        uid = (await whole.system.kubectl.json("get", "session", "root", "-n", whole.namespace))["metadata"][
            "uid"
        ]
        assert root.trace_id == uid.replace("-", "")
        spans = await collector.until(lambda found: bool(named(found, "session place", root.trace_id)))
        placed = only(spans, "session place", root.trace_id)
        assert placed.service == "forktree-operator"
        assert placed.attributes["k8s.node.name"] == whole.node.name

        # The fork of a child points to the fork that made it, by whichever road.
        await whole.ready("session", child)
        second_trace, second_caller, annotation = parent()
        await whole.system.kubectl.apply(
            {
                "apiVersion": "forktree.dev/v1alpha1",
                "kind": "Fork",
                "metadata": {
                    "name": "below",
                    "namespace": whole.namespace,
                    "annotations": {TRACE_ANNOTATION: annotation},
                },
                "spec": {"source": {"session": {"name": child}}, "replicas": 1},
            }
        )
        await whole.ready("fork", "below")
        spans = await collector.until(
            lambda found: has_fork(second_trace) and bool(named(found, "fork route", second_trace))
        )
        below = only(spans, "fork", second_trace)
        assert below.parent == second_caller
        assert below.attributes["forktree.road"] == "object"
        assert below.links == (
            (first_trace, children[0].span_id),
            (first_trace, fork.span_id),
        )
        assert only(spans, "fork route", second_trace).parent == second_caller

        # A command, by the client.
        third_trace, third_caller, header = parent()
        async with AsyncClient(
            whole.node.url,
            token=whole.token,
            ca=whole.node.ca_path,
            namespace=whole.namespace,
            traceparent=header,
        ) as client:
            session = await client.sessions.get("root")
            assert (await session.exec("echo secret-word")).stdout == "secret-word\n"
        spans = await collector.until(lambda found: bool(named(found, EXEC, third_trace)))
        assert only(spans, EXEC, third_trace).parent == third_caller
        assert not any("secret-word" in repr(each) for each in spans)
        assert {key for each in spans for key in each.attributes} <= KNOWN


KNOWN = {
    "error.type",
    "http.request.method",
    "http.response.status_code",
    "http.route",
    "k8s.namespace.name",
    "k8s.node.name",
    "forktree.child.index",
    "forktree.children",
    "forktree.fork.name",
    "forktree.mode",
    "forktree.request.id",
    "forktree.road",
    "forktree.session.name",
}
"""All that a span may say."""


async def test_a_trace_that_is_not_to_be_recorded_and_one_that_is_nonsense_are_no_hindrance(
    whole: Whole,
) -> None:
    async with collecting() as collector, sending_to(whole.system, collector.url, whole.node.agent):
        await whole.answered()
        await whole.template()
        await whole.session("root")
        trace_id, span_id, _ = parent()
        nonsense = f"00-{trace_id}-{span_id}-01-more"
        for header in (nonsense, f"00-{trace_id}-{span_id}-00", f"00-{trace_id}-{span_id}-01"):
            status, forked = await traced_post(whole, "sessions/root/fork", {"replicas": 1}, header)
            assert status == 201, forked
        spans = await collector.until(lambda found: len(named(found, "fork")) == 2)
        assert len(named(spans, "fork", trace_id)) == 1
        assert len(named(spans, "POST /ns/{namespace}/v1/sessions/{session_id}/fork", trace_id)) == 1


@pytest.mark.parametrize("silent", [False, True], ids=["down", "silent"])
async def test_a_collector_that_does_not_take_spans_costs_requests_nothing_and_the_agent_ends_in_time(
    whole: Whole, silent: bool
) -> None:
    async with AsyncExitStack() as stack:
        url = f"http://127.0.0.1:{ports.free(1)[0]}"
        collector: Collector | None = None
        if silent:
            collector = await stack.enter_async_context(collecting())
            collector.answer.clear()
            url = collector.url
        await stack.enter_async_context(sending_to(whole.system, url, whole.node.agent))
        await whole.answered()
        await whole.template()
        await whole.session("root")
        log = whole.node.agent.log_path
        began = log.stat().st_size
        if collector is not None:
            await collector.until(lambda _: collector.requests > 0)
        # The sender is in the midst of its first try from here on.
        for _ in range(5):
            status, forked = await whole.post("sessions/root/fork", {"replicas": 1})
            assert status == 201, forked
        if not silent:
            await until(lambda: b"spans_not_sent" in log.read_bytes()[began:])
        stopping = time.monotonic()
        await asyncio.wait_for(whole.node.agent.stop(), STOPS_SECONDS)
        assert time.monotonic() - stopping < STOPS_SECONDS
        said = log.read_text()[began:]
        assert said.count("spans_not_sent") <= 2, said
        assert "Traceback" not in said
        whole.node.agent.start()
        await whole.answered()
