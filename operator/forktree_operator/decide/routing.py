"""On which node a fork runs: where its source is, even while that is not ready yet.

The operator does not watch sessions that are placed; the node's agent does, and forks in the moment in which
the source runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from forktree.models.conditions import ConditionStatus, ConditionType, find
from forktree.models.fork import Fork, ForkSource, SourceRef
from forktree.models.names import BORN_ON_ANNOTATION
from forktree.models.reasons import ForkPhase, Reason, SessionPhase
from forktree.models.session import Session
from forktree_operator.decide.actions import Action, Ignore, Place, Reject, Wait
from forktree_operator.decide.agents import AgentState

AGAIN_SECONDS = 10.0
"""Until it is asked again whether the agent that made a fork is lost. Usually that has written by then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long a fork waits for its source, counted from the fork's creation by the API server's clock.

    For a source that is there but has no node it waits as long as its own `spec.timeoutSeconds` says.
    """

    source_exists_seconds: float = 10.0
    """For the source's object to appear: a manifest may name the fork before its source."""


def route(
    fork: Fork, source: Session | Fork | None, agent: AgentState, now: datetime, patience: Patience
) -> Action:
    """Which node takes `fork`. Safe to ask again after any lost or doubled event.

    `source` is the object of the name that the fork gives, and `agent` the state of the agent where that
    runs; of a fork that says itself on which node it was made, that node's, and no source is needed. `now`
    and the creation time come from two clocks, so they are compared with seconds in mind.
    """
    if fork.status.node or fork.metadata.deleting or fork.status.phase.terminal:
        return Ignore()
    waited_seconds = _age_seconds(fork, now)
    born_on = fork.metadata.annotations.get(BORN_ON_ANNOTATION)
    if born_on is not None:
        # Its machines were there before it, and its agent says so itself, unless that died before it could.
        overdue = agent is AgentState.LOST or waited_seconds > fork.spec.timeout_seconds
        return Place(born_on) if overdue else Wait(again_seconds=AGAIN_SECONDS)
    source_ref = wanted(fork)
    kind, name, uid = source_ref.word, source_ref.name, source_ref.uid
    if source is None:
        left_seconds = patience.source_exists_seconds - waited_seconds
        if left_seconds > 0:
            return Wait(again_seconds=min(left_seconds, _next_look_seconds(waited_seconds)))
        return Reject(Reason.SOURCE_NOT_FOUND, f"there is no {kind} named {name} in this namespace")
    if uid and uid != source.metadata.uid:
        return Reject(Reason.SOURCE_GONE, f"{kind} {name} with uid {uid} is gone; another has its name now")
    if source.metadata.deleting:
        return Reject(Reason.SOURCE_GONE, f"{kind} {name} is being deleted")
    found = _session_as_source(source) if isinstance(source, Session) else _fork_as_source(source)
    if isinstance(found, Place) and agent is AgentState.LOST:
        # A fork handed to an agent that is away would stand there without a word until that is back.
        found = _not_ready(f"the agent of node {found.node}, where {kind} {name} runs, does not answer")
    if not isinstance(found, Wait):
        return found
    left_seconds = fork.spec.timeout_seconds - waited_seconds
    if left_seconds <= 0:
        limit = f"{fork.spec.timeout_seconds} s"
        return Reject(Reason.DEADLINE_EXCEEDED, f"waited {limit} for the source: {found.message}")
    return Wait(found.reason, found.message, min(left_seconds, _next_look_seconds(waited_seconds)))


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a fork says about its source."""

    kind: type[Session] | type[Fork]
    name: str
    uid: str | None

    @property
    def word(self) -> str:
        """The kind, for a sentence."""
        return "session" if self.kind is Session else "fork"


def wanted(fork: Fork) -> Wanted:
    """What `fork` names as its source."""
    match fork.spec.source:
        case ForkSource(session=SourceRef() as ref):
            return Wanted(Session, ref.name, ref.uid)
        case ForkSource(fork=SourceRef() as ref):
            return Wanted(Fork, ref.name, ref.uid)
        case _:
            raise AssertionError("the model lets no fork pass without a source")


def _session_as_source(source: Session) -> Place | Reject | Wait:
    name = source.metadata.name
    match source.status.phase:
        case SessionPhase.FAILED:
            return Reject(Reason.SOURCE_FAILED, f"session {name} has failed{_why(source)}")
        case SessionPhase.RELEASED:
            return Reject(Reason.SOURCE_GONE, f"session {name} was released and has no machine any more")
        case _ if source.spec.node_name:
            return Place(source.spec.node_name)
        case _:
            return _not_ready(f"session {name} has no node yet")


def _fork_as_source(source: Fork) -> Place | Reject | Wait:
    name = source.metadata.name
    match source.status.phase:
        case ForkPhase.FAILED:
            return Reject(Reason.SOURCE_FAILED, f"fork {name} has failed{_why(source)}")
        case _ if source.status.node:
            held = find(source.status.conditions, ConditionType.POINT_AVAILABLE)
            if held is not None and held.status is ConditionStatus.FALSE:
                return Reject(Reason.POINT_LOST, f"the instant of fork {name} is no longer held")
            return Place(source.status.node)
        case _:
            return _not_ready(f"fork {name} has no node yet")


def _not_ready(message: str) -> Wait:
    return Wait(Reason.SOURCE_NOT_READY, message)


def _why(source: Session | Fork) -> str:
    detail = source.status.message or source.status.reason
    return f": {detail}" if detail else ""


def _age_seconds(fork: Fork, now: datetime) -> float:
    created = fork.metadata.creation_timestamp
    return max(0.0, (now - created).total_seconds()) if created else 0.0


def _next_look_seconds(waited_seconds: float) -> float:
    """Half of what was waited already: a fork whose source is about to be placed is not held up, and one that
    waits for minutes costs little."""
    return min(10.0, max(0.25, waited_seconds / 2))
