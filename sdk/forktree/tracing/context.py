"""Where in which trace something is, as W3C Trace Context (`traceparent`, `tracestate`) hands it on.

What callers send is anybody's: what is not valid is as if it had not been sent.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final

TRACEPARENT: Final = "traceparent"
TRACESTATE: Final = "tracestate"

_VERSION: Final = "00"
_FORM: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-[!-~]*)?")
_LENGTH_MAX: Final = 256
"""Of a `traceparent`. Version 00 has 55 characters; later ones may have more, and are read up to there."""
_STATE_LENGTH_MAX: Final = 512
_STATE: Final = re.compile(r"[ \t]*[a-z0-9][-a-z0-9_*/@]{0,255}=[ -+\--<>-~]{1,256}(,.*)?")
"""A first entry as it has to be. The others are for the vendors that wrote them."""
_PRINTABLE: Final = re.compile(r"[\t -~]*")
_SAMPLED: Final = 0x01


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceContext:
    """One span, seen from afar."""

    trace_id: str
    """32 hexadecimal digits, not all 0."""
    span_id: str
    """16 of them, not all 0."""
    sampled: bool = True
    """Whether spans of this trace are recorded: whoever began it says so for all."""
    state: str = ""
    """What vendors hand on, as it came."""

    @classmethod
    def begun(cls) -> TraceContext:
        """The first span of a new trace."""
        return cls(trace_id=secrets.token_hex(16), span_id=secrets.token_hex(8))

    def below(self) -> TraceContext:
        """A new span of the same trace."""
        return TraceContext(
            trace_id=self.trace_id, span_id=secrets.token_hex(8), sampled=self.sampled, state=self.state
        )

    def named(self, name: str) -> TraceContext:
        """The span of the same trace that `name` stands for below this one: each time the same."""
        digest = hashlib.sha256(f"{self.span_id}/{name}".encode()).hexdigest()
        return TraceContext(
            trace_id=self.trace_id, span_id=digest[:16], sampled=self.sampled, state=self.state
        )

    @property
    def traceparent(self) -> str:
        """As a header has it."""
        return f"{_VERSION}-{self.trace_id}-{self.span_id}-{_SAMPLED if self.sampled else 0:02x}"

    def headers(self) -> dict[str, str]:
        """What to send to whoever is asked next."""
        sent = {TRACEPARENT: self.traceparent}
        return {**sent, TRACESTATE: self.state} if self.state else sent


def parsed(traceparent: str | None, tracestate: str = "") -> TraceContext | None:
    """What they say. None where `traceparent` is not valid; a `tracestate` that is not is left out."""
    if traceparent is None or len(traceparent) > _LENGTH_MAX:
        return None
    found = _FORM.fullmatch(traceparent)
    if found is None:
        return None
    version, trace_id, span_id, flags, rest = found.groups()
    if version == "ff" or (version == _VERSION and rest is not None):
        return None
    if not int(trace_id, 16) or not int(span_id, 16):
        return None
    return TraceContext(
        trace_id=trace_id,
        span_id=span_id,
        sampled=bool(int(flags, 16) & _SAMPLED),
        state=tracestate if _is_state(tracestate) else "",
    )


def sent(traceparents: Sequence[str], tracestates: Sequence[str] = ()) -> TraceContext | None:
    """The same of headers, each of which may have come more than once."""
    if len(traceparents) != 1:
        return None
    return parsed(traceparents[0], ",".join(tracestates))


def of_object(uid: str, annotations: Mapping[str, str], annotation: str) -> tuple[TraceContext | None, str]:
    """What an object is to be done below, by its annotation, and the id of its trace.

    Without an annotation that is valid it has a trace of its own, whose id is its uid without the hyphens:
    all who work on it say the same without a word to each other.
    """
    parent = parsed(annotations.get(annotation))
    if parent is not None:
        return parent, parent.trace_id
    digits = uid.replace("-", "").lower()
    if not re.fullmatch(r"[0-9a-f]{32}", digits) or not int(digits, 16):
        digits = hashlib.sha256(uid.encode()).hexdigest()[:32]
    return None, digits


def _is_state(text: str) -> bool:
    return (
        len(text) <= _STATE_LENGTH_MAX
        and _PRINTABLE.fullmatch(text) is not None
        and _STATE.fullmatch(text) is not None
    )


# A context variable is no state of a module: each task has its own value, set for as long as a block lasts.
_current: ContextVar[TraceContext | None] = ContextVar("forktree_trace", default=None)


def current() -> TraceContext | None:
    """The span that is worked on here, if anybody follows it."""
    return _current.get()


def trace_ids() -> dict[str, str]:
    """Those of the current span, as lines of a log have them."""
    context = _current.get()
    return {} if context is None else {"trace_id": context.trace_id, "span_id": context.span_id}


def unfollowed() -> None:
    """Work on no span from here on, in a task that was begun by one that may do."""
    if _current.get() is not None:
        _current.set(None)


@contextmanager
def within(context: TraceContext | None) -> Generator[None]:
    """Work on this span inside the block. None: on none."""
    token = _current.set(context)
    try:
        yield
    finally:
        _current.reset(token)
