"""What control tells of forks and starts to whoever follows traces, as spans made of their results.

Engines know nothing of it. Their clocks become the stages of a fork, so nothing is measured for this alone.
Which span a fork is stands in its record: forks of its children point there, also after a restart. Where
nobody follows, every method returns at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Final

from forktree.metrics.table import Road
from forktree.models import Fork, Mode, Reason, Session
from forktree.models.names import TRACE_ANNOTATION
from forktree.tracing.context import TraceContext, current, of_object, parsed, within
from forktree.tracing.spans import Attribute, Clock, Span, Tracer, Value
from forktree_agent.control.objects import Store
from forktree_agent.control.owners import ChildMachine, RootMachine, is_early, meaning, owner_of
from forktree_agent.control.records import Followed, ForkRecord, Records, SessionRecord
from forktree_agent.engine.contract import ForkClocks

_NOBODY: Final = nullcontext()


class Traces:
    """Of one agent. No `tracer`: nobody follows."""

    def __init__(self, tracer: Tracer | None, records: Records, sessions: Store[Session]) -> None:
        self._tracer = tracer
        self._records = records
        self._sessions = sessions

    def of(self, item: Fork | Session) -> Followed | None:
        """The span of a fork, or of a root that is to be started: each time the same for one object."""
        if self._tracer is None:
            return None
        metadata = item.metadata
        asking = current() if is_early(metadata.uid) else None
        if asking is None:
            asking, trace_id = of_object(metadata.uid, metadata.annotations, TRACE_ANNOTATION)
            if asking is None:
                alone = TraceContext(trace_id=trace_id, span_id=trace_id[:16])
                return Followed(span=alone.named(metadata.uid).traceparent, below=None)
        return Followed(span=asking.named(metadata.uid).traceparent, below=asking.traceparent)

    def on(self, followed: Followed | None) -> AbstractContextManager[None]:
        """What is logged and asked inside the block belongs to that span."""
        return _NOBODY if followed is None else within(parsed(followed.span))

    def forked(self, record: ForkRecord, road: Road, mode: Mode, clocks: ForkClocks) -> None:
        """Its machines run. Where they were waited for, too, they are known to have answered by now."""
        followed = self._followed(record.trace)
        if followed is None or clocks.began_at is None:
            return
        followed.stage("fork prepare", record.seen_at, clocks.began_at)
        for name, stage in _stages("fork", clocks):
            followed.stage(name, *stage)
        if clocks.ready_ms is not None:
            # Which of them answered when is not known of those that were waited for together.
            heard = [clocks.ready_ms] * len(record.seeds)
            self._tell(followed, record, road, mode, heard, clocks=clocks)

    def answered(
        self,
        record: ForkRecord,
        road: Road,
        mode: Mode,
        clocks: ForkClocks,
        ready_ms: Sequence[float | None],
    ) -> None:
        """What became of each child, and so the fork is over. `ready_ms`: when each answered, by the same
        clocks; None: it did not, or nobody knows when."""
        followed = self._followed(record.trace)
        if followed is not None:
            self._tell(followed, record, road, mode, ready_ms, clocks=clocks)

    def _tell(
        self,
        followed: _Followed,
        record: ForkRecord,
        road: Road,
        mode: Mode,
        ready_ms: Sequence[float | None],
        *,
        clocks: ForkClocks,
    ) -> None:
        began_at = clocks.began_at
        if began_at is None:
            return
        origin = self._origin(record)
        last_ms = max((each for each in ready_ms if each is not None), default=clocks.fork_ms)
        known = _fork_attributes(record.namespace, record.name, record.above_kind, record.above_name)
        for index, child_ms in enumerate(ready_ms):
            if child_ms is not None:
                followed.record(
                    Span(
                        name="session start",
                        context=followed.context.named(_child(index)),
                        parent=followed.context,
                        began_ns=followed.clock.at(began_at),
                        ended_ns=followed.clock.at(began_at + child_ms / 1000),
                        attributes={
                            Attribute.NAMESPACE: record.namespace,
                            Attribute.SESSION: record.child_name(index),
                            Attribute.INDEX: index,
                            Attribute.MODE: mode,
                        },
                        links=origin[:1],
                    )
                )
        ended_at = began_at + last_ms / 1000
        followed.stage("fork ready", began_at + clocks.fork_ms / 1000, ended_at)
        followed.whole(
            "fork",
            record.seen_at,
            ended_at,
            {**known, Attribute.CHILDREN: len(ready_ms), Attribute.MODE: mode, Attribute.ROAD: road},
            links=origin,
        )

    def failed(self, fork: Fork, seen_at: float, now: float, reason: Reason, message: str) -> None:
        """It came to nothing, for good. Times in monotonic seconds."""
        followed = self._followed(self.of(fork))
        if followed is not None:
            source = fork.spec.source.session or fork.spec.source.fork
            kind = "Fork" if fork.spec.source.session is None else "Session"
            known = _fork_attributes(
                fork.metadata.namespace or "", fork.metadata.name, kind, source.name if source else ""
            )
            followed.whole("fork", seen_at, now, {**known, Attribute.ERROR_TYPE: reason}, error=message)

    def started(self, record: SessionRecord, mode: Mode, clocks: ForkClocks) -> None:
        """A root runs and has answered."""
        followed = self._followed(record.trace)
        if followed is None or clocks.began_at is None:
            return
        followed.stage("start prepare", record.seen_at, clocks.began_at)
        for name, stage in _stages("start", clocks):
            followed.stage(name, *stage)
        ready_ms = clocks.fork_ms if clocks.ready_ms is None else clocks.ready_ms
        known = {Attribute.NAMESPACE: record.namespace, Attribute.SESSION: record.name, Attribute.MODE: mode}
        ended_at = clocks.began_at + ready_ms / 1000
        followed.stage("start ready", clocks.began_at + clocks.fork_ms / 1000, ended_at)
        followed.whole("session start", record.seen_at, ended_at, {**known, Attribute.ROAD: Road.ROOT})

    def not_started(self, session: Session, seen_at: float, now: float, reason: Reason, message: str) -> None:
        """A root came to nothing, for good."""
        followed = self._followed(self.of(session))
        if followed is not None:
            known = {
                Attribute.NAMESPACE: session.metadata.namespace or "",
                Attribute.SESSION: session.metadata.name,
                Attribute.ERROR_TYPE: reason,
            }
            followed.whole("session start", seen_at, now, known, error=message)

    def _followed(self, followed: Followed | None) -> _Followed | None:
        """Its spans, if they are wanted."""
        if self._tracer is None or followed is None:
            return None
        context = parsed(followed.span)
        if context is None or not context.sampled:
            return None
        return _Followed(self._tracer, Clock(), context, parsed(followed.below))

    def _origin(self, record: ForkRecord) -> tuple[TraceContext, ...]:
        """The spans that a fork follows from: the forked session's, and that of the fork which made it."""
        if record.above_kind == "Fork":
            return _contexts(self._records.fork(record.above))
        session = self._sessions.get(record.above)
        if session is None:
            return ()
        owner = owner_of(session)
        match meaning(owner):
            case ChildMachine(fork=fork, index=index):
                made_by = _contexts(self._records.fork(fork))
                return (*(each.named(_child(index)) for each in made_by), *made_by)
            case RootMachine():
                return _contexts(self._records.session(owner))
            case _:
                return ()


