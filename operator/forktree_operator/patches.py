"""What the operator writes, as merge patches. Each holds only against the version that was decided upon.

An agent may write to the same object in between. The API server then answers with a conflict, and the
operator asks its decision again with the new object.
"""

from __future__ import annotations

from datetime import datetime

from pydantic import JsonValue

from forktree.models.conditions import Condition, ConditionStatus, ConditionType, find, replaced
from forktree.models.fork import Fork
from forktree.models.reasons import ForkPhase, Reason, SessionPhase, fork_step, session_step
from forktree.models.session import Session

Patch = dict[str, JsonValue]


def place(session: Session, node: str) -> Patch:
    """For the object itself: the node on which a root session runs."""
    return {**_version(session), "spec": {"nodeName": node}}


def route(fork: Fork, node: str) -> Patch:
    """For the status: the node that forks. What the operator said while it waited is taken back."""
    cleared: Patch = {"reason": None, "message": None}
    return _status(fork, {"phase": fork.status.phase, "node": node, **cleared})


def wait(waiting: Session | Fork, reason: Reason | None, message: str) -> Patch | None:
    """For the status: why nothing happens yet. None if there is no reason to give, or if it stands there."""
    if reason is None:
        return None
    if waiting.status.reason == reason and waiting.status.message == message:
        return None
    return _status(waiting, {"phase": waiting.status.phase, "reason": reason, "message": message})


def fail_session(session: Session, reason: Reason, message: str, now: datetime) -> Patch:
    """For the status: the end of a session whose machine is gone. Raises `WrongStep` on a final one."""
    phase = session_step(session.status.phase, SessionPhase.FAILED)
    ready = _condition(ConditionType.READY, ConditionStatus.FALSE, reason, message, now)
    return _status(session, _failure(phase, reason, message, replaced(session.status.conditions, ready)))


def fail_fork(fork: Fork, reason: Reason, message: str, now: datetime) -> Patch:
    """For the status: the end of a fork. Raises `WrongStep` on a final one.

    `Forked` is left as it is where it was written: that every child ran once stays true.
    """
    phase = fork_step(fork.status.phase, ForkPhase.FAILED)
    conditions = fork.status.conditions
    for kind in ConditionType:
        if kind is not ConditionType.FORKED or find(conditions, kind) is None:
            new = _condition(kind, ConditionStatus.FALSE, reason, message, now)
            conditions = replaced(conditions, new)
    return _status(fork, _failure(phase, reason, message, conditions))


def lose_point(fork: Fork, message: str, now: datetime) -> Patch:
    """For the status: a fork that was complete has lost its instant, and nothing else that it says."""
    lost = _condition(ConditionType.POINT_AVAILABLE, ConditionStatus.FALSE, Reason.NODE_LOST, message, now)
    conditions = replaced(fork.status.conditions, lost)
    return _status(fork, {"conditions": [each.to_json() for each in conditions]})


def doubt(session: Session, message: str, now: datetime) -> Patch:
    """For the status: nobody knows whether the machine runs. The agent overwrites it when it is back."""
    unknown = _condition(ConditionType.READY, ConditionStatus.UNKNOWN, Reason.AGENT_LOST, message, now)
    conditions = replaced(session.status.conditions, unknown)
    told: Patch = {"ready": False, "reason": Reason.AGENT_LOST, "message": message}
    return _status(session, {**told, "conditions": [each.to_json() for each in conditions]})


def _failure(
    phase: SessionPhase | ForkPhase, reason: Reason, message: str, conditions: tuple[Condition, ...]
) -> Patch:
    words: Patch = {"phase": phase, "ready": False, "reason": reason, "message": message}
    return {**words, "conditions": [each.to_json() for each in conditions]}


def _status(written: Session | Fork, fields: Patch) -> Patch:
    return {**_version(written), "status": {**fields, "observedGeneration": written.metadata.generation}}


def _version(written: Session | Fork) -> Patch:
    return {"metadata": {"resourceVersion": written.metadata.resource_version}}


def _condition(
    kind: ConditionType, status: ConditionStatus, reason: Reason, message: str, now: datetime
) -> Condition:
    return Condition(type=kind, status=status, reason=reason, message=message, last_transition_time=now)
