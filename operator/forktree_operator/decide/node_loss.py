"""What a silent agent or a lost node means for the sessions and forks there."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from forktree.models.conditions import ConditionType, find, holds
from forktree.models.fork import Fork
from forktree.models.reasons import Reason
from forktree.models.session import Session
from forktree_operator.decide.agents import AgentState


class Verdict(StrEnum):
    """What is known about a node from outside of it."""

    ALIVE = "Alive"
    """Nothing to say: the agent speaks for itself, or has not been silent for long."""
    AGENT_LOST = "AgentLost"
    """The agent is silent but the machines may still run: nobody knows."""
    NODE_LOST = "NodeLost"
    """The machines cannot exist any more."""


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What the API server says about a Node object that exists."""

    boot_id: str
    """Of the running kernel, as the kubelet reported it. Empty when it has not yet."""


def verdict(agent: AgentState, node: NodeFacts | None, agent_boot_id: str) -> Verdict:
    """What became of a node. `node` is None when no such Node exists; `agent_boot_id` is the boot under
    which the agent last reported, empty if it never did.

    An agent that is heard from is always believed before anything else: it sees its machines.
    """
    if agent is not AgentState.LOST:
        return Verdict.ALIVE
    if node is None:
        return Verdict.NODE_LOST
    if node.boot_id and agent_boot_id and node.boot_id != agent_boot_id:
        return Verdict.NODE_LOST
    return Verdict.AGENT_LOST


def sentence(verdict_reached: Verdict, node_name: str, node: NodeFacts | None) -> str:
    """What to tell the owner of a session on that node."""
    match verdict_reached:
        case Verdict.ALIVE:
            return ""
        case Verdict.AGENT_LOST:
            return f"the agent of node {node_name} is silent; whether the machine runs is not known"
        case Verdict.NODE_LOST if node is None:
            return f"node {node_name} is gone, and the machine with it"
        case Verdict.NODE_LOST:
            return f"node {node_name} was restarted, and the machine is gone"


@dataclass(frozen=True, slots=True)
class Doubt:
    """Set condition Ready to Unknown: nobody who knows can be asked."""


@dataclass(frozen=True, slots=True)
class Fail:
    """Fail the object for good: its machines are gone."""


def for_session(session: Session, reached: Verdict) -> Doubt | Fail | None:
    """What a verdict on its node means for a session. None: nothing is to be written."""
    if session.status.phase.terminal:
        return None
    match reached:
        case Verdict.ALIVE:
            return None
        case Verdict.AGENT_LOST:
            ready = find(session.status.conditions, ConditionType.READY)
            return None if ready is not None and ready.reason == Reason.AGENT_LOST else Doubt()
        case Verdict.NODE_LOST:
            return Fail()


@dataclass(frozen=True, slots=True)
class LosePoint:
    """Say that the instant of a complete fork is not held any more."""


def for_fork(fork: Fork, reached: Verdict) -> Fail | LosePoint | None:
    """What a verdict on its node means for a fork. A silent agent may still finish it: only loss counts."""
    if reached is not Verdict.NODE_LOST:
        return None
    if not fork.status.phase.terminal:
        return Fail()
    return LosePoint() if holds(fork.status.conditions, ConditionType.POINT_AVAILABLE) else None
