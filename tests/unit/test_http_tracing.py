"""Requests as spans: below the caller's if he says so, handed on to the owner; nothing that he made up."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from forktree.tracing.context import parsed
from forktree.tracing.spans import Attribute, Span, SpanKind, Tracer
from unit.api_server import says
from unit.test_http_proxying import Front, Owner, front_running

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
async def owner(tmp_path: Path) -> AsyncIterator[Owner]:
    async with Owner.running(tmp_path / "owner") as running:
        running.answering = says({"stdout": "far"})
        yield running


@asynccontextmanager
async def followed(folder: Path, spans: list[Span]) -> AsyncGenerator[Front]:
    async with front_running(folder / "front", tracer=Tracer(spans.append)) as running:
        yield running


async def test_the_owner_is_asked_below_the_span_of_the_request(owner: Owner, tmp_path: Path) -> None:
    spans: list[Span] = []
    async with followed(tmp_path, spans) as front:
        await front.ask(owner.node(), headers={"traceparent": CALLER, "tracestate": "v=1"})
    ((_, _, headers, _),) = owner.seen
    (span,) = spans
    caller, there = parsed(CALLER), parsed(headers["traceparent"], headers["tracestate"])
    assert caller is not None
    assert there is not None
    assert (span.parent, span.context) == (parsed(CALLER, "v=1"), there)
    assert there.trace_id == caller.trace_id
    assert there.span_id != caller.span_id
    assert (span.name, span.kind, span.error) == ("POST /v1/x", SpanKind.SERVER, None)
    assert span.attributes[Attribute.HTTP_STATUS] == 200
    assert span.began_ns < span.ended_ns


async def test_what_is_no_trace_context_begins_a_trace_of_its_own(owner: Owner, tmp_path: Path) -> None:
    spans: list[Span] = []
    async with followed(tmp_path, spans) as front:
        for hostile in ("nonsense", CALLER + "-x", f"{CALLER},{CALLER}", "00-" + "a" * 5000):
            await front.ask(owner.node(), headers={"traceparent": hostile, "tracestate": "v=1"})
    assert len({span.context.trace_id for span in spans}) == len(spans) == 4
    assert [span.parent for span in spans] == [None] * 4
    for (_, _, headers, _), span in zip(owner.seen, spans, strict=True):
        assert headers["traceparent"] == span.context.traceparent
        assert "tracestate" not in headers


async def test_who_wants_no_span_recorded_is_handed_on_so(owner: Owner, tmp_path: Path) -> None:
    spans: list[Span] = []
    async with followed(tmp_path, spans) as front:
        await front.ask(owner.node(), headers={"traceparent": CALLER[:-2] + "00"})
    ((_, _, headers, _),) = owner.seen
    assert headers["traceparent"].endswith("-00")
    assert spans == []


async def test_a_failure_of_ours_is_an_error_and_what_no_route_takes_is_no_span(
    owner: Owner, tmp_path: Path
) -> None:
    owner.url = "https://127.0.0.1:9"  # Nobody is there.
    spans: list[Span] = []
    async with followed(tmp_path, spans) as front:
        status, _ = await front.ask(owner.node())
        assert status >= 500
        for path in ("/v1/x", "/nowhere/secret"):
            async with front.client.put(f"{front.url}{path}") as answer:
                assert answer.status in {404, 405}
    (span,) = spans
    assert span.attributes[Attribute.HTTP_STATUS] == status
    assert span.attributes[Attribute.ERROR_TYPE] == str(status)
    assert span.error is not None


async def test_one_trace_ends_with_its_request_also_on_a_connection_that_is_kept(
    owner: Owner, tmp_path: Path
) -> None:
    spans: list[Span] = []
    async with followed(tmp_path, spans) as front:
        await front.ask(owner.node(), headers={"traceparent": CALLER})
        await front.ask(owner.node())
    first, second = spans
    assert first.context.trace_id != second.context.trace_id
    assert second.parent is None
