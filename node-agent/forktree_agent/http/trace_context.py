"""The span of a request, for those who are asked to do a part of it."""

from __future__ import annotations

from collections.abc import Mapping

from forktree.models.names import TRACE_ANNOTATION
from forktree.tracing.context import current


def handed_on() -> dict[str, str]:
    """Headers for whoever is asked next for what is asked for here."""
    context = current()
    return {} if context is None else context.headers()


def annotated(annotations: Mapping[str, str]) -> Mapping[str, str]:
    """Those of an object that is made for a request: it is worked on as a part of that."""
    context = current()
    return annotations if context is None else {TRACE_ANNOTATION: context.traceparent, **annotations}
