"""What a Fork is made from, as this node and the API server know it."""

from __future__ import annotations

from forktree.kube.errors import NotFound
from forktree.models import Fork, Session
from forktree_agent.control.decide_fork import EarlierSource, LiveSource, NoSource, Source
from forktree_agent.control.owners import owner_of
from forktree_agent.control.records import ForkRecord
from forktree_agent.control.waiting import SourceName
from forktree_agent.control.world import World


def source_name(fork: Fork) -> SourceName:
    """The name by which `fork` asks for its source."""
    wanted = fork.spec.source
    kind, reference = ("Session", wanted.session) if wanted.session is not None else ("Fork", wanted.fork)
    assert reference is not None
    return SourceName(kind=kind, namespace=fork.metadata.namespace or "", name=reference.name)


async def source_of(world: World, fork: Fork) -> Source:
    """The source of `fork`; the API server is asked where this node does not know it. Raises `KubeError`."""
    wanted = source_name(fork)
    if wanted.kind == "Session":
        session = world.sessions.named(wanted.namespace, wanted.name)
        if session is None:
            try:
                session = await world.client.get(Session, wanted.namespace, wanted.name)
            except NotFound:
                return NoSource(kind="session", name=wanted.name)
        owner = owner_of(session)
        return LiveSource(
            session=session,
            record=world.records.session(owner),
            machine=world.machine(owner),
            doomed=world.tree.doomed(session.metadata.uid),
        )
    earlier = world.forks.named(wanted.namespace, wanted.name)
    if earlier is None:
        try:
            earlier = await world.client.get(Fork, wanted.namespace, wanted.name)
        except NotFound:
            return NoSource(kind="fork", name=wanted.name)
    record = world.records.fork(earlier.metadata.uid)
    point = None
    if record is not None and record.result is not None:
        held = record.result.point_id
        point = next((each for each in world.engine.points() if each.id == held), None)
    return EarlierSource(
        fork=earlier, record=record, point=point, doomed=world.tree.doomed(earlier.metadata.uid)
    )


def above_of(world: World, record: ForkRecord) -> Session | Fork | None:
    """The object that a begun fork hangs below, as last seen."""
    if record.above_kind == "Session":
        return world.sessions.get(record.above)
    return world.forks.get(record.above)


async def source_lives(world: World, record: ForkRecord) -> bool:
    """Whether what was forked is still there. Raises `KubeError` while that is not known."""
    if world.tree.doomed(record.above):
        return False
    known = above_of(world, record)
    if known is not None:
        return not known.metadata.deleting
    kind = Session if record.above_kind == "Session" else Fork
    try:
        found: Session | Fork = await world.client.get(kind, record.namespace, record.above_name)
    except NotFound:
        return False
    if found.metadata.uid != record.above or found.metadata.deleting:
        return False
    world.observed(found)
    return True
