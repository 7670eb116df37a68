"""Objects and records that tests of control's decisions are made of."""

from __future__ import annotations

from datetime import UTC, datetime

from forktree.models import (
    Fork,
    ForkSpec,
    ForkStatus,
    Level,
    Mode,
    ObjectMeta,
    OwnerReference,
    Session,
    SessionSpec,
    SessionStatus,
    Uid,
)
from forktree.models.fork import ForkSource, SourceRef
from forktree.models.session import ForkRef, TemplateRef
from forktree_agent.control.owners import child_owner, owner_of, root_owner
from forktree_agent.control.records import ForkMade, ForkRecord, Limits, Lineage, SessionRecord, Start
from forktree_agent.engine.contract import BaselineId, Machine, MachineId, Owner, Point, PointId, TreeId

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
NODE = "here"
ROOT = Uid("root-uid")
FORK = Uid("fork-uid")
CHILD = Uid("child-uid")
LIMITS = Limits(depth=2, memory_bytes=None)


def metadata(
    name: str, uid: Uid, *, deleting: bool = False, owners: tuple[OwnerReference, ...] = ()
) -> ObjectMeta:
    return ObjectMeta(
        name=name,
        namespace="ns",
        uid=uid,
        resource_version="1",
        generation=1,
        owner_references=owners,
        deletion_timestamp=NOW if deleting else None,
    )


def root(
    status: SessionStatus | None = None, *, uid: Uid = ROOT, deleting: bool = False, node: str | None = NODE
) -> Session:
    return Session(
        metadata=metadata("root", uid, deleting=deleting),
        spec=SessionSpec(template_ref=TemplateRef(name="tiny"), node_name=node),
        status=status or SessionStatus(),
    )


def child(status: SessionStatus | None = None, *, uid: Uid = CHILD, index: int = 0) -> Session:
    return Session(
        metadata=metadata(f"split-{index}", uid, owners=(fork().owner_reference(),)),
        spec=SessionSpec(fork_ref=ForkRef(name="split", uid=FORK, index=index), node_name=NODE),
        status=status or SessionStatus(),
    )


def fork(
    status: ForkStatus | None = None,
    *,
    uid: Uid = FORK,
    asked_uid: Uid | None = None,
    from_fork: bool = False,
    owners: tuple[OwnerReference, ...] = (),
    deleting: bool = False,
) -> Fork:
    reference = SourceRef(name="earlier" if from_fork else "root", uid=asked_uid)
    source = ForkSource(fork=reference) if from_fork else ForkSource(session=reference)
    return Fork(
        metadata=metadata("split", uid, owners=owners, deleting=deleting),
        spec=ForkSpec(source=source, replicas=2),
        status=status or ForkStatus(),
    )


def machine(owner: Owner) -> Machine:
    return Machine(
        id=MachineId("m1"),
        owner=owner,
        tree=TreeId(ROOT),
        baseline=BaselineId("baseline"),
        generation="generation",
        mode=Mode.FORK,
        level=Level.MEMORY,
    )


def start() -> Start:
    return Start(
        baseline_id="baseline",
        generation="generation",
        mode=Mode.FORK,
        level=Level.MEMORY,
        fork_ms=4.0,
        started_at=NOW.isoformat(),
    )


def lineage(depth: int = 0) -> Lineage:
    return Lineage(
        root=ROOT,
        parent=None if depth == 0 else ROOT,
        depth=depth,
        template_uid=Uid("template-uid"),
        limits=LIMITS,
    )


def root_record(
    *, started: bool = True, depth: int = 0, lost: str | None = None, expired: str | None = None
) -> SessionRecord:
    return SessionRecord(
        owner=root_owner(ROOT),
        uid=ROOT,
        namespace="ns",
        name="root",
        lineage=lineage(depth),
        start=start() if started else None,
        seen_at=1.0,
        lost=lost,
        expired=expired,
    )


def child_record(
    *, uid: Uid | None = CHILD, index: int = 0, lost: str | None = None, ended: bool = False
) -> SessionRecord:
    return SessionRecord(
        owner=child_owner(FORK, index),
        uid=uid,
        namespace="ns",
        name=f"split-{index}",
        lineage=lineage(1),
        start=start(),
        seen_at=1.0,
        lost=lost,
        ended=ended,
    )


def fork_record(*, made: bool = True, children: int = 2, uid: Uid = FORK) -> ForkRecord:
    result = ForkMade(
        point_id="p1",
        point_bytes=4096,
        children=tuple(start() for _ in range(children)),
        pause_ms=2.0,
        fork_ms=4.0,
        ready_ms=9.0,
    )
    return ForkRecord(
        uid=uid,
        namespace="ns",
        name="split",
        above=ROOT,
        above_kind="Session",
        above_name="root",
        lineage=lineage(1),
        baseline_id="baseline",
        seen_at=1.0,
        result=result if made else None,
        total_ms=12.3456,
    )


def point() -> Point:
    return Point(id=PointId("p1"), owner=Owner(f"fork/{FORK}"), tree=TreeId(ROOT), bytes=4096)


def machine_of(session: Session) -> Machine:
    return machine(owner_of(session))
