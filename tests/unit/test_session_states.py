"""What a session is asked to be, and its numbers: decisions and statuses as tables."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from forktree.models import Reason, Session, SessionPhase, SessionState, SessionStatus
from forktree.models.conditions import ConditionStatus
from forktree_agent.control.decide_fork import Begin, LiveSource, Refuse, begin
from forktree_agent.control.decide_session import (
    Action,
    Bind,
    EndMachine,
    Nothing,
    Pause,
    Release,
    Resume,
    ShowFailed,
    ShowPaused,
    ShowRunning,
    ShowScore,
    Start,
    View,
    decide,
)
from forktree_agent.control.statuses import (
    score_of,
    session_fails,
    session_paused,
    session_released,
    session_runs,
)
from unit.control_facts import (
    NODE,
    NOW,
    child,
    child_record,
    fork,
    fork_record,
    machine_of,
    root,
    root_record,
)

RUNS = SessionStatus(phase=SessionPhase.RUNNING, ready=True)
PAUSED = SessionStatus(phase=SessionPhase.PAUSED, reason=Reason.PAUSED)
OVER = SessionStatus(phase=SessionPhase.RELEASED)


def asked(session: Session, **spec: object) -> Session:
    return session.model_copy(update={"spec": session.spec.model_copy(update=spec)})


def to_be(session: Session, state: SessionState) -> Session:
    return asked(session, state=state)


def seen(session: Session, *, paused: bool = False, started: bool = True) -> View:
    machine = replace(machine_of(session), paused=paused)
    return View(session=session, machine=machine, record=root_record(started=started))


@pytest.mark.parametrize(
    ("view", "expected"),
    [
        (seen(to_be(root(RUNS), SessionState.PAUSED)), Pause),
        (seen(to_be(root(RUNS), SessionState.PAUSED), paused=True), ShowPaused),
        (seen(to_be(root(PAUSED), SessionState.PAUSED), paused=True), ShowPaused),
        (seen(root(PAUSED), paused=True), Resume),
        (seen(root(PAUSED)), ShowRunning),
        # Asked for before it was started: started first, and never said to run.
        (seen(to_be(root(), SessionState.PAUSED)), Pause),
        (View(session=to_be(root(), SessionState.PAUSED), machine=None, record=None), Start),
        (seen(to_be(root(), SessionState.PAUSED), started=False), Start),
        # A paused machine can be lost, and must not be started anew.
        (View(session=root(PAUSED), machine=None, record=None), ShowFailed),
        (seen(to_be(root(RUNS), SessionState.RELEASED)), Release),
        (seen(to_be(root(PAUSED), SessionState.RELEASED), paused=True), Release),
        # An agent died between the end of the machine and saying so.
        (
            View(session=to_be(root(RUNS), SessionState.RELEASED), machine=None, record=root_record()),
            Release,
        ),
        (View(session=to_be(root(), SessionState.RELEASED), machine=None, record=None), Release),
        (
            View(
                session=to_be(root(RUNS), SessionState.RELEASED),
                machine=None,
                record=root_record(lost="killed by signal 9"),
            ),
            ShowFailed,
        ),
        (seen(to_be(root(OVER), SessionState.RELEASED)), EndMachine),
        (View(session=to_be(root(OVER), SessionState.RELEASED), machine=None, record=root_record()), Nothing),
        # A child is bound first, so that its status can say where it hangs.
        (
            View(
                session=to_be(child(), SessionState.RELEASED),
                machine=machine_of(child()),
                record=None,
                fork=fork_record(),
            ),
            Bind,
        ),
        (
            View(
                session=to_be(child(), SessionState.RELEASED),
                machine=machine_of(child()),
                record=child_record(),
            ),
            Release,
        ),
    ],
)
def test_the_next_step_follows_from_what_is_asked_and_what_is(view: View, expected: type[Action]) -> None:
    assert isinstance(decide(view), expected)


@pytest.mark.parametrize(
    ("spec_score", "status_score", "scored", "expected"),
    [
        (None, None, None, Nothing),
        (2.0, None, None, ShowScore),
        (2.0, 2.0, None, Nothing),
        (2.0, 2.0, 5.0, Nothing),
        (None, 2.0, 5.0, ShowScore),
        (None, 5.0, 5.0, Nothing),
        (0.0, 5.0, 5.0, ShowScore),
        (None, 2.0, None, ShowScore),
    ],
)
def test_what_is_over_is_still_judged(
    spec_score: float | None, status_score: float | None, scored: float | None, expected: type[Action]
) -> None:
    session = asked(root(OVER.model_copy(update={"score": status_score})), score=spec_score)
    record = msgspec.structs.replace(root_record(), scored=scored)
    assert isinstance(decide(View(session=session, machine=None, record=record)), expected)


def test_a_score_that_nobody_here_knows_anything_of_stays_as_it_was_told() -> None:
    session = root(OVER.model_copy(update={"score": 5.0}))
    assert isinstance(decide(View(session=session, machine=None, record=None)), Nothing)
    other = child_record()  # Another object's: the name of a machine says nothing of this one.
    stranger = session.model_copy(update={"spec": session.spec})
    assert isinstance(decide(View(session=stranger, machine=None, record=other)), Nothing)


def test_the_users_number_counts_before_the_scorers() -> None:
    record = msgspec.structs.replace(root_record(), scored=5.0)
    assert score_of(root(), record) == 5.0
    assert score_of(asked(root(), score=0.0), record) == 0.0
    for status in (
        session_runs(asked(root(), score=1.0, seed="s7"), NODE, record, now=NOW),
        session_paused(asked(root(), score=1.0, seed="s7"), NODE, record, now=NOW),
        session_fails(
            asked(root(), score=1.0, seed="s7"), NODE, record, reason=Reason.MACHINE_LOST, message="", now=NOW
        ),
        session_released(asked(root(), score=1.0, seed="s7"), NODE, record, reason=None, message="", now=NOW),
    ):
        assert (status.score, status.seed) == (1.0, "s7")


def test_paused_is_not_ready_says_why_and_goes_back_to_running() -> None:
    paused = session_paused(root(RUNS), NODE, root_record(), now=NOW)
    assert (paused.phase, paused.ready, paused.reason) == (SessionPhase.PAUSED, False, Reason.PAUSED)
    assert [(each.status, each.reason) for each in paused.conditions] == [(ConditionStatus.FALSE, "Paused")]
    again = session_runs(root(paused), NODE, root_record(), now=NOW)
    assert (again.phase, again.ready, again.reason, again.message) == (SessionPhase.RUNNING, True, None, None)
    released = session_released(root(paused), NODE, root_record(), reason=None, message="as asked", now=NOW)
    assert (released.phase, released.ready, released.root) == (SessionPhase.RELEASED, False, "root-uid")


def test_a_paused_session_can_be_forked_and_one_that_is_being_released_can_not() -> None:
    for session, expected in (
        (to_be(root(PAUSED), SessionState.PAUSED), Begin),
        (to_be(root(RUNS), SessionState.RELEASED), Refuse),
    ):
        source = LiveSource(session=session, record=root_record(), machine=machine_of(session), doomed=False)
        assert isinstance(begin(fork(), source, NODE), expected)
