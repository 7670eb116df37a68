"""What the status of a Session has to say. Pure: the same facts give the same status.

A status is always whole. Phases go only where the API's tables allow; conditions keep their time of
transition while they do not change.
"""

from __future__ import annotations

from datetime import datetime

from forktree.models import Condition, Fork, Reason, Session, SessionPhase, SessionStatus
from forktree.models.conditions import ConditionStatus, ConditionType, replaced
from forktree.models.reasons import session_step
from forktree_agent.control.endpoints import endpoint_of
from forktree_agent.control.records import SessionRecord

ANSWERED = "Answered"


def session_waits(
    session: Session, node: str, *, phase: SessionPhase, reason: Reason, message: str, now: datetime
) -> SessionStatus:
    """A root that is not started yet, and why."""
    return session.status.model_copy(
        update={
            "phase": session_step(session.status.phase, phase),
            "ready": False,
            "reason": reason,
            "message": message,
            "node": node,
            "root": session.metadata.uid,
            "depth": 0,
            "observed_generation": session.metadata.generation,
            "conditions": conditions_of(
                session, now, (ConditionType.READY, ConditionStatus.FALSE, reason, message)
            ),
        }
    )


def session_delayed(session: Session, *, reason: Reason, message: str, now: datetime) -> SessionStatus:
    """A child that is not said to run yet, and why."""
    return session.status.model_copy(
        update={
            "reason": reason,
            "message": message,
            "observed_generation": session.metadata.generation,
            "conditions": conditions_of(
                session, now, (ConditionType.READY, ConditionStatus.FALSE, reason, message)
            ),
        }
    )


def session_runs(
    session: Session, node: str, record: SessionRecord, *, now: datetime, origin: str = ""
) -> SessionStatus:
    """A machine that answered. `record.start` is set. `origin`: where this agent is reached."""
    condition = (ConditionType.READY, ConditionStatus.TRUE, ANSWERED, "the machine has its own identity")
    return _session_lives(session, node, record, origin).model_copy(
        update={
            "phase": session_step(session.status.phase, SessionPhase.RUNNING),
            "ready": True,
            **_network(record),
            "conditions": conditions_of(session, now, condition),
        }
    )


def _network(record: SessionRecord) -> dict[str, object]:
    """What there is to say of a way to the outside that was lost."""
    if record.network_lost is None:
        return {}
    message = f"it does not reach the outside any more, a fork of it does: passt {record.network_lost}"
    return {"reason": Reason.NETWORK_LOST, "message": message}


def session_paused(
    session: Session, node: str, record: SessionRecord, *, now: datetime, origin: str = ""
) -> SessionStatus:
    """A machine that answered and stands still. `record.start` is set. `origin`: where this agent is
    reached."""
    message = "it stands still because spec.state is Paused"
    condition = (ConditionType.READY, ConditionStatus.FALSE, Reason.PAUSED, message)
    return _session_lives(session, node, record, origin).model_copy(
        update={
            "phase": session_step(session.status.phase, SessionPhase.PAUSED),
            "ready": False,
            "reason": Reason.PAUSED,
            "message": message,
            "conditions": conditions_of(session, now, condition),
        }
    )


def session_scored(session: Session, record: SessionRecord | None) -> SessionStatus:
    """One that is over, with the number that counts now: people judge what has ended."""
    return session.status.model_copy(
        update={"score": score_of(session, record), "observed_generation": session.metadata.generation}
    )


def score_of(session: Session, record: SessionRecord | None) -> float | None:
    """The number that counts: the user's, or else the scorer's. Without a record what was told stays true."""
    if session.spec.score is not None:
        return session.spec.score
    return session.status.score if record is None else record.scored


def _session_lives(session: Session, node: str, record: SessionRecord, origin: str) -> SessionStatus:
    """What there is to say of a machine, whether it runs or stands still."""
    start = record.start
    assert start is not None
    return SessionStatus(
        node=node,
        endpoint=endpoint_of(
            origin, session.metadata.namespace or "", session.metadata.name, record.lineage.ports
        ),
        root=record.lineage.root,
        parent=record.lineage.parent,
        depth=record.lineage.depth,
        baseline_id=start.baseline_id,
        template_uid=record.lineage.template_uid,
        vm_generation_id=start.generation,
        seed=session.spec.seed,
        mode=start.mode,
        level=start.level,
        fork_ms=rounded(start.fork_ms),
        total_ms=rounded(record.total_ms),
        score=score_of(session, record),
        started_at=datetime.fromisoformat(start.started_at),
        observed_generation=session.metadata.generation,
    )


def session_fails(
    session: Session,
    node: str,
    record: SessionRecord | None,
    *,
    reason: Reason,
    message: str,
    now: datetime,
) -> SessionStatus:
    """No machine, for good. What is known of its place and start stays for whoever looks at the tree."""
    return _session_ends(
        session, node, record, phase=SessionPhase.FAILED, reason=reason, message=message, now=now
    )


def session_released(
    session: Session,
    node: str,
    record: SessionRecord | None,
    *,
    reason: Reason | None,
    message: str,
    now: datetime,
) -> SessionStatus:
    """Its machine was ended on purpose. All that is known of it stays."""
    return _session_ends(
        session, node, record, phase=SessionPhase.RELEASED, reason=reason, message=message, now=now
    )


def _session_ends(
    session: Session,
    node: str,
    record: SessionRecord | None,
    *,
    phase: SessionPhase,
    reason: Reason | None,
    message: str,
    now: datetime,
) -> SessionStatus:
    known: dict[str, object] = {"seed": session.spec.seed, "score": score_of(session, record)}
    if record is not None:
        known |= {
            "root": record.lineage.root,
            "parent": record.lineage.parent,
            "depth": record.lineage.depth,
            "template_uid": record.lineage.template_uid,
        }
        if record.start is not None:
            known |= {
                "baseline_id": record.start.baseline_id,
                "vm_generation_id": record.start.generation,
                "mode": record.start.mode,
                "level": record.start.level,
                "fork_ms": rounded(record.start.fork_ms),
                "started_at": datetime.fromisoformat(record.start.started_at),
            }
    return session.status.model_copy(
        update={
            **known,
            "endpoint": None,
            "phase": session_step(session.status.phase, phase),
            "ready": False,
            "reason": reason,
            "message": message,
            "node": node,
            "observed_generation": session.metadata.generation,
            "conditions": conditions_of(
                session, now, (ConditionType.READY, ConditionStatus.FALSE, reason or phase, message)
            ),
        }
    )


def conditions_of(
    item: Session | Fork, now: datetime, *facts: tuple[ConditionType, ConditionStatus, str, str]
) -> tuple[Condition, ...]:
    """The conditions of `item` with these facts, by type, status, reason and message, in their places."""
    conditions = item.status.conditions
    for kind, status, reason, message in facts:
        conditions = replaced(
            conditions,
            Condition(
                type=kind,
                status=status,
                reason=reason,
                message=message,
                last_transition_time=now,
                observed_generation=item.metadata.generation,
            ),
        )
    return conditions


def rounded(milliseconds: float | None) -> float | None:
    """To microseconds: more digits are noise of the clock, and make statuses hard to read."""
    return None if milliseconds is None else round(milliseconds, 3)
