"""What control tells of forks as spans, and that it is nothing where nobody follows."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest

from forktree.metrics.table import Road
from forktree.models import Mode, Reason, Session, Uid
from forktree.models.names import TRACE_ANNOTATION
from forktree.tracing.context import TraceContext, current, parsed, within
from forktree.tracing.spans import Attribute, Span, Tracer
from forktree_agent.control.objects import Store
from forktree_agent.control.records import Followed, Records
from forktree_agent.control.traces import Traces
from forktree_agent.engine.contract import ForkClocks
from forktree_agent.journal import Journal
from unit.control_facts import child, fork, fork_record, root, root_record

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
CLOCKS = ForkClocks(pause_ms=2.0, fork_ms=4.0, ready_ms=9.0, began_at=50.0, copied_ms=(0.5, 1.5))


class Rig:
    """Traces over records in a folder, and what they told."""

    def __init__(self, folder: Path, *, followed: bool = True) -> None:
        self.spans: list[Span] = []
        self.records = Records(Journal.opened(folder, "boot"))
        self.sessions = Store[Session]()
        self.traces = Traces(Tracer(self.spans.append) if followed else None, self.records, self.sessions)

    def named(self, name: str) -> list[Span]:
        return [each for each in self.spans if each.name == name]


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


def annotated(rig: Rig, traceparent: str) -> Followed:
    metadata = fork().metadata.model_copy(update={"annotations": {TRACE_ANNOTATION: traceparent}})
    followed = rig.traces.of(fork().model_copy(update={"metadata": metadata}))
    assert followed is not None
    return followed


def test_an_annotation_says_below_which_span_a_fork_is(rig: Rig) -> None:
    followed = annotated(rig, CALLER)
    assert followed.below == CALLER
    assert followed.span.split("-")[1] == CALLER.split("-")[1]
    assert annotated(rig, "00-hostile\n").below is None
    assert rig.traces.of(fork()) == rig.traces.of(fork())


def test_only_a_fork_that_was_asked_for_here_is_below_what_is_done_here(rig: Rig) -> None:
    with within(parsed(CALLER)):
        early, other = rig.traces.of(fork(uid=Uid("early-1"))), rig.traces.of(fork())
    assert early is not None
    assert early.below == CALLER
    assert other is not None
    assert other.below is None


def test_children_of_a_child_point_to_that_child_and_to_the_fork_that_made_it(rig: Rig) -> None:
    rig.records.put_session(msgspec.structs.replace(root_record(), trace=rig.traces.of(root())))
    first = msgspec.structs.replace(fork_record(), trace=annotated(rig, CALLER), seeds=("a", "b"))
    rig.records.put_fork(first)
    rig.sessions.observe(root())
    rig.sessions.observe(child(index=1))
    rig.traces.forked(first, Road.OBJECT, Mode.FORK, CLOCKS)
    (of_root,) = rig.named("fork")
    started = rig.named("session start")
    assert len(started) == 2
    assert of_root.links == started[0].links
    second = msgspec.structs.replace(
        first,
        uid=Uid("second"),
        above=child().metadata.uid,
        trace=Followed(span=TraceContext.begun().traceparent, below=None),
    )
    rig.spans.clear()
    rig.traces.forked(second, Road.OBJECT, Mode.FORK, CLOCKS)
    (below,) = rig.named("fork")
    assert below.links == (started[1].context, of_root.context)
    assert {each.links for each in rig.named("session start")} == {(started[1].context,)}


def test_stages_are_the_clocks_of_the_result(rig: Rig) -> None:
    record = msgspec.structs.replace(
        fork_record(), trace=annotated(rig, CALLER), seeds=("a", "b"), seen_at=49.0
    )
    rig.traces.forked(record, Road.OBJECT, Mode.FORK, CLOCKS)
    (whole,) = rig.named("fork")
    took_ms = {
        each.name: (
            round((each.began_ns - whole.began_ns) / 1e6, 3),
            round((each.ended_ns - whole.began_ns) / 1e6, 3),
        )
        for each in rig.spans
    }
    assert took_ms == {
        "fork": (0.0, 1009.0),
        "fork prepare": (0.0, 1000.0),
        "fork pause": (1000.0, 1002.0),
        "fork copy": (1000.5, 1001.5),
        "fork run": (1000.0, 1004.0),
        "fork ready": (1004.0, 1009.0),
        "session start": (1000.0, 1009.0),
    }


def test_a_child_that_did_not_answer_has_no_start(rig: Rig) -> None:
    record = msgspec.structs.replace(fork_record(), trace=annotated(rig, CALLER), seeds=("a", "b"))
    rig.traces.answered(record, Road.EARLY, Mode.FORK, CLOCKS, [None, 7.0])
    (started,) = rig.named("session start")
    assert started.attributes[Attribute.INDEX] == 1


def test_what_failed_says_why(rig: Rig) -> None:
    rig.traces.failed(fork(), 1.0, 2.0, Reason.AT_CAPACITY, "there was no room")
    rig.traces.not_started(root(), 1.0, 2.0, Reason.SOURCE_GONE, "it is gone")
    assert [(each.name, each.error, each.attributes[Attribute.ERROR_TYPE]) for each in rig.spans] == [
        ("fork", "there was no room", "AtCapacity"),
        ("session start", "it is gone", "SourceGone"),
    ]


def test_who_asked_for_no_record_gets_none(rig: Rig) -> None:
    record = msgspec.structs.replace(fork_record(), trace=annotated(rig, CALLER[:-1] + "0"), seeds=("a", "b"))
    rig.traces.forked(record, Road.OBJECT, Mode.FORK, CLOCKS)
    assert rig.spans == []


def test_where_nobody_follows_a_fork_costs_no_object(tmp_path: Path) -> None:
    rig = Rig(tmp_path, followed=False)
    made, record = fork(), fork_record()

    def tell() -> None:
        followed = rig.traces.of(made)
        with rig.traces.on(followed):
            rig.traces.forked(record, Road.OBJECT, Mode.FORK, CLOCKS)
        current()

    for _ in range(100):
        tell()
    before = sys.getallocatedblocks()
    for _ in range(1000):
        tell()
    assert sys.getallocatedblocks() - before < 100  # Others may have made some meanwhile.
    assert rig.traces.of(made) is None
