"""What a Fork becomes: its place in the tree, its status, its children, and its refusals."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest

from e2e.control_rig import ControlRig
from e2e.late_client import late_agent
from forktree.kube.watching import Changed, watch
from forktree.models import (
    Fork,
    ForkPhase,
    ForkSpec,
    Level,
    Mode,
    ObjectMeta,
    Reason,
    Session,
    SessionPhase,
    SessionSpec,
)
from forktree.models.conditions import ConditionType, find, holds
from forktree.models.fork import ForkSource, SourceRef
from forktree.models.names import FORK_LABEL, ROOT_LABEL, child_name
from forktree.models.session import ForkRef
from forktree.models.session_template import TreeLimits
from forktree_agent.control.forks import MANY_FORKS
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
    await rig.measured('forktree_fork_failures_total{reason="AtCapacity"}', 1)


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


async def test_a_refused_fork_goes_with_its_source(rig: ControlRig) -> None:
    await rig.template("narrow", limits=TreeLimits(depth=1, live=4, memory="300M"))
    root = await rig.running_session("one", template="narrow")
    (child,) = await rig.forked("split", session="one")
    await rig.fork("deeper", session=child.metadata.name)
    await rig.fork("many", session="one", replicas=3)
    await rig.fork("big", fork="split", replicas=2)
    split = await rig.get(Fork, "split")
    for name, above, reason in (
        ("deeper", child, Reason.DEPTH_LIMIT),
        ("many", root, Reason.LIVE_LIMIT),
        ("big", split, Reason.MEMORY_LIMIT),
    ):
        failed = await rig.until(Fork, name, lambda each: each.status.phase.terminal)
        assert failed.status.reason is reason
        assert failed.metadata.owner_references == (above.owner_reference(),)
        assert failed.metadata.labels[ROOT_LABEL] == root.metadata.uid
    await rig.fork("lost", session="nobody")
    lost = await rig.until(Fork, "lost", lambda each: each.status.phase.terminal)
    assert lost.metadata.owner_references == ()
    await rig.delete(Session, "one")
    for name in ("deeper", "many", "big"):
        await rig.gone(Fork, name)
    await rig.get(Fork, "lost")
    await rig.machines(0)


async def test_a_fork_over_its_pause_budget_fails_and_its_source_runs_on(rig: ControlRig) -> None:
    await rig.template("hasty", limits=TreeLimits(pause_budget_ms=1))
    await rig.template("patient", limits=TreeLimits(pause_budget_ms=3))
    await rig.running_session("one", template="hasty")
    await rig.running_session("two", template="patient")
    await rig.fork("split", session="one", replicas=2)
    failed = await rig.until(Fork, "split", lambda each: each.status.phase.terminal)
    assert failed.status.reason is Reason.PAUSE_BUDGET
    assert "would stand still" in (failed.status.message or "")
    await rig.forked("other", session="two")
    assert (await rig.get(Session, "one")).status.phase is SessionPhase.RUNNING
    await rig.machines(3)


async def test_a_fork_that_waited_in_vain_goes_with_its_source(rig: ControlRig) -> None:
    rig.engine.go_on.clear()
    await rig.session("one")
    source = ForkSource(session=SourceRef(name="one"))
    await rig.branched("split", ForkSpec(source=source, timeout_seconds=1))
    failed = await rig.until(Fork, "split", lambda each: each.status.phase.terminal)
    assert failed.status.reason is Reason.DEADLINE_EXCEEDED
    rig.engine.go_on.set()
    await rig.delete(Session, "one")
    await rig.gone(Fork, "split")


async def forget(rig: ControlRig, name: str) -> Fork:
    """The state folder loses the entry of a fork that is done."""
    fork = await rig.until(Fork, name, lambda each: each.status.phase is ForkPhase.COMPLETE)
    await rig.stop()
    (rig.folder / "journal" / "fork" / f"{fork.metadata.uid}.json").unlink()
    await rig.start()
    return fork


async def test_a_fork_whose_record_is_lost_counts_its_children_and_lets_its_instant_go(
    rig: ControlRig,
) -> None:
    await rig.running_session("one")
    children = await rig.forked("split", session="one", replicas=2)
    split = await forget(rig, "split")
    fork = await rig.until(
        Fork, "split", lambda each: not holds(each.status.conditions, ConditionType.POINT_AVAILABLE)
    )
    assert (fork.status.ready_replicas, fork.status.phase) == (2, ForkPhase.COMPLETE)
    assert holds(fork.status.conditions, ConditionType.READY)
    await rig.eventually(
        lambda: all(each.id != split.status.fork_point_id for each in rig.host.points.values()),
        lambda: rig.host.points,
    )
    await rig.fork("late", fork="split")
    late = await rig.until(Fork, "late", lambda each: each.status.phase.terminal)
    assert late.status.reason is Reason.POINT_LOST
    await rig.delete(Session, children[0].metadata.name)
    fork = await rig.until(Fork, "split", lambda each: each.status.ready_replicas == 1)
    assert fork.status.children[0].phase is SessionPhase.RELEASED
    assert (await rig.get(Session, children[1].metadata.name)).status.ready


async def test_an_instant_whose_record_is_lost_is_held_for_who_started_from_it(rig: ControlRig) -> None:
    await rig.running_session("one")
    await rig.forked("split", session="one")
    (other,) = await rig.forked("again", fork="split")
    split = await forget(rig, "split")
    fork = await rig.until(
        Fork, "split", lambda each: not holds(each.status.conditions, ConditionType.POINT_AVAILABLE)
    )
    assert fork.status.ready_replicas == 1
    await rig.forked("more", fork="again")
    assert any(each.id == split.status.fork_point_id for each in rig.host.points.values())
    await rig.delete(Fork, "more")
    await rig.gone(Fork, "more")
    await rig.delete(Session, other.metadata.name)
    await rig.eventually(
        lambda: all(each.id != split.status.fork_point_id for each in rig.host.points.values()),
        lambda: rig.host.points,
    )


async def test_when_no_child_is_left_the_fork_says_so_and_stays_ready(rig: ControlRig) -> None:
    await rig.running_session("one")
    (child,) = await rig.forked("split", session="one")
    await rig.delete(Session, child.metadata.name)
    fork = await rig.until(Fork, "split", lambda each: each.status.ready_replicas == 0)
    assert holds(fork.status.conditions, ConditionType.READY)
    for kind in (ConditionType.READY, ConditionType.FORKED):
        condition = find(fork.status.conditions, kind)
        assert condition is not None
        assert "none of them is left" in condition.message


# A journal that cannot be written ------------------------------------------------------------------------


async def test_a_fork_that_cannot_be_noted_waits_with_a_reason_and_then_goes_on(rig: ControlRig) -> None:
    await rig.running_session("one")
    blocked = rig.folder / "journal" / "fork"
    blocked.touch()  # Where a folder should be: it cannot be written by anybody.
    await rig.fork("split", session="one")
    waiting = await rig.until(Fork, "split", lambda each: each.status.reason is not None)
    assert (waiting.status.phase, waiting.status.reason) == (ForkPhase.PENDING, Reason.INTERNAL)
    assert "journal" in (waiting.status.message or "")
    assert len(rig.host.machines) == 1
    blocked.unlink()
    done = await rig.until(Fork, "split", lambda each: each.status.ready)
    assert done.status.reason is None


async def test_a_fork_that_can_never_be_noted_fails_and_says_why(rig: ControlRig) -> None:
    await rig.running_session("one")
    (rig.folder / "journal" / "fork").touch()
    source = ForkSource(session=SourceRef(name="one"))
    await rig.branched("split", ForkSpec(source=source, timeout_seconds=1))
    failed = await rig.until(Fork, "split", lambda each: each.status.phase.terminal)
    assert failed.status.reason is Reason.DEADLINE_EXCEEDED
    assert "journal" in (failed.status.message or "")


async def test_machines_of_a_fork_that_cannot_be_noted_are_ended_and_it_fails(rig: ControlRig) -> None:
    await rig.running_session("one")
    folder = rig.folder / "journal" / "fork"

    def fill(step: str) -> None:
        if step == "forked":
            folder.rename(folder.with_name("kept"))
            folder.touch()

    rig.engine.hook = fill
    await rig.fork("split", session="one", replicas=2)
    failed = await rig.until(Fork, "split", lambda each: each.status.phase.terminal)
    assert failed.status.reason is Reason.INTERNAL
    assert "journal" in (failed.status.message or "")
    await rig.machines(1)
    assert len(rig.host.orders) == 3


async def test_of_many_forks_at_once_each_is_told_of_in_one_write(rig: ControlRig) -> None:
    await rig.running_session("one")
    async with late_agent(rig) as late, told_phases(rig) as phases:
        late.creating.clear()
        for number in range(MANY_FORKS - 1):  # They run, and wait for their children's objects.
            await rig.fork(f"first-{number}", session="one")
            await rig.until(Fork, f"first-{number}", lambda each: each.status.phase is ForkPhase.RUNNING)
        await rig.fork("last", session="one")
        await rig.until(Fork, "last", lambda each: bool(each.metadata.owner_references))
        await rig.eventually(lambda: len(rig.host.machines) == 1 + MANY_FORKS, lambda: rig.host.machines)
        late.creating.set()
        done = await rig.until(Fork, "last", lambda each: each.status.phase is ForkPhase.COMPLETE)
        assert done.status.recorded == 1
        for kind in (ConditionType.FORKED, ConditionType.READY, ConditionType.COMPLETE):
            assert holds(done.status.conditions, kind)
        await rig.eventually(lambda: ForkPhase.COMPLETE in phases["last"], lambda: phases)
        assert set(phases["last"]) == {ForkPhase.PENDING, ForkPhase.COMPLETE}
        assert ForkPhase.RUNNING in phases["first-0"]


async def test_of_many_forks_one_whose_children_get_no_objects_is_said_to_run(rig: ControlRig) -> None:
    await rig.running_session("one")
    async with late_agent(rig) as late:
        late.creating.clear()
        for number in range(MANY_FORKS - 1):
            await rig.fork(f"first-{number}", session="one")
            await rig.until(Fork, f"first-{number}", lambda each: each.status.phase is ForkPhase.RUNNING)
        await rig.fork("last", session="one")
        await rig.eventually(lambda: len(rig.host.machines) == 1 + MANY_FORKS, lambda: rig.host.machines)
        late.full = True
        late.creating.set()
        told = await rig.until(Fork, "last", lambda each: each.status.phase is ForkPhase.RUNNING)
        assert (told.status.ready, told.status.recorded) == (True, 0)
        late.full = False
        await rig.until(Fork, "last", lambda each: each.status.phase is ForkPhase.COMPLETE)


async def test_a_fork_whose_children_have_objects_is_not_made_again_where_its_node_forgot_it(
    rig: ControlRig,
) -> None:
    await rig.running_session("one")
    await rig.stop()
    fork = await rig.fork("split", session="one")
    reference = ForkRef(name="split", uid=fork.metadata.uid, index=0)
    child = Session(
        metadata=ObjectMeta(
            name=child_name("split", 0, fork.metadata.uid),
            namespace=rig.namespace,
            owner_references=(fork.owner_reference(),),
        ),
        spec=SessionSpec(fork_ref=reference, node_name=rig.settings.node_name),
    )
    await rig.agent.create(child)
    await rig.start()
    failed = await rig.until(Fork, "split", lambda each: each.status.phase.terminal)
    assert (failed.status.phase, failed.status.reason) == (ForkPhase.FAILED, Reason.MACHINE_LOST)
    lost = await rig.until(Session, child.metadata.name, lambda each: each.status.phase.terminal)
    assert lost.status.reason is Reason.MACHINE_LOST
    assert len(rig.host.machines) == 1


@asynccontextmanager
async def told_phases(rig: ControlRig) -> AsyncGenerator[dict[str, list[ForkPhase]]]:
    """What each version of each Fork says its phase is, by name, from now on."""
    phases: defaultdict[str, list[ForkPhase]] = defaultdict(list)
    listed = asyncio.Event()

    async def follow() -> None:
        async with aclosing(watch(rig.user, Fork, namespace=rig.namespace)) as events:
            async for event in events:
                if isinstance(event, Changed):
                    phases[event.obj.metadata.name].append(event.obj.status.phase)
                listed.set()

    following = asyncio.create_task(follow())
    try:
        await listed.wait()
        yield phases
    finally:
        following.cancel()
