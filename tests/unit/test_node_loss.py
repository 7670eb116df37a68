"""What silence of an agent and loss of a node mean, as tables."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from forktree.models.base import ObjectMeta
from forktree.models.conditions import Condition, ConditionStatus, ConditionType
from forktree.models.fork import Fork, ForkSource, ForkSpec, ForkStatus, SourceRef
from forktree.models.reasons import ForkPhase, Reason, SessionPhase
from forktree.models.session import Session, SessionSpec, SessionStatus, TemplateRef
from forktree_operator.decide.agents import AgentState, agent_state
from forktree_operator.decide.node_loss import (
    Doubt,
    Fail,
    LosePoint,
    NodeFacts,
    Verdict,
    for_fork,
    for_session,
    sentence,
    verdict,
)
from forktree_operator.patches import lose_point

NOW = datetime(2026, 5, 1, tzinfo=UTC)


@pytest.mark.parametrize(
    ("silent_seconds", "held", "expected"),
    [
        (0, True, AgentState.FRESH),
        (15, True, AgentState.FRESH),
        (15.1, True, AgentState.STALE),
        (30, True, AgentState.STALE),
        (30.1, True, AgentState.LOST),
        (0, False, AgentState.STALE),
        (30.1, False, AgentState.LOST),
    ],
)
def test_an_agent_is_lost_after_twice_its_lease(
    silent_seconds: float, held: bool, expected: AgentState
) -> None:
    assert agent_state(silent_seconds, 15.0, held=held) is expected


@pytest.mark.parametrize(
    ("agent", "node", "agent_boot", "expected"),
    [
        pytest.param(AgentState.FRESH, NodeFacts("b1"), "b1", Verdict.ALIVE, id="all well"),
        pytest.param(AgentState.STALE, NodeFacts("b1"), "b1", Verdict.ALIVE, id="silent, but not for long"),
        pytest.param(
            AgentState.FRESH, None, "b1", Verdict.ALIVE, id="a living agent outweighs a missing Node"
        ),
        pytest.param(
            AgentState.STALE, NodeFacts("b2"), "b1", Verdict.ALIVE, id="rebooted, but may still report"
        ),
        pytest.param(AgentState.LOST, NodeFacts("b1"), "b1", Verdict.AGENT_LOST, id="same boot"),
        pytest.param(AgentState.LOST, NodeFacts(""), "b1", Verdict.AGENT_LOST, id="kubelet says no boot"),
        pytest.param(
            AgentState.LOST, NodeFacts("b1"), "", Verdict.AGENT_LOST, id="agent never said its boot"
        ),
        pytest.param(AgentState.LOST, NodeFacts("b2"), "b1", Verdict.NODE_LOST, id="rebooted"),
        pytest.param(AgentState.LOST, None, "b1", Verdict.NODE_LOST, id="node gone"),
        pytest.param(AgentState.LOST, None, "", Verdict.NODE_LOST, id="node gone, agent never reported"),
    ],
)
def test_only_what_is_known_is_said_of_a_node(
    agent: AgentState, node: NodeFacts | None, agent_boot: str, expected: Verdict
) -> None:
    assert verdict(agent, node, agent_boot) is expected


def session(phase: SessionPhase, ready: Condition | None = None) -> Session:
    return Session(
        metadata=ObjectMeta(name="s", namespace="ns"),
        spec=SessionSpec(template_ref=TemplateRef(name="tiny"), node_name="n1"),
        status=SessionStatus(phase=phase, conditions=() if ready is None else (ready,)),
    )


def ready(status: ConditionStatus, reason: str) -> Condition:
    return Condition(type=ConditionType.READY, status=status, reason=reason, last_transition_time=NOW)


@pytest.mark.parametrize("phase", SessionPhase)
@pytest.mark.parametrize("reached", Verdict)
def test_every_live_session_of_a_lost_node_is_told(phase: SessionPhase, reached: Verdict) -> None:
    outcome = for_session(session(phase, ready(ConditionStatus.TRUE, "Ready")), reached)
    if phase.terminal or reached is Verdict.ALIVE:
        assert outcome is None
    else:
        assert outcome == (Doubt() if reached is Verdict.AGENT_LOST else Fail())


def test_a_doubt_is_written_once_and_does_not_keep_the_verdict_from_coming() -> None:
    doubted = session(SessionPhase.RUNNING, ready(ConditionStatus.UNKNOWN, Reason.AGENT_LOST))
    assert for_session(doubted, Verdict.AGENT_LOST) is None
    assert for_session(doubted, Verdict.NODE_LOST) == Fail()


@pytest.mark.parametrize("phase", ForkPhase)
@pytest.mark.parametrize("reached", Verdict)
def test_a_fork_fails_with_its_node_but_not_with_its_agent(phase: ForkPhase, reached: Verdict) -> None:
    fork = Fork(
        metadata=ObjectMeta(name="f", namespace="ns"),
        spec=ForkSpec(source=ForkSource(session=SourceRef(name="s"))),
        status=ForkStatus(phase=phase, node="n1"),
    )
    lost = reached is Verdict.NODE_LOST and not phase.terminal
    assert for_fork(fork, reached) == (Fail() if lost else None)


def test_a_complete_fork_loses_its_instant_with_its_node_and_nothing_else() -> None:
    held = Condition(
        type=ConditionType.POINT_AVAILABLE,
        status=ConditionStatus.TRUE,
        reason="Held",
        last_transition_time=NOW,
    )
    fork = Fork(
        metadata=ObjectMeta(name="f", namespace="ns"),
        spec=ForkSpec(source=ForkSource(session=SourceRef(name="s"))),
        status=ForkStatus(phase=ForkPhase.COMPLETE, node="n1", conditions=(held,)),
    )
    assert for_fork(fork, Verdict.AGENT_LOST) is None
    assert for_fork(fork, Verdict.NODE_LOST) == LosePoint()
    status = lose_point(fork, "gone", NOW)["status"]
    assert isinstance(status, dict)
    assert set(status) == {"conditions", "observedGeneration"}
    (lost,) = ForkStatus.model_validate(status).conditions
    assert (lost.status, lost.reason) == (ConditionStatus.FALSE, "NodeLost")


def test_each_verdict_has_its_sentence() -> None:
    assert sentence(Verdict.ALIVE, "n1", NodeFacts("b1")) == ""
    assert sentence(Verdict.AGENT_LOST, "n1", NodeFacts("b1")) == (
        "the agent of node n1 is silent; whether the machine runs is not known"
    )
    assert sentence(Verdict.NODE_LOST, "n1", None) == "node n1 is gone, and the machine with it"
    assert (
        sentence(Verdict.NODE_LOST, "n1", NodeFacts("b2")) == "node n1 was restarted, and the machine is gone"
    )
