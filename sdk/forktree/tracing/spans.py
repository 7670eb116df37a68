"""Spans as our programs record them, and who takes them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from forktree.tracing.context import TraceContext


class Attribute(StrEnum):
    """All that a span can have: OpenTelemetry's names where there are some. Never a command, a variable, a
    token or what a guest printed."""

    HTTP_METHOD = "http.request.method"
    HTTP_ROUTE = "http.route"
    HTTP_STATUS = "http.response.status_code"
    ERROR_TYPE = "error.type"
    """A reason or an error code of ours."""
    NAMESPACE = "k8s.namespace.name"
    NODE = "k8s.node.name"
    SESSION = "forktree.session.name"
    FORK = "forktree.fork.name"
    INDEX = "forktree.child.index"
    CHILDREN = "forktree.children"
    MODE = "forktree.mode"
    ROAD = "forktree.road"
    REQUEST = "forktree.request.id"


class SpanKind(StrEnum):
    """As OpenTelemetry has it, of those that we are."""

    INTERNAL = "internal"
    SERVER = "server"


Value = str | int | float | bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Something that is over."""

    name: str
    """From a closed set."""
    context: TraceContext
    parent: TraceContext | None
    began_ns: int
    """Nanoseconds since 1970, like `ended_ns`."""
    ended_ns: int
    kind: SpanKind = SpanKind.INTERNAL
    attributes: Mapping[Attribute, Value] = field(default_factory=dict[Attribute, Value])
    links: tuple[TraceContext, ...] = ()
    """What it follows from, in other traces mostly."""
    error: str | None = None
    """Why it failed, as a sentence. None: it did not."""


class Tracer:
    """Takes spans. `take` must not wait."""

    def __init__(self, take: Callable[[Span], None]) -> None:
        self._take = take

    def record(self, span: Span) -> None:
        """Hand it on, if whoever began its trace wants it recorded. Neither waits nor raises."""
        if span.context.sampled:
            self._take(span)


class Clock:
    """Monotonic seconds as nanoseconds since 1970. All spans that one of these dates fit each other."""

    def __init__(self) -> None:
        self._offset_ns = time.time_ns() - time.monotonic_ns()

    def at(self, monotonic_seconds: float) -> int:
        return round(monotonic_seconds * 1_000_000_000) + self._offset_ns
