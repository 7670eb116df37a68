"""What the status of an object has to say. Pure: the same facts give the same status.

A status is always whole. Phases go only where the API's tables allow; conditions keep their time of
transition while they do not change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from forktree.models import (
    Condition,
    Fork,
    ForkPhase,
    ForkStatus,
    Reason,
    Session,
    SessionPhase,
    SessionStatus,
)
from forktree.models.conditions import ConditionStatus, ConditionType, replaced
from forktree.models.fork import ForkChild
from forktree.models.names import child_name
from forktree.models.reasons import fork_step, session_step
from forktree_agent.control.decide_prune import best
from forktree_agent.control.records import ForkRecord, SessionRecord

POINT_HELD = "Held"
POINT_LOST = "PointLost"
POINT_LET_GO = "NoChildren"
ALL_RUN = "AllRun"
ALL_ANSWERED = "AllAnswered"
ANSWERED = "Answered"
ALL_DONE = "AllDone"
BRANCHES_RUN = "BranchesRun"

TOLD_MOST = 8
"""Children whose troubles are told one by one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSeen:
    """What became of one child."""

    phase: SessionPhase
    recorded: bool
    """Its Session object was written, also if it is deleted since."""
    reason: Reason | None = None
    refusal: str | None = None
    """Why its Session object could not be written."""
    score: float | None = None
    """The number that counts."""
    exit_code: int | None = None
    unscored: str | None = None
    """Why one of its commands did not do what it was to."""


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
            "conditions": _conditions(
                session, now, (ConditionType.READY, ConditionStatus.FALSE, reason, message)
            ),
        }
    )


def session_runs(session: Session, node: str, record: SessionRecord, *, now: datetime) -> SessionStatus:
    """A machine that answered. `record.start` is set."""
    condition = (ConditionType.READY, ConditionStatus.TRUE, ANSWERED, "the machine has its own identity")
    return _session_lives(session, node, record).model_copy(
        update={
            "phase": session_step(session.status.phase, SessionPhase.RUNNING),
            "ready": True,
            "conditions": _conditions(session, now, condition),
        }
    )


