"""Which node a fork goes to, as a table."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from forktree.models.base import ObjectMeta, Uid
from forktree.models.conditions import Condition, ConditionStatus, ConditionType
from forktree.models.fork import Fork, ForkSource, ForkSpec, ForkStatus, SourceRef
from forktree.models.names import BORN_ON_ANNOTATION
from forktree.models.reasons import ForkPhase, Reason, SessionPhase
from forktree.models.session import Session, SessionSpec, SessionStatus, TemplateRef
from forktree_operator.decide.actions import Action, Ignore, Place, Reject, Wait
from forktree_operator.decide.agents import AgentState
from forktree_operator.decide.routing import Patience, route

CREATED = datetime(2026, 5, 1, tzinfo=UTC)
UID = "11111111-aaaa-4bbb-8ccc-000000000001"
OTHER_UID = "11111111-aaaa-4bbb-8ccc-000000000002"


def of_session(uid: str | None = None, *, status: ForkStatus | None = None, deleting: bool = False) -> Fork:
    return _fork(ForkSource(session=SourceRef(name="src", uid=uid)), status, deleting)


def of_fork(uid: str | None = None) -> Fork:
    return _fork(ForkSource(fork=SourceRef(name="src", uid=uid)), None, False)


def _fork(source: ForkSource, status: ForkStatus | None, deleting: bool) -> Fork:
    metadata = ObjectMeta(
        name="f", namespace="ns", creation_timestamp=CREATED, deletion_timestamp=CREATED if deleting else None
    )
    return Fork(metadata=metadata, spec=ForkSpec(source=source), status=status or ForkStatus())


def session(
    phase: SessionPhase, *, node: str | None = "n1", deleting: bool = False, message: str | None = None
) -> Session:
    return Session(
        metadata=_meta(deleting),
        spec=SessionSpec(template_ref=TemplateRef(name="tiny"), node_name=node),
        status=SessionStatus(phase=phase, message=message),
    )


def fork(
    phase: ForkPhase, *, node: str | None = "n1", point: ConditionStatus | None, deleting: bool = False
) -> Fork:
    conditions = () if point is None else (_point(point),)
    return Fork(
        metadata=_meta(deleting),
        spec=ForkSpec(source=ForkSource(session=SourceRef(name="root"))),
        status=ForkStatus(phase=phase, node=node, conditions=conditions, reason=_reason(phase)),
    )


def _reason(phase: ForkPhase) -> Reason | None:
    return Reason.NODE_LOST if phase is ForkPhase.FAILED else None


def _meta(deleting: bool) -> ObjectMeta:
    return ObjectMeta(
        name="src", namespace="ns", uid=Uid(UID), deletion_timestamp=CREATED if deleting else None
    )


def _point(status: ConditionStatus) -> Condition:
    return Condition(
        type=ConditionType.POINT_AVAILABLE, status=status, reason="Held", last_transition_time=CREATED
    )


def ask(
    asked: Fork,
    source: Session | Fork | None,
    *,
    agent: AgentState = AgentState.FRESH,
    after_seconds: float = 0.0,
) -> Action:
    return route(asked, source, agent, CREATED + timedelta(seconds=after_seconds), Patience())


@pytest.mark.parametrize(
    ("asked", "source", "expected"),
    [
        pytest.param(of_session(), session(SessionPhase.RUNNING), Place("n1"), id="a running session"),
        pytest.param(of_session(UID), session(SessionPhase.RUNNING), Place("n1"), id="by name and uid"),
        pytest.param(
            of_fork(),
            fork(ForkPhase.RUNNING, point=ConditionStatus.TRUE),
            Place("n1"),
            id="an earlier instant",
        ),
        pytest.param(
            of_session(),
            session(SessionPhase.STARTING),
            Place("n1"),
            id="a session that starts: its agent forks it when it runs",
        ),
        pytest.param(
            of_fork(),
            fork(ForkPhase.FORKING, point=None),
            Place("n1"),
            id="a fork under way: its agent goes on when it is done",
        ),
        pytest.param(
            of_session(OTHER_UID),
            session(SessionPhase.RUNNING),
            Reject(Reason.SOURCE_GONE, f"session src with uid {OTHER_UID} is gone; another has its name now"),
            id="another session of that name",
        ),
        pytest.param(
            of_fork(OTHER_UID),
            fork(ForkPhase.RUNNING, point=ConditionStatus.TRUE),
            Reject(Reason.SOURCE_GONE, f"fork src with uid {OTHER_UID} is gone; another has its name now"),
            id="another fork of that name",
        ),
        pytest.param(
            of_session(),
            session(SessionPhase.FAILED, message="the machine was killed"),
            Reject(Reason.SOURCE_FAILED, "session src has failed: the machine was killed"),
            id="a failed session",
        ),
        pytest.param(
            of_session(),
            session(SessionPhase.RELEASED),
            Reject(Reason.SOURCE_GONE, "session src was released and has no machine any more"),
            id="a released session",
        ),
        pytest.param(
            of_session(),
            session(SessionPhase.RUNNING, deleting=True),
            Reject(Reason.SOURCE_GONE, "session src is being deleted"),
            id="a session that is being deleted",
        ),
        pytest.param(
            of_fork(),
            fork(ForkPhase.FAILED, point=None),
            Reject(Reason.SOURCE_FAILED, "fork src has failed: NodeLost"),
            id="a failed fork",
        ),
        pytest.param(
            of_fork(),
            fork(ForkPhase.RUNNING, point=ConditionStatus.TRUE, deleting=True),
            Reject(Reason.SOURCE_GONE, "fork src is being deleted"),
            id="a fork that is being deleted",
        ),
        pytest.param(
            of_fork(),
            fork(ForkPhase.RUNNING, point=ConditionStatus.FALSE),
            Reject(Reason.POINT_LOST, "the instant of fork src is no longer held"),
            id="an instant that is gone",
        ),
    ],
)
def test_a_fork_goes_where_its_source_is_or_fails_with_a_sentence(
    asked: Fork, source: Session | Fork, expected: Action
) -> None:
    assert ask(asked, source) == expected
    assert ask(asked, source, after_seconds=1e6) == expected  # No time makes it another answer.


@pytest.mark.parametrize(
    ("asked", "source", "agent", "sentence"),
    [
        pytest.param(
            of_session(),
            session(SessionPhase.PENDING, node=None),
            AgentState.FRESH,
            "session src has no node yet",
            id="no node",
        ),
        pytest.param(
            of_fork(),
            fork(ForkPhase.PENDING, point=None, node=None),
            AgentState.FRESH,
            "fork src has no node yet",
            id="fork without a node",
        ),
        pytest.param(
            of_session(),
            session(SessionPhase.RUNNING),
            AgentState.LOST,
            "the agent of node n1, where session src runs, does not answer",
            id="agent lost",
        ),
    ],
)
def test_a_source_that_is_not_ready_is_waited_for_up_to_a_limit(
    asked: Fork, source: Session | Fork, agent: AgentState, sentence: str
) -> None:
    assert ask(asked, source, agent=agent) == Wait(Reason.SOURCE_NOT_READY, sentence, 0.25)
    assert ask(asked, source, agent=agent, after_seconds=8) == Wait(Reason.SOURCE_NOT_READY, sentence, 4.0)
    assert ask(asked, source, agent=agent, after_seconds=299) == Wait(Reason.SOURCE_NOT_READY, sentence, 1.0)
    assert ask(asked, source, agent=agent, after_seconds=300) == Reject(
        Reason.DEADLINE_EXCEEDED, f"waited 300 s for the source: {sentence}"
    )


@pytest.mark.parametrize(
    ("agent", "after_seconds", "expected"),
    [
        (AgentState.FRESH, 0.0, Wait(again_seconds=10.0)),
        (AgentState.STALE, 200.0, Wait(again_seconds=10.0)),
        (AgentState.LOST, 0.0, Place("n7")),
        (AgentState.FRESH, 301.0, Place("n7")),
    ],
)
def test_a_fork_whose_machines_were_there_first_is_left_to_its_agent_as_long_as_that_can_say_so(
    agent: AgentState, after_seconds: float, expected: Action
) -> None:
    asked = of_session()
    born = asked.metadata.model_copy(update={"annotations": {BORN_ON_ANNOTATION: "n7"}})
    early = asked.model_copy(update={"metadata": born})
    assert ask(early, None, agent=agent, after_seconds=after_seconds) == expected


def test_a_short_silence_of_the_agent_holds_nothing_up() -> None:
    assert ask(of_session(), session(SessionPhase.RUNNING), agent=AgentState.STALE) == Place("n1")


@pytest.mark.parametrize(("asked", "kind"), [(of_session(), "session"), (of_fork(), "fork")])
def test_a_source_without_an_object_gets_a_grace_and_nothing_is_written(asked: Fork, kind: str) -> None:
    assert ask(asked, None) == Wait(again_seconds=0.25)
    assert ask(asked, None, after_seconds=9.5) == Wait(again_seconds=0.5)
    assert ask(asked, None, after_seconds=10) == Reject(
        Reason.SOURCE_NOT_FOUND, f"there is no {kind} named src in this namespace"
    )


@pytest.mark.parametrize(
    "settled",
    [
        pytest.param(of_session(status=ForkStatus(node="n2")), id="routed"),
        pytest.param(of_session(status=ForkStatus(phase=ForkPhase.FAILED)), id="failed"),
        pytest.param(of_session(deleting=True), id="being deleted"),
    ],
)
def test_what_is_settled_is_left_alone(settled: Fork) -> None:
    for source in (None, session(SessionPhase.RUNNING), session(SessionPhase.FAILED)):
        assert ask(settled, source, after_seconds=1000) == Ignore()
