"""What the operator writes, to the last key: nobody else may be written over."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from forktree.models.base import ObjectMeta
from forktree.models.conditions import Condition, ConditionStatus, ConditionType
from forktree.models.fork import Fork, ForkSource, ForkSpec, ForkStatus, SourceRef
from forktree.models.reasons import ForkPhase, Reason, SessionPhase, WrongStep
from forktree.models.session import Session, SessionSpec, SessionStatus, TemplateRef
from forktree_operator import patches

NOW = datetime(2026, 5, 1, tzinfo=UTC)
BEFORE = datetime(2026, 4, 30, tzinfo=UTC)
META = ObjectMeta(name="x", namespace="ns", resource_version="7", generation=2)


def session(**status: object) -> Session:
    spec = SessionSpec(template_ref=TemplateRef(name="tiny"))
    return Session(metadata=META, spec=spec, status=SessionStatus.model_validate(status))


def fork(**status: object) -> Fork:
    spec = ForkSpec(source=ForkSource(session=SourceRef(name="s")))
    return Fork(metadata=META, spec=spec, status=ForkStatus.model_validate(status))


def condition(kind: ConditionType, status: ConditionStatus, reason: str = "Test") -> Condition:
    return Condition(type=kind, status=status, reason=reason, last_transition_time=BEFORE)


def test_a_placement_is_the_node_and_nothing_else() -> None:
    assert patches.place(session(), "n1") == {
        "metadata": {"resourceVersion": "7"},
        "spec": {"nodeName": "n1"},
    }


def test_a_route_takes_back_what_was_said_while_waiting() -> None:
    assert patches.route(fork(reason=Reason.SOURCE_NOT_READY, message="not yet"), "n1") == {
        "metadata": {"resourceVersion": "7"},
        "status": {
            "phase": "Pending",
            "node": "n1",
            "reason": None,
            "message": None,
            "observedGeneration": 2,
        },
    }


def test_the_same_reason_is_not_written_twice() -> None:
    waiting = session(reason=Reason.UNSCHEDULED, message="no ready node")
    assert patches.wait(waiting, Reason.UNSCHEDULED, "no ready node") is None
    assert patches.wait(waiting, None, "") is None
    other = patches.wait(waiting, Reason.UNSCHEDULED, "no node has 5 MiB free; the largest has 4 MiB")
    assert other == {
        "metadata": {"resourceVersion": "7"},
        "status": {
            "phase": "Pending",
            "reason": "Unscheduled",
            "message": "no node has 5 MiB free; the largest has 4 MiB",
            "observedGeneration": 2,
        },
    }


def test_a_failed_fork_keeps_what_once_was_true() -> None:
    forked = condition(ConditionType.FORKED, ConditionStatus.TRUE)
    held = condition(ConditionType.POINT_AVAILABLE, ConditionStatus.TRUE)
    failing = fork(phase=ForkPhase.RUNNING, ready=True, conditions=[forked, held])
    status = ForkStatus.model_validate(patches.fail_fork(failing, Reason.NODE_LOST, "gone", NOW)["status"])
    assert (status.phase, status.ready, status.reason) == (ForkPhase.FAILED, False, Reason.NODE_LOST)
    found = {each.type: (each.status, each.last_transition_time) for each in status.conditions}
    assert found == {
        ConditionType.FORKED: (ConditionStatus.TRUE, BEFORE),
        ConditionType.POINT_AVAILABLE: (ConditionStatus.FALSE, NOW),
        ConditionType.READY: (ConditionStatus.FALSE, NOW),
        ConditionType.COMPLETE: (ConditionStatus.FALSE, NOW),
    }


def test_a_fork_that_never_ran_says_so_in_every_condition() -> None:
    status = ForkStatus.model_validate(patches.fail_fork(fork(), Reason.SOURCE_GONE, "gone", NOW)["status"])
    assert {each.type: each.status for each in status.conditions} == dict.fromkeys(
        ConditionType, ConditionStatus.FALSE
    )


def test_a_doubt_leaves_the_phase_alone() -> None:
    running = session(
        phase=SessionPhase.RUNNING,
        ready=True,
        conditions=[condition(ConditionType.READY, ConditionStatus.TRUE)],
    )
    patch = patches.doubt(running, "silent", NOW)
    status = patch["status"]
    assert isinstance(status, dict)
    assert "phase" not in status
    written = SessionStatus.model_validate(status)
    assert (written.ready, written.reason, written.message) == (False, Reason.AGENT_LOST, "silent")
    (ready,) = written.conditions
    assert (ready.status, ready.reason) == (ConditionStatus.UNKNOWN, "AgentLost")


def test_what_is_final_cannot_fail_again() -> None:
    with pytest.raises(WrongStep):
        patches.fail_session(session(phase=SessionPhase.RELEASED), Reason.NODE_LOST, "gone", NOW)
    assert patches.fail_session(session(phase=SessionPhase.STARTING), Reason.NODE_LOST, "gone", NOW)
