"""An OpenTelemetry collector for tests: takes OTLP over HTTP, and remembers the spans as they were sent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import KeyValue

SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """One span."""

    service: str
    about: dict[str, str | int]
    """What is so of all spans of its program."""
    name: str
    trace_id: str
    span_id: str
    parent: str
    """Empty: it has none."""
    began_ns: int
    ended_ns: int
    attributes: dict[str, str | int]
    links: tuple[tuple[str, str], ...]
    """Trace and span."""
    error: str | None
    is_server: bool

    @property
    def seconds(self) -> float:
        return (self.ended_ns - self.began_ns) / 1e9


@dataclass(slots=True)
class Collector:
    """What came, and how it is answered."""

    url: str = ""
    spans: list[Received] = field(default_factory=list[Received])
    requests: int = 0
    answer: asyncio.Event = field(default_factory=asyncio.Event)
    """Nothing is answered while this is not set."""
    status: int = 200
    came: asyncio.Event = field(default_factory=asyncio.Event)

    async def until(self, holds: Callable[[list[Received]], bool]) -> list[Received]:
        """All spans, once they are so."""
        async with asyncio.timeout(SECONDS):
            while not holds(self.spans):
                self.came.clear()
                try:
                    await self.came.wait()
                except asyncio.CancelledError:
                    print("these came:", *sorted(f"{each.service} {each.name}" for each in self.spans))
                    raise
        return self.spans

    async def take(self, request: web.Request) -> web.Response:
        assert request.content_type == "application/x-protobuf"
        sent = ExportTraceServiceRequest.FromString(await request.read())
        self.requests += 1
        self.came.set()
        await self.answer.wait()
        if self.status == 200:
            self.spans += decoded(sent)
        self.came.set()
        body = ExportTraceServiceResponse().SerializeToString()
        return web.Response(status=self.status, body=body, content_type="application/x-protobuf")


@asynccontextmanager
async def collecting() -> AsyncGenerator[Collector]:
    """One that listens on loopback, and answers at once."""
    collector = Collector()
    collector.answer.set()
    app = web.Application()
    app.router.add_post("/v1/traces", collector.take)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        collector.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield collector
    finally:
        collector.answer.set()
        await runner.cleanup()


def drawn(spans: Sequence[Received], trace_id: str) -> str:
    """One trace as people draw it: milliseconds from its begin and how long each took, below one another."""
    of_trace = sorted((each for each in spans if each.trace_id == trace_id), key=lambda each: each.began_ns)
    known, began_ns = {each.span_id for each in of_trace}, of_trace[0].began_ns

    def lines(below: str | None, depth: int) -> list[str]:
        found: list[str] = []
        for each in of_trace:
            if (each.parent if each.parent in known else None) == below:
                at_ms, took_ms = (each.began_ns - began_ns) / 1e6, each.seconds * 1e3
                found.append(f"{at_ms:9.2f} {took_ms:9.2f}  {'  ' * depth}{each.name}")
                found += lines(each.span_id, depth + 1)
        return found

    return "\n".join(["       ms   took ms  span", *lines(None, 0)])


def decoded(sent: ExportTraceServiceRequest) -> list[Received]:
    """What one request holds."""
    return [
        Received(
            service=str(_values(resource.resource.attributes)["service.name"]),
            about=_values(resource.resource.attributes),
            name=span.name,
            trace_id=span.trace_id.hex(),
            span_id=span.span_id.hex(),
            parent=span.parent_span_id.hex(),
            began_ns=span.start_time_unix_nano,
            ended_ns=span.end_time_unix_nano,
            attributes=_values(span.attributes),
            links=tuple((link.trace_id.hex(), link.span_id.hex()) for link in span.links),
            error=span.status.message if span.status.code == span.status.STATUS_CODE_ERROR else None,
            is_server=span.kind == span.SPAN_KIND_SERVER,
        )
        for resource in sent.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


def _values(attributes: Iterable[KeyValue]) -> dict[str, str | int]:
    return {
        each.key: each.value.int_value if each.value.HasField("int_value") else each.value.string_value
        for each in attributes
    }
