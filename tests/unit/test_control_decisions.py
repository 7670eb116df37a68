"""What control decides, as tables: no API server, no engine, no time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forktree.models import ForkPhase, ForkStatus, OwnerReference, Reason, SessionPhase, SessionStatus, Uid
from forktree_agent.control.decide_fork import (
    Begin,
    EarlierSource,
    LiveSource,
    NoSource,
    Refuse,
    Source,
    Wait,
    begin,
    belongs_below,
)
from forktree_agent.control.decide_session import (
    DOOMED_GRACE_SECONDS,
    HELD_GRACE_SECONDS,
    Action,
    Bind,
    EndMachine,
    Look,
    Nothing,
    ShowDeleted,
    ShowFailed,
    ShowRunning,
    Start,
    View,
    decide,
)
from unit.control_facts import (
    NODE,
    ROOT,
    child,
    child_record,
    fork,
    fork_record,
    machine_of,
    point,
    root,
    root_record,
)

RUNS = SessionStatus(phase=SessionPhase.RUNNING, ready=True)
FAILED = SessionStatus(phase=SessionPhase.FAILED)


@pytest.mark.parametrize(
    ("view", "expected"),
    [
        (View(session=root(), machine=None, record=None), Start),
        (View(session=root(), machine=None, record=root_record(started=False)), Start),
        (View(session=root(), machine=machine_of(root()), record=root_record(started=False)), Start),
        (View(session=root(), machine=machine_of(root()), record=root_record()), ShowRunning),
        (View(session=root(RUNS), machine=machine_of(root()), record=root_record()), ShowRunning),
        (View(session=root(RUNS), machine=machine_of(root()), record=None), Start),
        (View(session=root(RUNS), machine=None, record=root_record()), ShowFailed),
        (View(session=root(RUNS), machine=None, record=None), ShowFailed),
        (View(session=root(), machine=None, record=root_record()), ShowFailed),
        (View(session=root(FAILED), machine=machine_of(root()), record=root_record()), EndMachine),
        (View(session=root(FAILED), machine=None, record=root_record()), Nothing),
        (View(session=root(deleting=True), machine=machine_of(root()), record=root_record()), Look),
        (View(session=root(RUNS, deleting=True), machine=None, record=None, doomed_seconds=1.0), Look),
        (
            View(
                session=root(RUNS, deleting=True),
                machine=None,
                record=None,
                doomed_seconds=HELD_GRACE_SECONDS,
            ),
            Look,  # The garbage collector is at work.
        ),
        (
            View(
                session=root(RUNS, deleting=True),
                machine=None,
                record=None,
                doomed_seconds=HELD_GRACE_SECONDS,
                held=True,
            ),
            ShowDeleted,
        ),
        (
            View(
                session=root(RUNS, deleting=True),
                machine=None,
                record=None,
                doomed_seconds=DOOMED_GRACE_SECONDS,
            ),
            ShowDeleted,
        ),
        (View(session=root(FAILED, deleting=True), machine=None, record=None, held=True), Nothing),
        (View(session=child(), machine=machine_of(child()), record=None, fork=fork_record()), Bind),
        (View(session=child(), machine=None, record=None, fork=fork_record()), Bind),
        (View(session=child(), machine=None, record=None, fork=fork_record(made=False)), ShowFailed),
        (View(session=child(), machine=machine_of(child()), record=None), ShowFailed),
        (View(session=child(index=7), machine=None, record=None, fork=fork_record()), ShowFailed),
        (View(session=child(), machine=machine_of(child()), record=child_record()), ShowRunning),
        (View(session=child(), machine=None, record=child_record()), ShowFailed),
        (View(session=child(), machine=None, record=child_record(ended=True)), ShowFailed),
        (
            View(session=child(uid=Uid("other")), machine=machine_of(child()), record=child_record()),
            ShowFailed,
        ),
        (
            View(session=child(FAILED, uid=Uid("other")), machine=machine_of(child()), record=child_record()),
            Nothing,  # The machine is another session's.
        ),
        (View(session=child(RUNS), machine=None, record=child_record(), doomed_seconds=1.0), Look),
        (
            View(
                session=child(RUNS), machine=None, record=child_record(), doomed_seconds=DOOMED_GRACE_SECONDS
            ),
            ShowFailed,
        ),
        (
            View(
                session=child(RUNS),
                machine=None,
                record=child_record(),
                doomed_seconds=HELD_GRACE_SECONDS,
                held=True,
            ),
            ShowFailed,
        ),
        (View(session=root(), machine=None, record=None, doomed_seconds=0.0), Look),
    ],
)
def test_the_next_step_for_a_session(view: View, expected: type[Action]) -> None:
    assert type(decide(view)) is expected


def test_a_lost_machine_says_how_it_ended() -> None:
    record = child_record(lost="killed by signal 9 (SIGKILL)")
    action = decide(View(session=child(RUNS), machine=None, record=record))
    assert isinstance(action, ShowFailed)
    assert action.reason is Reason.MACHINE_LOST
    assert "killed by signal 9 (SIGKILL)" in action.message


def live(
    status: SessionStatus = RUNS,
    *,
    runs: bool = True,
    doomed: bool = False,
    deleting: bool = False,
    node: str = NODE,
    depth: int = 0,
) -> LiveSource:
    session = root(status, deleting=deleting, node=node)
    return LiveSource(
        session=session,
        record=root_record(started=runs, depth=depth),
        machine=machine_of(session) if runs else None,
        doomed=doomed,
    )


def test_a_session_that_is_just_expiring_is_not_forked_any_more() -> None:
    source = replace(live(), record=root_record(expired="idle"))
    answer = begin(fork(), source, NODE)
    assert isinstance(answer, Refuse)
    assert answer.reason is Reason.SOURCE_GONE


def earlier(
    phase: ForkPhase = ForkPhase.RUNNING, *, done: bool = True, held: bool = True, doomed: bool = False
) -> EarlierSource:
    status = ForkStatus(phase=phase, parent_uid=ROOT if done else None)
    return EarlierSource(
        fork=fork(status, uid=Uid("earlier")),
        record=fork_record(uid=Uid("earlier")),
        point=point() if held else None,
        doomed=doomed,
    )


@pytest.mark.parametrize(
    ("source", "expected", "reason"),
    [
        (NoSource(kind="session", name="root"), Refuse, Reason.SOURCE_NOT_FOUND),
        (live(), Begin, None),
        (live(SessionStatus()), Begin, None),  # The machine answered; only its status is not written yet.
        (live(SessionStatus(), runs=False), Wait, Reason.SOURCE_NOT_READY),
        (live(runs=False), Wait, Reason.SOURCE_NOT_READY),
        (live(FAILED), Refuse, Reason.SOURCE_FAILED),
        (live(SessionStatus(phase=SessionPhase.RELEASED)), Refuse, Reason.SOURCE_GONE),
        (live(deleting=True), Refuse, Reason.SOURCE_GONE),
        (live(doomed=True), Refuse, Reason.SOURCE_GONE),
        (live(node="there"), Refuse, Reason.INVALID),
        (live(depth=1), Begin, None),
        (live(depth=2), Refuse, Reason.DEPTH_LIMIT),
        (earlier(), Begin, None),
        (earlier(ForkPhase.FAILED), Refuse, Reason.SOURCE_FAILED),
        (earlier(done=False), Wait, Reason.SOURCE_NOT_READY),
        (earlier(held=False), Refuse, Reason.POINT_LOST),
        (earlier(doomed=True), Refuse, Reason.SOURCE_GONE),
    ],
)
def test_whether_a_fork_can_be_begun(
    source: Source, expected: type[Begin | Refuse | Wait], reason: Reason | None
) -> None:
    answer = begin(fork(from_fork=isinstance(source, EarlierSource)), source, NODE)
    assert type(answer) is expected
    assert (None if isinstance(answer, Begin) else answer.reason) is reason


def test_children_of_a_session_are_one_deeper_and_those_of_an_instant_are_not() -> None:
    from_session, from_fork = begin(fork(), live(), NODE), begin(fork(from_fork=True), earlier(), NODE)
    assert isinstance(from_session, Begin)
    assert isinstance(from_fork, Begin)
    assert (from_session.lineage.depth, from_session.lineage.parent) == (1, ROOT)
    assert (from_fork.lineage.depth, from_fork.above.uid) == (1, "earlier")
    assert (from_session.earlier, from_fork.earlier) == (False, True)


def test_another_object_of_the_name_is_not_forked() -> None:
    answer = begin(fork(asked_uid=Uid("gone")), live(), NODE)
    assert isinstance(answer, Refuse)
    assert answer.reason is Reason.SOURCE_GONE


def test_a_fork_that_somebody_else_controls_is_refused_and_one_that_is_ours_is_not() -> None:
    foreign = OwnerReference(api_version="v1", kind="ConfigMap", name="x", uid=Uid("x"), controller=True)
    answer = begin(fork(owners=(foreign,)), live(), NODE)
    assert isinstance(answer, Refuse)
    assert answer.reason is Reason.FOREIGN_OWNER
    assert isinstance(begin(fork(owners=(root().owner_reference(),)), live(), NODE), Begin)
    owned = foreign.model_copy(update={"controller": False})
    assert isinstance(begin(fork(owners=(owned,)), live(), NODE), Begin)


def test_a_source_of_another_namespace_is_none() -> None:
    source = live()
    elsewhere = source.session.metadata.model_copy(update={"namespace": "theirs"})
    source = replace(source, session=source.session.model_copy(update={"metadata": elsewhere}))
    for asked in (None, ROOT):
        answer = begin(fork(asked_uid=asked), source, NODE)
        assert isinstance(answer, Refuse)
        assert answer.reason is Reason.SOURCE_NOT_FOUND
    assert belongs_below(fork(), source, NODE) is None


def test_a_fork_that_comes_to_nothing_goes_with_a_source_that_stays_and_no_other() -> None:
    assert belongs_below(fork(), live(depth=9), NODE) == live().session
    earlier_here = earlier(ForkPhase.FAILED)
    status = earlier_here.fork.status.model_copy(update={"node": NODE})
    earlier_here = replace(earlier_here, fork=earlier_here.fork.model_copy(update={"status": status}))
    assert belongs_below(fork(from_fork=True), earlier_here, NODE) == earlier_here.fork
    foreign = OwnerReference(api_version="v1", kind="Pod", name="x", uid=Uid("pod"), controller=True)
    for each, source in (
        (fork(), NoSource(kind="session", name="root")),
        (fork(), live(doomed=True)),
        (fork(), live(deleting=True)),
        (fork(), live(node="there")),
        (fork(asked_uid=Uid("another")), live()),
        (fork(owners=(foreign,)), live()),
    ):
        assert belongs_below(each, source, NODE) is None
