"""Which span a request belongs to: the one that the caller named, or that of his program, if it has any."""

from __future__ import annotations

import sys

from forktree.errors import BadSettings
from forktree.tracing.context import TRACEPARENT, parsed


class Following:
    """Says it for each request of one client."""

    def __init__(self, traceparent: str | None) -> None:
        """None: the current span of OpenTelemetry, where the program uses that. Raises `BadSettings`."""
        if traceparent is not None and parsed(traceparent) is None:
            example = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
            raise BadSettings(f"a traceparent looks like {example}, not like {traceparent!r}")
        self._traceparent = traceparent

    def headers(self) -> dict[str, str]:
        """What to send."""
        if self._traceparent is not None:
            return {TRACEPARENT: self._traceparent}
        if "opentelemetry.trace" not in sys.modules:  # Who has a span has imported it.
            return {}
        from opentelemetry.trace.propagation.tracecontext import (  # noqa: PLC0415  # Need not be installed.
            TraceContextTextMapPropagator,
        )

        carrier: dict[str, str] = {}
        TraceContextTextMapPropagator().inject(carrier)
        return carrier
