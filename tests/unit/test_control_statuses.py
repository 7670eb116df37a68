"""Statuses say what is, the same every time, and never step back."""

from __future__ import annotations

from datetime import timedelta

import msgspec
import pytest

from forktree.models import ForkPhase, ForkStatus, Level, Mode, Reason, SessionPhase, SessionStatus
from forktree.models.conditions import ConditionType, find, holds
from forktree.models.reasons import WrongStep
from forktree_agent.control.branch_records import Verdict
from forktree_agent.control.endpoints import endpoints_of
from forktree_agent.control.fork_statuses import ChildSeen, fork_ended, fork_fails, fork_outlived, fork_runs
from forktree_agent.control.records import PortRecord
from forktree_agent.control.statuses import session_fails, session_runs, session_waits
from unit.control_facts import NODE, NOW, child, child_record, fork, fork_record, lineage, root, root_record

RUNNING = ChildSeen(phase=SessionPhase.RUNNING, recorded=True)


def test_a_running_session_says_all_that_is_known_of_its_start() -> None:
    status = session_runs(child(), NODE, child_record(), now=NOW)
    assert (status.phase, status.ready, status.reason) == (SessionPhase.RUNNING, True, None)
    assert (status.mode, status.level, status.fork_ms) == (Mode.FORK, Level.MEMORY, 4.0)
    assert (status.depth, status.vm_generation_id) == (1, "generation")


def test_a_server_inside_is_told_of_while_there_is_a_machine() -> None:
    ports = (PortRecord(name="web", port=80), PortRecord(name="admin", port=8080))
    there = msgspec.structs.replace(lineage(1), ports=ports)
    record = msgspec.structs.replace(child_record(), lineage=there)
    origin = "https://agent:7443"
    first = f"{origin}/ns/ns/v1/sessions/split-0/ports/web/"
    runs = session_runs(child(), NODE, record, now=NOW, origin=origin)
    assert runs.endpoint == first
    assert session_runs(child(), NODE, child_record(), now=NOW, origin=origin).endpoint is None
    assert endpoints_of(first, ports) == {"web": first, "admin": first.replace("web", "admin")}
    lost = session_fails(child(runs), NODE, record, reason=Reason.MACHINE_LOST, message="it ended", now=NOW)
    assert lost.endpoint is None
    forked = msgspec.structs.replace(fork_record(), lineage=there)
    gone = ChildSeen(phase=SessionPhase.RELEASED, recorded=True)
    status = fork_runs(
        fork(), forked, [RUNNING, gone], node=NODE, point_held=True, complete=False, now=NOW, origin=origin
    )
    told = first.replace("split-0", forked.child_name(0))
    assert [each.endpoint for each in status.children] == [told, None]


def test_the_same_facts_give_the_same_status_at_any_time() -> None:
    first = session_runs(child(), NODE, child_record(), now=NOW)
    later = session_runs(child(first), NODE, child_record(), now=NOW + timedelta(hours=1))
    assert later == first
    runs = fork_runs(
        fork(), fork_record(), [RUNNING] * 2, node=NODE, point_held=True, complete=False, now=NOW
    )
    again = fork_runs(
        fork(runs),
        fork_record(),
        [RUNNING] * 2,
        node=NODE,
        point_held=True,
        complete=False,
        now=NOW + timedelta(hours=1),
    )
    assert again == runs
    # Also after a way through the API server and back.
    assert SessionStatus.model_validate_json(first.model_dump_json()) == first
    assert ForkStatus.model_validate_json(runs.model_dump_json()) == runs


def test_a_failed_session_keeps_what_was_known() -> None:
    before = session_runs(root(), NODE, root_record(), now=NOW)
    after = session_fails(
        root(before), NODE, root_record(), reason=Reason.MACHINE_LOST, message="gone", now=NOW
    )
    assert (after.phase, after.ready, after.reason) == (SessionPhase.FAILED, False, Reason.MACHINE_LOST)
    assert after.vm_generation_id == before.vm_generation_id
    assert not holds(after.conditions, ConditionType.READY)


def test_a_final_phase_is_final() -> None:
    failed = root(SessionStatus(phase=SessionPhase.FAILED))
    with pytest.raises(WrongStep):
        session_runs(failed, NODE, root_record(), now=NOW)
    with pytest.raises(WrongStep):
        session_waits(failed, NODE, phase=SessionPhase.STARTING, reason=Reason.BAKING, message="", now=NOW)
    with pytest.raises(WrongStep):
        fork_runs(
            fork(ForkStatus(phase=ForkPhase.FAILED)),
            fork_record(),
            [],
            node=NODE,
            point_held=True,
            complete=False,
            now=NOW,
        )


def test_a_fork_counts_its_children_and_its_conditions_do_not_go_back() -> None:
    children = [
        ChildSeen(phase=SessionPhase.RELEASED, recorded=True),
        ChildSeen(phase=SessionPhase.FAILED, recorded=False, reason=Reason.INVALID, refusal="quota"),
    ]
    status = fork_runs(fork(), fork_record(), children, node=NODE, point_held=True, complete=False, now=NOW)
    assert (status.replicas, status.ready_replicas, status.recorded) == (2, 0, 1)
    assert holds(status.conditions, ConditionType.READY)
    assert "child 1" in (status.message or "")
    assert "quota" in (status.message or "")
    assert status.total_ms == 12.346


