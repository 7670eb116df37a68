"""What the status of a Fork has to say. Pure, and by the same rules as that of a Session (`statuses`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TypeAlias

from forktree.models import Fork, ForkPhase, ForkStatus, Reason, SessionPhase
from forktree.models.conditions import ConditionStatus, ConditionType
from forktree.models.fork import ForkChild
from forktree.models.reasons import fork_step
from forktree_agent.control.decide_prune import best
from forktree_agent.control.endpoints import endpoint_of
from forktree_agent.control.records import ForkRecord
from forktree_agent.control.statuses import conditions_of, rounded

POINT_HELD = "Held"
POINT_LOST = "PointLost"
POINT_LET_GO = "NoChildren"
ALL_RUN = "AllRun"
ALL_ANSWERED = "AllAnswered"
NOT_ALL_ANSWERED = "NotAllAnswered"
ALL_DONE = "AllDone"
BRANCHES_RUN = "BranchesRun"
DELETED = "Deleted"

Fact: TypeAlias = "tuple[ConditionType, ConditionStatus, str, str]"
"""A condition's type and status, and why in a word and in a sentence."""

UNRECORDED = "its node has lost its record of this Fork, so nothing more can be started from its instant"
LIVE = {SessionPhase.RUNNING, SessionPhase.PAUSED}
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


def fork_fails(
    fork: Fork, reason: Reason, message: str, children: Sequence[ForkChild], now: datetime
) -> ForkStatus:
    """It came to nothing, or this node knows nothing of it any more; then children may be left."""
    return fork.status.model_copy(
        update={
            "phase": fork_step(fork.status.phase, ForkPhase.FAILED),
            "ready": False,
            "reason": reason,
            "message": message,
            **_counted(children),
            "replicas": sum(child.phase in LIVE for child in children),
            "observed_generation": fork.metadata.generation,
            "conditions": conditions_of(
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
    origin: str = "",
) -> ForkStatus:
    """A fork whose children all ran and answered. `record.result` is set. Says what became of each since.

    `origin`: where this agent is reached.
    """
    made = record.result
    assert made is not None
    first = made.children[0] if made.children else None
    # What is final stays so, also while an agent that has just started does not know yet what another did.
    complete = complete or fork.status.phase is ForkPhase.COMPLETE
    winner = _best(children, record)
    return ForkStatus(
        phase=fork_step(fork.status.phase, ForkPhase.COMPLETE if complete else ForkPhase.RUNNING),
        ready=not record.unanswered,
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
        pause_ms=rounded(made.pause_ms),
        fork_ms=rounded(made.fork_ms),
        ready_ms=rounded(made.ready_ms),
        total_ms=rounded(record.total_ms),
        mode=None if first is None else first.mode,
        best=None if winner is None else record.child_name(winner[0]),
        best_score=None if winner is None else winner[1],
        children=tuple(
            ForkChild(
                index=index,
                name=record.child_name(index),
                branch=fork.spec.branch(index).name,
                phase=child.phase,
                endpoint=_endpoint(origin, record, index) if child.phase in LIVE else None,
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
        conditions=conditions_of(
            fork,
            now,
            *_answered([child.phase for child in children], record.unanswered),
            _completeness(complete=complete),
            _point(held=point_held, let_go=record.point_dropped),
        ),
    )


def _endpoint(origin: str, record: ForkRecord, index: int) -> str | None:
    return endpoint_of(origin, record.namespace, record.child_name(index), record.lineage.ports)


def fork_outlived(fork: Fork, children: Sequence[ForkChild], now: datetime) -> ForkStatus:
    """A fork that was done before this node lost its record of it: only its instant is lost."""
    return fork.status.model_copy(
        update={
            **_counted(children),
            "conditions": conditions_of(
                fork,
                now,
                *_answered([child.phase for child in children]),
                (ConditionType.POINT_AVAILABLE, ConditionStatus.FALSE, POINT_LOST, UNRECORDED),
            ),
        }
    )


def fork_ended(
    fork: Fork, children: Sequence[ForkChild], *, reason: Reason | None, message: str, now: datetime
) -> ForkStatus:
    """A fork that goes with a deletion and is still there. Its phase stays: it tells how far it came."""
    return fork.status.model_copy(
        update={
            **_counted(children),
            "ready": False,
            "reason": reason,
            "message": message,
            "observed_generation": fork.metadata.generation,
            "conditions": conditions_of(
                fork,
                now,
                (ConditionType.READY, ConditionStatus.FALSE, DELETED, message),
                (ConditionType.POINT_AVAILABLE, ConditionStatus.FALSE, DELETED, message),
            ),
        }
    )


def _counted(children: Sequence[ForkChild]) -> dict[str, object]:
    return {
        "children": tuple(children),
        "ready_replicas": sum(child.phase is SessionPhase.RUNNING for child in children),
    }


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


def _answered(children: Sequence[SessionPhase], unanswered: Sequence[int] = ()) -> tuple[Fact, Fact]:
    """Every child ran and answered once, which is never taken back, and how many of them are left.

    `unanswered`: those that ran and were ended as they did not answer.
    """
    left = sum(phase in LIVE for phase in children)
    if left == len(children):
        runs, knows = "every child runs", "every child has its own identity"
    else:
        rest = f"{left} of {len(children)} are left" if left else "none of them is left"
        runs, knows = f"every child ran, {rest}", f"every child had its own identity, {rest}"
    if unanswered:
        told = ", ".join(str(index) for index in unanswered[:TOLD_MOST])
        knows = f"{len(unanswered)} of {len(children)} children did not answer and were ended, first {told}"
        return (
            (ConditionType.FORKED, ConditionStatus.TRUE, ALL_RUN, runs),
            (ConditionType.READY, ConditionStatus.FALSE, NOT_ALL_ANSWERED, knows),
        )
    return (
        (ConditionType.FORKED, ConditionStatus.TRUE, ALL_RUN, runs),
        (ConditionType.READY, ConditionStatus.TRUE, ALL_ANSWERED, knows),
    )


def _completeness(*, complete: bool) -> Fact:
    kind = ConditionType.COMPLETE
    if complete:
        return kind, ConditionStatus.TRUE, ALL_DONE, "branches are done, scored and pruned"
    return kind, ConditionStatus.FALSE, BRANCHES_RUN, "commands of branches run, or children are pruned"


def _point(*, held: bool, let_go: bool = False) -> Fact:
    kind = ConditionType.POINT_AVAILABLE
    if held:
        return kind, ConditionStatus.TRUE, POINT_HELD, "more children can be started"
    if let_go:
        return kind, ConditionStatus.FALSE, POINT_LET_GO, "it is not held any more, as no child of it is left"
    return kind, ConditionStatus.FALSE, POINT_LOST, "the instant is not held any more"
