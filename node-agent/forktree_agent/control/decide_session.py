"""What to do for a Session, from what is. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from forktree.models import Reason, Session, SessionPhase, SessionState
from forktree_agent.control.records import ForkRecord, SessionRecord
from forktree_agent.control.statuses import score_of
from forktree_agent.engine.contract import Machine

DOOMED_GRACE_SECONDS = 30.0
"""What hangs below a deleted object is deleted by the garbage collector, so nothing is written to it. If it
is still there after this, it must not go on saying that it is ready."""
HELD_GRACE_SECONDS = 2.0
"""The same where somebody's finalizer holds a deleted object: that can take any time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A session as this node knows it."""

    session: Session
    machine: Machine | None
    record: SessionRecord | None
    fork: ForkRecord | None = None
    """For a child: the record of the fork that made it."""
    doomed_seconds: float | None = None
    """Since when it or something above it is deleted; None: it lives."""
    held: bool = False
    """Somebody's finalizer keeps what is deleted there."""


@dataclass(frozen=True, slots=True)
class Nothing:
    """All is as it should be, or not ours to change."""


@dataclass(frozen=True, slots=True)
class Look:
    """Nothing now; look again after `seconds`."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Start:
    """A root without a machine: start one."""


@dataclass(frozen=True, slots=True)
class Bind:
    """The object of a child whose machine runs: note that it is recorded."""


@dataclass(frozen=True, slots=True)
class ShowRunning:
    """The machine answers: say so."""


@dataclass(frozen=True, slots=True)
class Pause:
    """The machine runs and is to stand still."""


@dataclass(frozen=True, slots=True)
class Resume:
    """The machine stands still and is to go on."""


@dataclass(frozen=True, slots=True)
class ShowPaused:
    """The machine stands still: say so."""


@dataclass(frozen=True, slots=True)
class ShowScore:
    """It is over, and its user judges it anew."""


@dataclass(frozen=True, slots=True)
class ShowFailed:
    """There is no machine and will be none."""

    reason: Reason
    message: str


@dataclass(frozen=True, slots=True)
class ShowDeleted:
    """It is deleted and its machine ended, and its object is still there."""


@dataclass(frozen=True, slots=True)
class Release:
    """It is over on purpose: its machine is ended, and its place in the tree stays."""

    reason: Reason | None
    message: str


@dataclass(frozen=True, slots=True)
class EndMachine:
    """The session is over, and its machine still runs."""


Action: TypeAlias = (
    Nothing
    | Look
    | Start
    | Bind
    | ShowRunning
    | Pause
    | Resume
    | ShowPaused
    | ShowScore
    | ShowFailed
    | ShowDeleted
    | Release
    | EndMachine
)


def grace_left(doomed_seconds: float, *, held: bool) -> float:
    """For how many seconds more nothing is written to what goes with a deletion."""
    return max(0.0, (HELD_GRACE_SECONDS if held else DOOMED_GRACE_SECONDS) - doomed_seconds)


def decide(view: View) -> Action:
    """The one next step. Safe to ask again after any lost, doubled or late event."""
    session, record = view.session, view.record
    if session.metadata.deleting:
        return _deleted(view)
    if session.status.phase.terminal:
        # Also where the operator said so: a final phase fences this agent.
        return _over(view)
    if view.doomed_seconds is not None:
        return _doomed(view.doomed_seconds, held=view.held)
    if record is not None and record.ended:
        return ShowFailed(Reason.MACHINE_LOST, record.lost or "its machine was ended")
    if record is not None and record.uid != session.metadata.uid:
        return ShowFailed(Reason.INVALID, "this child of its fork is another Session already")
    if record is not None and record.expired is not None:
        return Release(Reason.EXPIRED, record.expired)
    if _released(view):
        return Release(None, "its machine was ended because spec.state is Released")
    if view.machine is not None:
        return _running(view)
    return _without_machine(view)


def _over(view: View) -> Action:
    if view.machine is not None and _ours(view):
        return EndMachine()
    if score_of(view.session, view.record if _ours(view) else None) != view.session.status.score:
        return ShowScore()
    return Nothing()


def _released(view: View) -> bool:
    """Its user asked for its end before it ended by itself. A child is bound first: that tells its place."""
    if view.session.spec.state is not SessionState.RELEASED:
        return False
    return view.session.spec.is_root if view.record is None else view.record.lost is None


def _ours(view: View) -> bool:
    return view.record is None or view.record.uid == view.session.metadata.uid


def _deleted(view: View) -> Action:
    """Its machine is ended where the deletion is seen, with all below it. Usually the object goes then."""
    if view.session.status.phase.terminal:
        return Nothing()
    if view.machine is not None and _ours(view):
        return Look(HELD_GRACE_SECONDS)
    left = grace_left(view.doomed_seconds or 0.0, held=view.held)
    return Look(left) if left else ShowDeleted()


def _doomed(seconds: float, *, held: bool) -> Action:
    left = grace_left(seconds, held=held)
    if left:
        return Look(left)
    return ShowFailed(Reason.PARENT_LOST, "something above it was deleted, and its machine with it")


def _running(view: View) -> Action:
    if view.record is not None and view.record.start is not None:
        return _started(view)
    if view.session.spec.template_ref is not None:
        return Start()  # An agent died before it noted the machine. Starting takes over what is there.
    return _bind(view)


def _started(view: View) -> Action:
    assert view.machine is not None
    if view.session.spec.state is SessionState.PAUSED:
        return ShowPaused() if view.machine.paused else Pause()
    return Resume() if view.machine.paused else ShowRunning()


def _bind(view: View) -> Action:
    reference = view.session.spec.fork_ref
    if (
        reference is not None
        and view.fork is not None
        and view.fork.result is not None
        and reference.index < len(view.fork.result.children)
    ):
        return Bind()
    return ShowFailed(Reason.MACHINE_LOST, "this node knows of no fork that made it")


def _without_machine(view: View) -> Action:
    session, record = view.session, view.record
    if session.spec.fork_ref is not None and record is None:
        return _bind(view)  # It died before its object was there. Bound, it can say how.
    started = session.status.phase in {SessionPhase.RUNNING, SessionPhase.PAUSED} or (
        record is not None and (record.start is not None or record.lost is not None)
    )
    if session.spec.template_ref is not None and not started:
        return Start()
    how = None if record is None else record.lost
    return ShowFailed(
        Reason.MACHINE_LOST,
        f"its machine ended by itself: {how}" if how else "its machine is not on its node any more",
    )
