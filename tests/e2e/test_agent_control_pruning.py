"""Deleting any node of a tree ends what is below it, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from e2e.control_rig import ControlRig
from e2e.late_client import late_agent
from forktree.kube.errors import NotFound
from forktree.models import Fork, ForkPhase, Reason, Session, SessionPhase
from forktree.models.conditions import ConditionType, holds
from forktree_agent.control.owners import owner_of
from forktree_agent.engine.contract import Machine, MachineId, Owner
from forktree_dev.control_plane import ControlPlane


@pytest.fixture
async def rig(control_plane: ControlPlane, namespace: str, tmp_path: Path) -> AsyncIterator[ControlRig]:
    async with ControlRig.running(control_plane, namespace, tmp_path) as rig:
        yield rig


async def tree(rig: ControlRig) -> tuple[Session, list[Session], list[Session]]:
    """A root, two children, and a child of the first: four machines, two instants, and the baseline."""
    root = await rig.running_session("root")
    children = await rig.forked("upper", session="root", replicas=2)
    below = await rig.forked("lower", session=children[0].metadata.name)
    assert len(rig.host.machines) == 4
    assert len(rig.host.points) == 3
    return root, children, below


async def test_deleting_the_root_ends_all_machines_and_objects(rig: ControlRig) -> None:
    _, children, below = await tree(rig)
    await rig.delete(Session, "root")
    await rig.machines(0)
    for session in (*children, *below):
        await rig.gone(Session, session.metadata.name)
    for fork in ("upper", "lower"):
        await rig.gone(Fork, fork)
    await rig.eventually(lambda: len(rig.host.points) == 1, lambda: rig.host.points)
    assert rig.control is not None
    world = rig.control.world
    await rig.eventually(lambda: not world.tree.nodes(), world.tree.nodes)
    assert not world.records.sessions()
    assert not world.records.forks()


async def test_foreground_deletion_ends_machines_before_any_object_goes(rig: ControlRig) -> None:
    await tree(rig)
    await rig.user.merge_patch(
        Session, rig.namespace, "root", {"metadata": {"finalizers": ["example.com/hold"]}}
    )
    await rig.delete(Session, "root", "Foreground")
    await rig.machines(0)
    assert (await rig.get(Session, "root")).metadata.deleting
    await rig.user.merge_patch(Session, rig.namespace, "root", {"metadata": {"finalizers": None}})
    await rig.gone(Session, "root")


HOLD = {"metadata": {"finalizers": ["example.com/hold"]}}
LET_GO = {"metadata": {"finalizers": None}}


async def test_what_a_finalizer_keeps_after_its_deletion_does_not_claim_to_be_ready(rig: ControlRig) -> None:
    _, children, _ = await tree(rig)
    await rig.user.merge_patch(Session, rig.namespace, "root", HOLD)
    await rig.delete(Session, "root")
    await rig.machines(0)
    held = await rig.until(Session, "root", lambda each: not each.status.ready)
    assert held.status.phase is SessionPhase.RELEASED
    assert "deleted" in (held.status.message or "")
    assert not holds(held.status.conditions, ConditionType.READY)
    # The garbage collector leaves alone what is below until it is really gone.
    for each in children:
        below = await rig.until(Session, each.metadata.name, lambda child: not child.status.ready)
        assert below.status.reason is Reason.PARENT_LOST
    for name in ("upper", "lower"):
        fork = await rig.until(Fork, name, lambda each: not each.status.ready)
        assert (fork.status.phase, fork.status.ready_replicas) == (ForkPhase.COMPLETE, 0)
        assert not holds(fork.status.conditions, ConditionType.POINT_AVAILABLE)
    await rig.user.merge_patch(Session, rig.namespace, "root", LET_GO)
    await rig.gone(Fork, "lower")


async def test_a_deleted_fork_that_a_finalizer_keeps_claims_no_instant_and_no_child(rig: ControlRig) -> None:
    await rig.running_session("root")
    await rig.forked("split", session="root", replicas=2)
    await rig.user.merge_patch(Fork, rig.namespace, "split", HOLD)
    await rig.delete(Fork, "split")
    await rig.machines(1)
    fork = await rig.until(Fork, "split", lambda each: not each.status.ready)
    assert fork.status.ready_replicas == 0
    assert "deleted" in (fork.status.message or "")
    assert not holds(fork.status.conditions, ConditionType.POINT_AVAILABLE)
    assert {each.phase for each in fork.status.children} == {SessionPhase.RELEASED}
    assert (await rig.get(Session, "root")).status.ready
    await rig.user.merge_patch(Fork, rig.namespace, "split", LET_GO)
    await rig.gone(Fork, "split")


async def test_deleting_a_fork_ends_its_children_and_spares_the_rest(rig: ControlRig) -> None:
    root, (first, _), _ = await tree(rig)
    await rig.delete(Fork, "upper")
    await rig.machines(1)
    await rig.gone(Session, first.metadata.name)
    assert [each.owner for each in rig.host.machines.values()] == [owner_of(root)]
    assert (await rig.get(Session, "root")).status.ready


async def test_a_deleted_child_is_not_replaced(rig: ControlRig) -> None:
    await rig.running_session("root")
    first, second = await rig.forked("split", session="root", replicas=2)
    await rig.delete(Session, first.metadata.name)
    await rig.machines(2)
    fork = await rig.until(Fork, "split", lambda each: each.status.children[0].phase is SessionPhase.RELEASED)
    assert fork.status.ready_replicas == 1
    assert holds(fork.status.conditions, ConditionType.READY)
    await rig.restart()
    await rig.until(Session, second.metadata.name, lambda each: each.status.ready)
    with pytest.raises(NotFound):
        await rig.get(Session, first.metadata.name)
    assert len(rig.host.orders) == 3


async def test_a_fork_deleted_with_orphans_leaves_its_children_running(rig: ControlRig) -> None:
    _, (first, second), (below,) = await tree(rig)
    await rig.delete(Fork, "upper", "Orphan")
    await rig.gone(Fork, "upper")
    await rig.eventually(lambda: len(rig.host.points) == 2, lambda: rig.host.points)
    await rig.restart()
    assert len(rig.host.machines) == 4
    for session in (first, second, below):
        alone = await rig.get(Session, session.metadata.name)
        assert alone.status.ready
    assert (await rig.get(Session, first.metadata.name)).metadata.owner_references == ()
    await rig.delete(Session, first.metadata.name)
    await rig.machines(2)


async def test_a_root_deleted_with_orphans_takes_only_its_own_machine(rig: ControlRig) -> None:
    await tree(rig)
    await rig.delete(Session, "root", "Orphan")
    await rig.gone(Session, "root")
    await rig.machines(3)
    fork = await rig.get(Fork, "upper")
    assert fork.metadata.owner_references == ()
    assert fork.status.ready
    await rig.delete(Fork, "upper")
    await rig.machines(0)


async def test_what_was_deleted_while_no_agent_ran_goes_when_one_comes_back(rig: ControlRig) -> None:
    await tree(rig)
    await rig.stop()
    await rig.delete(Session, "root")
    await rig.gone(Session, "root")
    await rig.start()
    await rig.machines(0)
    await rig.eventually(lambda: len(rig.host.points) == 1, lambda: rig.host.points)


async def test_what_was_orphaned_while_no_agent_ran_lives_on(rig: ControlRig) -> None:
    await tree(rig)
    await rig.stop()
    await rig.delete(Session, "root", "Orphan")
    await rig.gone(Session, "root")
    await rig.start()
    await rig.machines(3)
    assert (await rig.get(Fork, "upper")).status.ready


async def test_children_of_a_fork_orphaned_while_no_agent_ran_live_on(rig: ControlRig) -> None:
    _, children, _ = await tree(rig)
    await rig.stop()
    await rig.delete(Fork, "upper", "Orphan")
    await rig.gone(Fork, "upper")
    await rig.start()
    await rig.eventually(lambda: len(rig.host.points) == 2, lambda: rig.host.points)
    assert rig.control is not None
    world = rig.control.world
    await rig.eventually(lambda: not world.records.fork(children[0].metadata.owner_references[0].uid), str)
    assert len(rig.host.machines) == 4
    for child in children:
        assert (await rig.get(Session, child.metadata.name)).status.ready


async def test_a_source_deleted_while_it_forks_leaves_nothing_of_the_fork(rig: ControlRig) -> None:
    await rig.running_session("root")
    rig.engine.go_on.clear()
    await rig.fork("split", session="root", replicas=2)
    await rig.engine.waiting.wait()
    await rig.delete(Session, "root")
    await rig.machines(0)
    rig.engine.go_on.set()
    try:
        failed = await rig.until(Fork, "split", lambda each: each.status.phase.terminal)
        assert failed.status.reason is Reason.SOURCE_GONE
    except NotFound:
        pass  # It hung below the root already, and was collected with it.
    assert len(rig.host.machines) == 0
    assert len(rig.host.points) == 1


async def test_a_machine_of_no_object_goes_with_the_next_sweep(rig: ControlRig) -> None:
    await rig.running_session("root")
    root = next(iter(rig.host.machines.values()))
    for owner in (
        "session/11111111-0000-0000-0000-000000000000",
        "fork/22222222-0000-0000-0000-000000000000/3",
    ):
        stray = Machine(
            id=MachineId(owner),
            owner=Owner(owner),
            tree=root.tree,
            baseline=root.baseline,
            generation="g",
            mode=root.mode,
            level=root.level,
        )
        rig.host.machines[stray.id] = stray
    assert rig.control is not None
    rig.control.world.sweep_wanted.set()
    await rig.machines(1)
    assert list(rig.host.machines.values()) == [root]
    await rig.measured('forktree_swept_total{what="machine"}', 2)
    await rig.measured('forktree_swept_total{what="vanished"}', 0)


async def test_a_child_whose_object_is_written_during_a_sweep_keeps_its_machine(rig: ControlRig) -> None:
    async with late_agent(rig) as client:
        assert rig.control is not None
        world = rig.control.world
        await rig.running_session("root")
        client.creating.clear()
        await rig.fork("split", session="root")
        await rig.machines(2)
        client.listing.clear()
        client.listed.clear()
        world.sweep_wanted.set()
        await asyncio.wait_for(client.listing.wait(), 10)
        # Sessions are listed, without the child. Now its object is written, and no watch has told of it.
        client.telling.clear()
        client.creating.set()
        await rig.eventually(lambda: len(world.records.sessions()) == 2, world.records.sessions)
        client.listed.set()
        world.sweep_wanted.set()  # Another sweep only begins when the first has ended.
        await rig.eventually(lambda: not world.sweep_wanted.is_set(), str)
        assert len(rig.host.machines) == 2
        client.telling.set()
        fork = await rig.until(Fork, "split", lambda each: each.status.recorded == 1)
        await rig.until(Session, fork.status.children[0].name, lambda each: each.status.ready)


async def test_a_fork_that_only_left_the_view_keeps_its_machines(rig: ControlRig) -> None:
    await rig.running_session("root")
    await rig.forked("split", session="root")
    taken = {"status": {"node": None}}
    fork = await rig.user.merge_patch(Fork, rig.namespace, "split", taken, subresource="status")
    assert rig.control is not None
    world = rig.control.world

    def taken_note_of() -> bool:
        seen = world.forks.get(fork.metadata.uid)
        return seen is not None and seen.status.node is None

    await rig.eventually(taken_note_of, lambda: world.forks.get(fork.metadata.uid))
    assert len(rig.host.machines) == 2
    await rig.route(fork)
    child = fork.status.children[0].name
    await rig.delete(Session, child)
    await rig.until(Fork, "split", lambda each: each.status.ready_replicas == 0)
    await rig.machines(1)