@dataclass(frozen=True, slots=True)
class _Followed:
    """The spans of one fork or start, dated by one clock."""

    tracer: Tracer
    clock: Clock
    context: TraceContext
    parent: TraceContext | None

    def stage(self, name: str, began_at: float, ended_at: float) -> None:
        """A part of it. Monotonic seconds."""
        self.record(
            Span(
                name=name,
                context=self.context.named(name),
                parent=self.context,
                began_ns=self.clock.at(began_at),
                ended_ns=self.clock.at(ended_at),
            )
        )

    def whole(
        self,
        name: str,
        began_at: float,
        ended_at: float,
        attributes: Mapping[Attribute, Value],
        *,
        links: tuple[TraceContext, ...] = (),
        error: str | None = None,
    ) -> None:
        self.record(
            Span(
                name=name,
                context=self.context,
                parent=self.parent,
                began_ns=self.clock.at(began_at),
                ended_ns=self.clock.at(ended_at),
                attributes=attributes,
                links=links,
                error=error,
            )
        )

    def record(self, span: Span) -> None:
        self.tracer.record(span)


def _stages(what: str, clocks: ForkClocks) -> Iterator[tuple[str, tuple[float, float]]]:
    """What happened from when until when, in monotonic seconds, of all that has a clock."""
    assert clocks.began_at is not None
    began = clocks.began_at
    if clocks.pause_ms is not None:
        yield f"{what} pause", (began, began + clocks.pause_ms / 1000)
    if clocks.copied_ms is not None:
        yield f"{what} copy", (began + clocks.copied_ms[0] / 1000, began + clocks.copied_ms[1] / 1000)
    yield f"{what} run", (began, began + clocks.fork_ms / 1000)


def _contexts(record: ForkRecord | SessionRecord | None) -> tuple[TraceContext, ...]:
    known = None if record is None or record.trace is None else parsed(record.trace.span)
    return () if known is None else (known,)


def _child(index: int) -> str:
    """Below which name of its fork's span a child's is."""
    return f"child {index}"


def _fork_attributes(namespace: str, name: str, above_kind: str, above_name: str) -> dict[Attribute, Value]:
    known: dict[Attribute, Value] = {Attribute.NAMESPACE: namespace, Attribute.FORK: name}
    if above_kind == "Session":
        known[Attribute.SESSION] = above_name
    return known
