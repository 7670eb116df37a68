"""Whether a Fork can be begun, from what, and what its children's place will be. Pure.

Safe to ask again after any event: the answer depends on what is, not on what happened.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from forktree.models import Fork, ForkPhase, Reason, Session, SessionPhase, SessionState
from forktree.models.fork import Branch
from forktree.models.session_template import EnvVar
from forktree_agent.control.records import ForkRecord, Lineage, SessionRecord
from forktree_agent.control.tree import Place, place_of
from forktree_agent.engine.contract import Machine, MachineId, Point, PointId

ENV_MAX = 64
"""Variables of one Session, as its definition says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveSource:
    """A session as the source, as this node knows it."""

    session: Session
    record: SessionRecord | None
    machine: Machine | None
    doomed: bool
    """It or something above it is being deleted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierSource:
    """An earlier fork as the source, as this node knows it."""

    fork: Fork
    record: ForkRecord | None
    point: Point | None
    doomed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class NoSource:
    """The API server says that there is no such object."""

    kind: str
    name: str


Source: TypeAlias = LiveSource | EarlierSource | NoSource


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """Everything holds: branch from `origin`, and hang the Fork below `above`."""

    above: Place
    origin: MachineId | PointId
    earlier: bool
    """`origin` is an instant and not a running machine."""
    lineage: Lineage
    """That of the children."""
    baseline_id: str
    seed: str | None
    """That of the session whose instant it is."""
    env: tuple[EnvVar, ...]
    """What that session was told."""


@dataclass(frozen=True, slots=True)
class Refuse:
    """It cannot be, now or later."""

    reason: Reason
    message: str


@dataclass(frozen=True, slots=True)
class Wait:
    """Not yet; a change of the source asks again."""

    reason: Reason
    message: str


def begin(fork: Fork, source: Source, node: str) -> Begin | Refuse | Wait:
    """What this `node` does with a Fork that was not begun yet."""
    match source:
        case NoSource(kind=kind, name=name):
            return _not_found(kind, name)
        case LiveSource():
            plan = _identity(fork, source.session, doomed=source.doomed) or _from_session(source, node)
        case EarlierSource():
            plan = _identity(fork, source.fork, doomed=source.doomed) or _from_fork(source)
    return (_branches(fork, plan) or plan) if isinstance(plan, Begin) else plan


def belongs_below(fork: Fork, source: Source, node: str) -> Session | Fork | None:
    """What a Fork that comes to nothing is to go with: its source, if that is on this `node` and stays."""
    above: Session | Fork
    match source:
        case NoSource():
            return None
        case LiveSource():
            above, there = source.session, source.session.spec.node_name
        case EarlierSource():
            above, there = source.fork, source.fork.status.node
    return above if there == node and _identity(fork, above, doomed=source.doomed) is None else None


def told(parent: Iterable[EnvVar], branch: Branch) -> tuple[EnvVar, ...]:
    """What a child is told: what its parent was, unless its branch says otherwise."""
    return tuple(({each.name: each for each in parent} | {each.name: each for each in branch.env}).values())


def _branches(fork: Fork, plan: Begin) -> Refuse | None:
    """What the branches ask for is allowed in this tree."""
    most = plan.lineage.limits.exec_seconds
    for index in range(fork.spec.replicas):
        branch = fork.spec.branch(index)
        if len(told(plan.env, branch)) > ENV_MAX:
            return Refuse(
                Reason.INVALID,
                f"child {index} would have more than {ENV_MAX} variables, its parent's among them",
            )
        scorer = None if fork.spec.score is None else fork.spec.score.exec
        for command in (branch.exec, scorer):
            if command is not None and most is not None and command.timeout_seconds > most:
                return Refuse(
                    Reason.INVALID,
                    f"a command of child {index} has a time-out of {command.timeout_seconds} s; the"
                    f" template's treeLimits.execSeconds allows {most}",
                )
    return None


def _not_found(kind: str, name: str) -> Refuse:
    return Refuse(Reason.SOURCE_NOT_FOUND, f"there is no {kind} {name} in this namespace")


def _identity(fork: Fork, source: Session | Fork, *, doomed: bool) -> Refuse | None:
    """The source is the one that was meant, is not going, and nobody else holds the Fork."""
    if source.metadata.namespace != fork.metadata.namespace:
        return _not_found(source.kind.lower(), source.metadata.name)
    what = f"{source.kind.lower()} {source.metadata.name}"
    asked = fork.spec.source.session or fork.spec.source.fork
    if asked is not None and asked.uid is not None and asked.uid != source.metadata.uid:
        return Refuse(
            Reason.SOURCE_GONE,
            f"{what} has uid {source.metadata.uid} and not {asked.uid}: the one that was meant is gone",
        )
    if doomed or source.metadata.deleting:
        return Refuse(Reason.SOURCE_GONE, f"{what} is being deleted")
    controller = fork.metadata.controller
    if controller is not None and controller.uid != source.metadata.uid:
        return Refuse(
            Reason.FOREIGN_OWNER,
            f"the Fork is controlled by {controller.kind} {controller.name}, but must hang below its"
            " source alone: create it without a controller",
        )
    return None


def _from_session(source: LiveSource, node: str) -> Begin | Refuse | Wait:
    session, record, machine = source.session, source.record, source.machine
    what = f"session {session.metadata.name}"
    if session.spec.node_name not in {None, node}:
        return Refuse(
            Reason.INVALID, f"{what} is on node {session.spec.node_name}, but its Fork was sent to {node}"
        )
    match session.status.phase:
        case SessionPhase.FAILED:
            return Refuse(Reason.SOURCE_FAILED, f"{what} has failed and cannot be forked")
        case SessionPhase.RELEASED:
            return Refuse(Reason.SOURCE_GONE, f"{what} was released and has no machine to fork")
        case SessionPhase.PENDING | SessionPhase.STARTING | SessionPhase.RUNNING | SessionPhase.PAUSED:
            pass
    if session.spec.state is SessionState.RELEASED:
        return Refuse(Reason.SOURCE_GONE, f"{what} is being released, as its spec.state says")
    if record is not None and record.expired is not None and record.uid == session.metadata.uid:
        return Refuse(Reason.SOURCE_GONE, f"{what} is being released: {record.expired}")
    if machine is None or record is None or record.start is None or record.uid != session.metadata.uid:
        return Wait(Reason.SOURCE_NOT_READY, f"{what} does not run yet")
    depth = record.lineage.depth + 1
    if depth > record.lineage.limits.depth:
        return Refuse(
            Reason.DEPTH_LIMIT,
            f"children of {what} would have depth {depth}; the template allows {record.lineage.limits.depth}",
        )
    return Begin(
        above=place_of(session),
        origin=machine.id,
        earlier=False,
        baseline_id=record.start.baseline_id,
        seed=session.spec.seed,
        env=session.spec.env,
        lineage=Lineage(
            root=record.lineage.root,
            parent=session.metadata.uid,
            depth=depth,
            template_uid=record.lineage.template_uid,
            limits=record.lineage.limits,
            hooks=record.lineage.hooks,
            ports=record.lineage.ports,
        ),
    )


def _from_fork(source: EarlierSource) -> Begin | Refuse | Wait:
    earlier, record = source.fork, source.record
    what = f"fork {earlier.metadata.name}"
    if earlier.status.phase is ForkPhase.FAILED:
        return Refuse(Reason.SOURCE_FAILED, f"{what} has failed and holds no instant")
    if earlier.status.parent_uid is None:
        return Wait(Reason.SOURCE_NOT_READY, f"{what} is not done yet")
    if record is None or record.result is None or source.point is None:
        return Refuse(Reason.POINT_LOST, f"the instant of {what} is not held any more")
    # Its children have the depth that this one's have: it is the same instant.
    return Begin(
        above=place_of(earlier),
        origin=source.point.id,
        earlier=True,
        lineage=record.lineage,
        baseline_id=record.baseline_id,
        seed=record.parent_seed,
        env=tuple(EnvVar.model_validate(each) for each in record.parent_env),
    )
