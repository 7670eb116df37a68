"""Spans on their way to a collector: what arrives, and what one costs that takes none."""

from __future__ import annotations

import asyncio
import logging
import sys

import pytest

from collector import collecting
from forktree.tracing.context import TraceContext
from forktree.tracing.exporting import FLUSH_SECONDS, CannotTrace, exporting
from forktree.tracing.spans import Attribute, Span, SpanKind, Tracer

BATCH = 512
"""As many spans the library sends together."""
QUEUE = 2048


def span(name: str = "fork", **fields: object) -> Span:
    context = TraceContext.begun()
    known: dict[str, object] = {"context": context, "parent": None, "began_ns": 1, "ended_ns": 2, **fields}
    return Span(name=name, **known)  # type: ignore[arg-type]  # What a test does not care for.


async def test_a_span_arrives_as_it_was_recorded() -> None:
    linked, parent = TraceContext.begun(), TraceContext.begun()
    told = span(
        parent=parent,
        kind=SpanKind.SERVER,
        links=(linked,),
        attributes={Attribute.FORK: "split", Attribute.CHILDREN: 2},
        error="why",
    )
    async with collecting() as collector:
        async with exporting(collector.url, "program", version="1", about={Attribute.NODE: "here"}) as tracer:
            assert tracer is not None
            tracer.record(told)
        (found,) = collector.spans  # What is left is sent at the end.
    assert (found.service, found.about["k8s.node.name"]) == ("program", "here")
    assert (found.trace_id, found.span_id) == (told.context.trace_id, told.context.span_id)
    assert (found.parent, found.links) == (parent.span_id, ((linked.trace_id, linked.span_id),))
    assert found.attributes == {"forktree.fork.name": "split", "forktree.children": 2}
    assert (found.name, found.error, found.is_server) == ("fork", "why", True)
    assert (found.began_ns, found.ended_ns) == (1, 2)


async def test_a_collector_that_refuses_is_one_line_however_often_it_does(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with collecting() as collector:
        collector.status = 400
        async with exporting(collector.url, "program", version="1") as tracer:
            assert tracer is not None
            for batch in range(1, 4):
                fill(tracer, BATCH)
                await collector.until(lambda _, batch=batch: collector.requests >= batch)  # type: ignore[misc]
    assert len([each for each in caplog.records if "spans_not_sent" in each.message]) == 1
    assert not [each for each in caplog.records if each.name.startswith("opentelemetry")]


async def test_a_silent_collector_holds_up_nobody_and_the_end_comes_in_time(
    caplog: pytest.LogCaptureFixture,
) -> None:
    loop = asyncio.get_running_loop()
    async with collecting() as collector:
        collector.answer.clear()
        async with exporting(collector.url, "program", version="1") as tracer:
            assert tracer is not None
            fill(tracer, BATCH)
            await collector.until(lambda _: collector.requests == 1)
            began = loop.time()
            fill(tracer, 2 * QUEUE)  # More than there is room for, while nothing is taken.
            assert loop.time() - began < FLUSH_SECONDS
            ending = loop.time()
        assert loop.time() - ending < FLUSH_SECONDS * 3
    said = [each.message for each in caplog.records if "spans_not_sent" in each.message]
    assert 1 <= len(said) <= 2
    assert said[-1].endswith("the collector did not take the last ones in time")


async def test_the_librarys_own_log_is_as_before_at_the_end() -> None:
    async with collecting() as collector, exporting(collector.url, "program", version="1"):
        assert not logging.getLogger("opentelemetry").propagate
    assert logging.getLogger("opentelemetry").propagate
    assert logging.getLogger("opentelemetry").handlers == []


def fill(tracer: Tracer, count: int) -> None:
    for _ in range(count):
        tracer.record(span())


async def test_an_installation_that_cannot_send_traces_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "forktree.tracing.otlp", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)  # As if it were not there.
    with pytest.raises(CannotTrace, match=r"--otlp-endpoint needs the packages of `forktree\[tracing\]`"):
        async with exporting("http://127.0.0.1:9", "program", version="1"):
            pass


async def test_without_a_collector_there_is_no_tracer() -> None:
    async with exporting(None, "program", version="1") as tracer:
        assert tracer is None