def session_paused(session: Session, node: str, record: SessionRecord, *, now: datetime) -> SessionStatus:
    """A machine that answered and stands still. `record.start` is set."""
    message = "it stands still because spec.state is Paused"
    condition = (ConditionType.READY, ConditionStatus.FALSE, Reason.PAUSED, message)
    return _session_lives(session, node, record).model_copy(
        update={
            "phase": session_step(session.status.phase, SessionPhase.PAUSED),
            "ready": False,
            "reason": Reason.PAUSED,
            "message": message,
            "conditions": _conditions(session, now, condition),
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


def _session_lives(session: Session, node: str, record: SessionRecord) -> SessionStatus:
    """What there is to say of a machine, whether it runs or stands still."""
    start = record.start
    assert start is not None
    return SessionStatus(
        node=node,
        root=record.lineage.root,
        parent=record.lineage.parent,
        depth=record.lineage.depth,
        baseline_id=start.baseline_id,
        template_uid=record.lineage.template_uid,
        vm_generation_id=start.generation,
        seed=session.spec.seed,
        mode=start.mode,
        level=start.level,
        fork_ms=_rounded(start.fork_ms),
        total_ms=_rounded(record.total_ms),
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
                "fork_ms": _rounded(record.start.fork_ms),
                "started_at": datetime.fromisoformat(record.start.started_at),
            }
    return session.status.model_copy(
        update={
            **known,
            "phase": session_step(session.status.phase, phase),
            "ready": False,
            "reason": reason,
            "message": message,
            "node": node,
            "observed_generation": session.metadata.generation,
            "conditions": _conditions(
                session, now, (ConditionType.READY, ConditionStatus.FALSE, reason or phase, message)
            ),
        }
    )


def fork_waits(fork: Fork, reason: Reason, message: str) -> ForkStatus:
    """A fork that is not begun yet, and why."""
    return fork.status.model_copy(
        update={
            "reason": reason,
            "message": message,
            "observed_generation": fork.metadata.generation,
        }
    )


def fork_goes_on(fork: Fork) -> ForkStatus:
    """A fork that takes long enough for a person to wonder."""
    return fork.status.model_copy(
        update={
            "phase": fork_step(fork.status.phase, ForkPhase.FORKING),
            "reason": None,
            "message": None,
            "observed_generation": fork.metadata.generation,
        }
    )


def fork_fails(fork: Fork, reason: Reason, message: str, now: datetime) -> ForkStatus:
    """No child is left. Nothing that was true of it before is taken back."""
    return fork.status.model_copy(
        update={
            "phase": fork_step(fork.status.phase, ForkPhase.FAILED),
            "ready": False,
            "reason": reason,
            "message": message,
            "replicas": 0,
            "ready_replicas": 0,
            "observed_generation": fork.metadata.generation,
            "conditions": _conditions(
                fork,
                now,
                (ConditionType.FORKED, ConditionStatus.FALSE, reason, message),
                (ConditionType.READY, ConditionStatus.FALSE, reason, message),
                (ConditionType.COMPLETE, ConditionStatus.FALSE, reason, message),
                (ConditionType.POINT_AVAILABLE, ConditionStatus.FALSE, reason, message),
            ),
        }
    )


def fork_runs(
    fork: Fork,
    record: ForkRecord,
    children: Sequence[ChildSeen],
    *,
    node: str,
    point_held: bool,
    complete: bool,
    now: datetime,
) -> ForkStatus:
    """A fork whose children all ran and answered. `record.result` is set. Says what became of each since."""
    made = record.result
    assert made is not None
    first = made.children[0] if made.children else None
    # What is final stays so, also while an agent that has just started does not know yet what another did.
    complete = complete or fork.status.phase is ForkPhase.COMPLETE
    winner = _best(children, record)
    return ForkStatus(
        phase=fork_step(fork.status.phase, ForkPhase.COMPLETE if complete else ForkPhase.RUNNING),
        ready=True,
        message=_troubles(children),
        node=node,
        parent_uid=record.above,
        root=record.lineage.root,
        depth=record.lineage.depth,
        baseline_id=record.baseline_id,
        fork_point_id=made.point_id,
        point_bytes=made.point_bytes,
        replicas=len(made.children),
        ready_replicas=sum(child.phase is SessionPhase.RUNNING for child in children),
        recorded=sum(child.recorded for child in children),
        pause_ms=_rounded(made.pause_ms),
        fork_ms=_rounded(made.fork_ms),
        ready_ms=_rounded(made.ready_ms),
        total_ms=_rounded(record.total_ms),
        mode=None if first is None else first.mode,
        best=None if winner is None else _name(fork, winner[0]),
        best_score=None if winner is None else winner[1],
        children=tuple(
            ForkChild(
                index=index,
                name=_name(fork, index),
                branch=fork.spec.branch(index).name,
                phase=child.phase,
                seed=record.seeds[index] if record.seeds else None,
                exit_code=child.exit_code,
                score=child.score,
                mode=start.mode,
                level=start.level,
                reason=child.reason,
            )
            for index, (start, child) in enumerate(zip(made.children, children, strict=True))
        ),
        observed_generation=fork.metadata.generation,
        conditions=_conditions(
            fork,
            now,
            (ConditionType.FORKED, ConditionStatus.TRUE, ALL_RUN, "every child runs"),
            (ConditionType.READY, ConditionStatus.TRUE, ALL_ANSWERED, "every child has its own identity"),
            _completeness(complete=complete),
            _point(held=point_held, let_go=record.point_dropped),
        ),
    )


def fork_outlived(fork: Fork, now: datetime) -> ForkStatus:
    """A fork that was done before this node lost its memory of it: only its instant is lost."""
    return fork.status.model_copy(
        update={"ready_replicas": 0, "conditions": _conditions(fork, now, _point(held=False))}
    )


def _best(children: Sequence[ChildSeen], record: ForkRecord) -> tuple[int, float] | None:
    """Index and score of the best child. Who was lost before the verdict, or lost by it, is out for good."""
    if record.verdict is None:
        out = {index for index, child in enumerate(children) if child.phase is SessionPhase.FAILED}
    else:
        out = {*record.verdict.losers, *record.verdict.lost}
    return best(((index, child.score) for index, child in enumerate(children)), out)


def _troubles(children: Sequence[ChildSeen]) -> str | None:
    """What a person should know of single children, in one sentence that a status can hold."""
    told = [
        f"child {index} was ended: {child.refusal}"
        if child.refusal is not None
        else f"child {index}: {child.unscored}"
        for index, child in enumerate(children)
        if child.refusal is not None or child.unscored is not None
    ]
    more = f"; and {len(told) - TOLD_MOST} more" if len(told) > TOLD_MOST else ""
    return ("; ".join(told[:TOLD_MOST])[:1000] + more) or None


def _name(fork: Fork, index: int) -> str:
    return child_name(fork.metadata.name, index, fork.metadata.uid)


def _completeness(*, complete: bool) -> tuple[ConditionType, ConditionStatus, str, str]:
    kind = ConditionType.COMPLETE
    if complete:
        return kind, ConditionStatus.TRUE, ALL_DONE, "branches are done, scored and pruned"
    return kind, ConditionStatus.FALSE, BRANCHES_RUN, "commands of branches run, or children are pruned"


def _point(*, held: bool, let_go: bool = False) -> tuple[ConditionType, ConditionStatus, str, str]:
    kind = ConditionType.POINT_AVAILABLE
    if held:
        return kind, ConditionStatus.TRUE, POINT_HELD, "more children can be started"
    if let_go:
        return kind, ConditionStatus.FALSE, POINT_LET_GO, "it is not held any more, as no child of it is left"
    return kind, ConditionStatus.FALSE, POINT_LOST, "the instant is not held any more"


def _conditions(
    item: Session | Fork, now: datetime, *facts: tuple[ConditionType, ConditionStatus, str, str]
) -> tuple[Condition, ...]:
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


def _rounded(milliseconds: float | None) -> float | None:
    """To microseconds: more digits are noise of the clock, and make statuses hard to read."""
    return None if milliseconds is None else round(milliseconds, 3)
