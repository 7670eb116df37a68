"""Where a root session goes, as a table."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from forktree.models.base import ObjectMeta, Uid
from forktree.models.reasons import BakePhase, Reason, SessionPhase
from forktree.models.session import ForkRef, Session, SessionSpec, SessionStatus, TemplateRef
from forktree.models.session_template import (
    BakedNode,
    Egress,
    Machine,
    Network,
    SessionTemplate,
    SessionTemplateSpec,
    SessionTemplateStatus,
)
from forktree_agent.engine.microvm.admission import machine_bytes
from forktree_operator.decide.actions import Action, Ignore, Place, Wait
from forktree_operator.decide.placement import NodeRoom, needed, place

MIB = 1 << 20
TEMPLATE = "uid-of-tiny"
NOW = datetime(2026, 5, 1, tzinfo=UTC)


def session(
    *, node: str | None = None, phase: SessionPhase = SessionPhase.PENDING, deleting: bool = False
) -> Session:
    return Session(
        metadata=ObjectMeta(
            name="s", namespace="ns", uid=Uid("u"), deletion_timestamp=NOW if deleting else None
        ),
        spec=SessionSpec(template_ref=TemplateRef(name="tiny"), node_name=node),
        status=SessionStatus(phase=phase),
    )


def child() -> Session:
    return Session(
        metadata=ObjectMeta(name="c", namespace="ns", uid=Uid("u")),
        spec=SessionSpec(fork_ref=ForkRef(name="f", uid="0f0f", index=0)),
    )


def template(memory: str = "512Mi", *, egress: Egress = Egress.NONE, **bakes: BakePhase) -> SessionTemplate:
    return SessionTemplate(
        metadata=ObjectMeta(name="tiny", namespace="ns", uid=Uid(TEMPLATE)),
        spec=SessionTemplateSpec(
            image="builtin:tiny", machine=Machine(memory=memory), network=Network(egress=egress)
        ),
        status=SessionTemplateStatus(nodes=tuple(BakedNode(node=n, phase=p) for n, p in bakes.items())),
    )


def room(name: str, free_mib: float, *, usable: bool = True, expects: str = "") -> NodeRoom:
    promised = frozenset({Uid(expects)}) if expects else frozenset[Uid]()
    return NodeRoom(name=name, usable=usable, free_bytes=int(free_mib * MIB), promised=promised)


def no_room(what: str, needed_mib: int, node: str, free_mib: int) -> Wait:
    return Wait(
        Reason.UNSCHEDULED,
        f"no node has room: {what} takes {needed_mib} MiB, and node {node}, which comes closest, has "
        f"{free_mib} MiB free",
    )


MACHINE = "a machine of 512 MiB"
FIRST = "a machine of 512 MiB and the baseline of its template"
BAKED = template(a=BakePhase.READY, b=BakePhase.READY)


@pytest.mark.parametrize(
    ("made_from", "nodes", "expected"),
    [
        pytest.param(BAKED, [room("a", 700), room("b", 900)], Place("b"), id="most room"),
        pytest.param(BAKED, [room("b", 900), room("a", 900)], Place("a"), id="equal room goes by name"),
        pytest.param(BAKED, [room("a", 608), room("b", 607.9)], Place("a"), id="just fits"),
        pytest.param(
            template(a=BakePhase.READY), [room("a", 700), room("b", 1900)], Place("a"), id="baked beats room"
        ),
        pytest.param(
            template(a=BakePhase.READY), [room("a", 607), room("b", 1120)], Place("b"), id="baked but full"
        ),
        pytest.param(
            template(), [room("a", 1120), room("b", 1119)], Place("a"), id="the first brings the baseline"
        ),
        pytest.param(
            template(), [room("a", 608, expects=TEMPLATE)], Place("a"), id="unless that is promised already"
        ),
        pytest.param(
            template(a=BakePhase.BAKING), [room("a", 608)], Place("a"), id="or being made and so counted"
        ),
        pytest.param(
            template(a=BakePhase.BAKING, b=BakePhase.FAILED),
            [room("a", 700), room("b", 900)],
            Place("a"),
            id="a failed bake comes last",
        ),
        pytest.param(
            template(a=BakePhase.FAILED), [room("a", 700)], Place("a"), id="even a failed bake, if alone"
        ),
        pytest.param(
            BAKED, [room("a", 900, usable=False), room("b", 700)], Place("b"), id="unusable has no room"
        ),
        pytest.param(BAKED, [room("a", 128), room("b", 64.5)], no_room(MACHINE, 608, "a", 128), id="no room"),
        pytest.param(
            template(a=BakePhase.READY),
            [room("a", 600), room("b", 700)],
            no_room(MACHINE, 608, "a", 600),
            id="closest is who lacks least, not who has most",
        ),
        pytest.param(template(), [room("a", 1000)], no_room(FIRST, 1120, "a", 1000), id="no room to bake"),
        pytest.param(
            template(memory="512.5Mi", a=BakePhase.READY),
            [room("a", 608.4)],
            no_room("a machine of 513 MiB", 609, "a", 608),
            id="rounding never contradicts itself",
        ),
        pytest.param(
            BAKED, [room("a", -64)], no_room(MACHINE, 608, "a", 0), id="promised more than there is"
        ),
        pytest.param(BAKED, [], Wait(Reason.UNSCHEDULED, "no ready node"), id="no node"),
        pytest.param(
            BAKED,
            [room("a", 900, usable=False)],
            Wait(Reason.UNSCHEDULED, "no ready node"),
            id="none usable",
        ),
        pytest.param(
            None,
            [room("a", 900)],
            Wait(Reason.TEMPLATE_NOT_FOUND, "there is no session template named tiny in this namespace"),
            id="no template yet",
        ),
    ],
)
def test_a_root_goes_where_there_is_room(
    made_from: SessionTemplate | None, nodes: list[NodeRoom], expected: Action
) -> None:
    assert place(session(), made_from, nodes) == expected


def test_no_agent_counts_more_for_a_machine_than_placement_does() -> None:
    assert needed(template(memory="512Mi")) >= machine_bytes(512 * MIB, egress=False)
    assert needed(template(memory="512Mi", egress=Egress.OPEN)) >= machine_bytes(512 * MIB, egress=True)


@pytest.mark.parametrize(
    "settled",
    [
        pytest.param(session(node="b"), id="placed"),
        pytest.param(session(phase=SessionPhase.FAILED), id="failed"),
        pytest.param(session(phase=SessionPhase.RELEASED), id="released"),
        pytest.param(session(deleting=True), id="being deleted"),
        pytest.param(child(), id="a child is its agent's"),
    ],
)
def test_what_is_settled_is_left_alone(settled: Session) -> None:
    assert place(settled, template(), [room("a", 900)]) == Ignore()
    assert place(settled, None, []) == Ignore()
