"""Decisions as spans, for whoever follows traces."""

from __future__ import annotations

import time

from forktree.models.fork import Fork
from forktree.models.names import TRACE_ANNOTATION
from forktree.models.reasons import Reason
from forktree.models.session import Session
from forktree.tracing.context import TraceContext, of_object
from forktree.tracing.spans import Attribute, Clock, Span, Tracer, Value


class Traces:
    """One operator's. No `tracer`: nobody follows, and every method returns at once."""

    def __init__(self, tracer: Tracer | None) -> None:
        self._tracer = tracer

    def decided(
        self,
        about: Session | Fork,
        began_at: float,
        *,
        node: str | None = None,
        rejected: tuple[Reason, str] | None = None,
    ) -> None:
        """A root was placed or a fork routed, or `rejected`; written by now. Begun in monotonic seconds."""
        if self._tracer is None:
            return
        metadata, clock = about.metadata, Clock()
        parent, trace_id = of_object(metadata.uid, metadata.annotations, TRACE_ANNOTATION)
        above = parent or TraceContext(trace_id=trace_id, span_id=trace_id[:16])
        known: dict[Attribute, Value] = {Attribute.NAMESPACE: metadata.namespace or ""}
        known[Attribute.FORK if isinstance(about, Fork) else Attribute.SESSION] = metadata.name
        if node is not None:
            known[Attribute.NODE] = node
        if rejected is not None:
            known[Attribute.ERROR_TYPE] = rejected[0]
        self._tracer.record(
            Span(
                name="fork route" if isinstance(about, Fork) else "session place",
                context=above.named(f"operator {metadata.uid}"),
                parent=parent,
                began_ns=clock.at(began_at),
                ended_ns=clock.at(time.monotonic()),
                attributes=known,
                error=None if rejected is None else rejected[1],
            )
        )
