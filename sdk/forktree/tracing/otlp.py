"""Spans as OpenTelemetry's own library sends them. The one module that imports it, and imported on demand.

The library's environment variables hold: OTEL_EXPORTER_OTLP_HEADERS and _CERTIFICATE for collectors that ask
for a token or have a certificate of their own, OTEL_BSP_* for the queue, OTEL_RESOURCE_ATTRIBUTES.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from typing import Final

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, TraceFlags, TraceState
from opentelemetry.trace.status import Status, StatusCode

from forktree.tracing import spans
from forktree.tracing.context import TraceContext
from forktree.tracing.spans import Attribute, Span

log = logging.getLogger(__name__)

TRACES_PATH: Final = "/v1/traces"
COMPLAINTS_SECONDS: Final = 60.0
"""Between two lines about what was not sent: a collector that is down is down for each batch."""

_LIBRARY: Final = "opentelemetry"
_KINDS: Final = {spans.SpanKind.INTERNAL: SpanKind.INTERNAL, spans.SpanKind.SERVER: SpanKind.SERVER}


class Sender:
    """One program's way to its collector: a queue, and a thread that sends what is there."""

    def __init__(self, collector: str, service: str, *, version: str, about: Mapping[Attribute, str]) -> None:
        """`collector` without the path."""
        self._resource = Resource.create(
            {SERVICE_NAME: service, SERVICE_VERSION: version, **{str(key): about[key] for key in about}}
        )
        self._scope = InstrumentationScope("forktree", version)
        self._complaints = _Complaints()
        self._complaints.begin()
        self._exporter = OTLPSpanExporter(endpoint=collector + TRACES_PATH)
        self._processor = BatchSpanProcessor(self._exporter)

    def take(self, span: Span) -> None:
        """Put it into the queue. Where that is full its oldest is lost."""
        self._processor.on_end(
            ReadableSpan(
                span.name,
                context=_context(span.context, is_remote=False),
                parent=None if span.parent is None else _context(span.parent, is_remote=True),
                resource=self._resource,
                attributes={str(key): value for key, value in span.attributes.items()},
                links=[Link(_context(each, is_remote=True)) for each in span.links],
                kind=_KINDS[span.kind],
                status=Status() if span.error is None else Status(StatusCode.ERROR, span.error),
                start_time=span.began_ns,
                end_time=span.ended_ns,
                instrumentation_scope=self._scope,
            )
        )

    def close(self) -> None:
        """Send what is left, and take no more. Blocks, for as long as the library waits."""
        self._processor.shutdown()  # type: ignore[no-untyped-call]
        self._complaints.end()

    def give_up(self) -> None:
        """Do not wait for an answer any more. `close`, in another thread, then returns before long."""
        self._exporter.shutdown()  # type: ignore[no-untyped-call]
        log.warning("spans_not_sent error=%s", "the collector did not take the last ones in time")


class _Complaints(logging.Handler):
    """What the library has to say of its sending: a line a minute of ours in place of one for each try."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._library = logging.getLogger(_LIBRARY)
        self._turn = threading.Lock()
        self._held = 0
        self._said_at = float("-inf")

    def begin(self) -> None:
        self._library.addHandler(self)
        self._library.propagate = False

    def end(self) -> None:
        self._library.propagate = True
        self._library.removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        with self._turn:
            now = time.monotonic()
            if now - self._said_at < COMPLAINTS_SECONDS:
                self._held += 1
                return
            held, self._held, self._said_at = self._held, 0, now
        log.warning("spans_not_sent unsaid=%d error=%r", held, record.getMessage())


def _context(context: TraceContext, *, is_remote: bool) -> SpanContext:
    return SpanContext(
        trace_id=int(context.trace_id, 16),
        span_id=int(context.span_id, 16),
        is_remote=is_remote,
        trace_flags=TraceFlags(TraceFlags.SAMPLED if context.sampled else TraceFlags.DEFAULT),
        trace_state=TraceState.from_header([context.state]) if context.state else TraceState(),
    )
