"""What a Fork becomes: its place in the tree, its status, its children, and its refusals."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from e2e.control_rig import ControlRig
from forktree.models import Fork, ForkPhase, ForkSpec, Level, Mode, Reason, Session, SessionPhase
from forktree.models.conditions import ConditionType, holds
from forktree.models.fork import ForkSource, SourceRef
from forktree.models.names import FORK_LABEL, ROOT_LABEL, child_name
from forktree_dev.control_plane import ControlPlane


@pytest.fixture
async def rig(control_plane: ControlPlane, namespace: str, tmp_path: Path) -> AsyncIterator[ControlRig]:
    async with ControlRig.running(control_plane, namespace, tmp_path) as rig:
        yield rig


async def test_a_root_starts_from_the_baseline_of_its_template(rig: ControlRig) -> None:
    session = await rig.running_session("one")
    status = session.status
    assert status.phase is SessionPhase.RUNNING
    assert (status.mode, status.level) == (Mode.FORK, Level.MEMORY)
    assert (status.root, status.parent, status.depth) == (session.metadata.uid, None, 0)
    assert status.baseline_id == "baseline-of-builtin:tiny"
    assert status.fork_ms == 3.0
    assert status.total_ms is not None
    assert status.started_at is not None
    assert status.reason is None
    assert holds(status.conditions, ConditionType.READY)


async def test_a_fork_hangs_below_its_source_and_its_children_below_it(rig: ControlRig) -> None:
    parent = await rig.running_session("one")
    children = await rig.forked("split", session="one", replicas=3)
    fork = await rig.get(Fork, "split")
    assert fork.metadata.owner_references == (parent.owner_reference(),)
    assert fork.metadata.labels[ROOT_LABEL] == parent.metadata.uid
    assert (fork.status.phase, fork.status.ready) == (ForkPhase.COMPLETE, True)
    assert fork.status.parent_uid == parent.metadata.uid
    assert (fork.status.pause_ms, fork.status.fork_ms, fork.status.ready_ms) == (2.0, 4.0, 9.0)
    for condition in (ConditionType.FORKED, ConditionType.READY, ConditionType.POINT_AVAILABLE):
        assert holds(fork.status.conditions, condition)
    for index, child in enumerate(children):
        assert child.metadata.name == child_name("split", index, fork.metadata.uid)
        assert child.metadata.owner_references == (fork.owner_reference(),)
        assert child.metadata.labels[ROOT_LABEL] == parent.metadata.uid
        assert child.metadata.labels[FORK_LABEL] == "split"
        assert (child.status.root, child.status.parent) == (parent.metadata.uid, parent.metadata.uid)
        assert child.status.depth == 1
    generations = {child.status.vm_generation_id for child in children}
    assert len(generations) == 3


async def test_more_children_from_an_earlier_instant_hang_below_that_fork(rig: ControlRig) -> None:
    await rig.running_session("one")
    await rig.forked("split", session="one", replicas=1)
    earlier = await rig.get(Fork, "split")
    (child,) = await rig.forked("again", fork="split", replicas=1)
    again = await rig.get(Fork, "again")
    assert again.metadata.owner_references == (earlier.owner_reference(),)
    assert again.status.fork_point_id == earlier.status.fork_point_id
    assert again.status.pause_ms is None
    assert child.status.depth == 1
    assert child.status.parent == earlier.status.parent_uid


async def test_a_fork_of_nothing_says_so(rig: ControlRig) -> None:
    await rig.fork("split", session="nobody")
    fork = await rig.until(Fork, "split", lambda each: each.status.phase.terminal)
    assert fork.status.reason is Reason.SOURCE_NOT_FOUND
    assert "nobody" in (fork.status.message or "")


async def test_a_fork_waits_until_its_source_runs(rig: ControlRig) -> None:
    rig.engine.go_on.clear()
    await rig.session("one")
    await rig.fork("split", session="one")
    waiting = await rig.until(Fork, "split", lambda each: each.status.reason is not None)
    assert (waiting.status.phase, waiting.status.reason) == (ForkPhase.PENDING, Reason.SOURCE_NOT_READY)
    rig.engine.go_on.set()
    done = await rig.until(Fork, "split", lambda each: each.status.ready)
    assert done.status.reason is None


async def test_without_room_a_fork_waits_and_then_goes_on(rig: ControlRig) -> None:
    await rig.running_session("one")
    await rig.running_session("two")
    rig.engine.capacity = 3
    await rig.fork("split", session="one", replicas=2)
    waiting = await rig.until(Fork, "split", lambda each: each.status.reason is not None)
    assert (waiting.status.phase, waiting.status.reason) == (ForkPhase.PENDING, Reason.AT_CAPACITY)
    await rig.delete(Session, "two")
    await rig.until(Fork, "split", lambda each: each.status.ready)


async def test_a_fork_that_finds_no_room_for_long_fails(rig: ControlRig) -> None:
    await rig.running_session("one")
    rig.engine.capacity = 1
    await rig.branched("split", ForkSpec(source=ForkSource(session=SourceRef(name="one")), timeout_seconds=1))
    failed = await rig.until(Fork, "split", lambda each: each.status.phase.terminal)
    assert failed.status.reason is Reason.AT_CAPACITY


async def test_a_child_whose_name_is_taken_fails_alone(rig: ControlRig) -> None:
    await rig.running_session("one")
    await rig.stop()
    fork = await rig.fork("split", session="one", replicas=2)
    taken = child_name("split", 0, fork.metadata.uid)
    await rig.session(taken)
    await rig.start()
    done = await rig.until(Fork, "split", lambda each: each.status.recorded == 1)
    assert [child.phase for child in done.status.children] == [SessionPhase.FAILED, SessionPhase.RUNNING]
    assert "taken" in (done.status.message or "")
    await rig.machines(3)  # Two roots and the other child.