def test_a_lost_instant_is_all_that_a_forgotten_fork_loses() -> None:
    status = fork_runs(
        fork(), fork_record(), [RUNNING] * 2, node=NODE, point_held=True, complete=False, now=NOW
    )
    outlived = fork_outlived(fork(status), status.children, NOW)
    assert not holds(outlived.conditions, ConditionType.POINT_AVAILABLE)
    assert holds(outlived.conditions, ConditionType.FORKED)
    assert (outlived.children, outlived.ready_replicas) == (status.children, 2)
    one = (status.children[0], status.children[1].model_copy(update={"phase": SessionPhase.RELEASED}))
    assert fork_outlived(fork(status), one, NOW).ready_replicas == 1


def test_a_deleted_fork_that_is_still_there_claims_nothing() -> None:
    status = fork_runs(
        fork(), fork_record(), [RUNNING] * 2, node=NODE, point_held=True, complete=False, now=NOW
    )
    gone = [each.model_copy(update={"phase": SessionPhase.RELEASED}) for each in status.children]
    ended = fork_ended(fork(status), gone, reason=None, message="it is deleted", now=NOW)
    assert (ended.phase, ended.ready, ended.ready_replicas) == (ForkPhase.RUNNING, False, 0)
    assert not holds(ended.conditions, ConditionType.READY)
    assert not holds(ended.conditions, ConditionType.POINT_AVAILABLE)
    assert holds(ended.conditions, ConditionType.FORKED)


@pytest.mark.parametrize(
    ("phases", "said"),
    [
        ([SessionPhase.RUNNING, SessionPhase.PAUSED], "every child has its own identity"),
        ([SessionPhase.RUNNING, SessionPhase.FAILED], "every child had its own identity, 1 of 2 are left"),
        (
            [SessionPhase.RELEASED, SessionPhase.FAILED],
            "every child had its own identity, none of them is left",
        ),
    ],
)
def test_that_every_child_answered_stays_true_and_says_who_is_left(
    phases: list[SessionPhase], said: str
) -> None:
    children = [ChildSeen(phase=phase, recorded=True) for phase in phases]
    status = fork_runs(fork(), fork_record(), children, node=NODE, point_held=True, complete=False, now=NOW)
    condition = find(status.conditions, ConditionType.READY)
    assert condition is not None
    assert (condition.status, condition.message) == ("True", said)


def test_a_failed_fork_says_so_in_every_condition() -> None:
    status = fork_fails(fork(), Reason.FORK_FAILED, "a child did not come up", (), NOW)
    assert (status.phase, status.replicas) == (ForkPhase.FAILED, 0)
    for kind in (ConditionType.FORKED, ConditionType.READY, ConditionType.POINT_AVAILABLE):
        condition = find(status.conditions, kind)
        assert condition is not None
        assert condition.reason == Reason.FORK_FAILED


def test_a_fork_says_which_child_is_best_and_why_others_are_not_judged() -> None:
    children = [
        ChildSeen(phase=SessionPhase.RUNNING, recorded=True, score=1.0, exit_code=0),
        ChildSeen(phase=SessionPhase.RUNNING, recorded=True, reason=Reason.NO_SCORE, unscored="it said no"),
    ]
    record = msgspec.structs.replace(fork_record(), seeds=("s0", "s1"))
    runs = fork_runs(fork(), record, children, node=NODE, point_held=True, complete=False, now=NOW)
    assert (runs.phase, runs.best_score, runs.message) == (ForkPhase.RUNNING, 1.0, "child 1: it said no")
    assert runs.best == runs.children[0].name
    assert [(each.seed, each.score, each.exit_code) for each in runs.children] == [
        ("s0", 1.0, 0),
        ("s1", None, None),
    ]
    complete = find(runs.conditions, ConditionType.COMPLETE)
    assert complete is not None
    assert complete.reason == "BranchesRun"


def test_who_lost_is_never_the_best_whatever_score_it_has_later() -> None:
    children = [
        ChildSeen(phase=SessionPhase.RUNNING, recorded=True, score=1.0),
        ChildSeen(phase=SessionPhase.RELEASED, recorded=True, score=9.0),
    ]
    verdict = Verdict(losers=(1,), lost=(), pruned=True)
    record = msgspec.structs.replace(fork_record(), verdict=verdict)
    runs = fork(fork_runs(fork(), record, children, node=NODE, point_held=True, complete=False, now=NOW))
    done = fork_runs(runs, record, children, node=NODE, point_held=True, complete=True, now=NOW)
    assert (done.phase, done.best_score) == (ForkPhase.COMPLETE, 1.0)
    assert holds(done.conditions, ConditionType.COMPLETE)


def test_a_complete_fork_stays_so_and_its_instant_can_still_be_let_go() -> None:
    children = [ChildSeen(phase=SessionPhase.RELEASED, recorded=True)] * 2
    record = fork_record()
    first = fork_runs(fork(), record, children, node=NODE, point_held=True, complete=False, now=NOW)
    done = fork_runs(fork(first), record, children, node=NODE, point_held=True, complete=True, now=NOW)
    dropped = msgspec.structs.replace(record, point_dropped=True)
    # A restarted agent may not know yet that all is done.
    later = fork_runs(fork(done), dropped, children, node=NODE, point_held=False, complete=False, now=NOW)
    assert later.phase is ForkPhase.COMPLETE
    point = find(later.conditions, ConditionType.POINT_AVAILABLE)
    assert point is not None
    assert point.reason == "NoChildren"


def test_many_troubles_fit_into_one_status() -> None:
    children = [ChildSeen(phase=SessionPhase.RUNNING, recorded=True, unscored="x" * 300) for _ in range(200)]
    runs = fork_runs(
        fork(), fork_record(children=200), children, node=NODE, point_held=True, complete=False, now=NOW
    )
    assert runs.message is not None
    assert len(runs.message) < 1100
    assert runs.message.endswith("and 192 more")
