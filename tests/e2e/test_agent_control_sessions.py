"""Roots and their templates: how they start, how they fail, and what is said of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from e2e.control_rig import ControlRig
from forktree.kube.errors import Invalid
from forktree.models import BakePhase, Fork, ForkPhase, Reason, Session, SessionPhase, SessionTemplate
from forktree.models.names import child_name
from forktree.models.session_template import TreeLimits
from forktree_agent.control.owners import owner_of
from forktree_agent.engine.contract import (
    AtCapacity,
    BaselineId,
    EgressForbidden,
    EngineError,
    ImageNotFound,
    NeverReady,
    PinMismatch,
)
from forktree_dev.control_plane import ControlPlane


@pytest.fixture
async def rig(control_plane: ControlPlane, namespace: str, tmp_path: Path) -> AsyncIterator[ControlRig]:
    async with ControlRig.running(control_plane, namespace, tmp_path) as rig:
        yield rig


async def test_a_session_of_no_template_fails_and_says_which(rig: ControlRig) -> None:
    await rig.session("one", template="missing")
    failed = await rig.until(Session, "one", lambda each: each.status.phase.terminal)
    assert failed.status.reason is Reason.TEMPLATE_NOT_FOUND
    assert "missing" in (failed.status.message or "")


async def test_two_sessions_share_one_bake_and_the_template_says_where_it_is_ready(rig: ControlRig) -> None:
    rig.engine.go_on.clear()
    await rig.session("one")
    await rig.session("two")
    for name in ("one", "two"):
        baking = await rig.until(Session, name, lambda each: each.status.reason is Reason.BAKING)
        assert baking.status.phase is SessionPhase.STARTING
    rig.engine.go_on.set()
    for name in ("one", "two"):
        await rig.until(Session, name, lambda each: each.status.ready)
    assert rig.engine.bakes == 1
    node = rig.settings.node_name
    template = await rig.until(
        SessionTemplate,
        "tiny",
        lambda each: (entry := each.status.on(node)) is not None and entry.phase is BakePhase.READY,
    )
    entry = template.status.on(node)
    assert entry is not None
    assert (entry.baseline_id, entry.boot_ms) == ("baseline-of-builtin:tiny", 12.5)


@pytest.mark.parametrize(
    "error", [NeverReady("no"), PinMismatch("no"), ImageNotFound("no"), EgressForbidden("no")]
)
async def test_a_template_that_cannot_be_made_ready_fails_its_session(
    rig: ControlRig, error: EngineError
) -> None:
    rig.engine.bake_error = error
    await rig.session("one")
    failed = await rig.until(Session, "one", lambda each: each.status.phase.terminal)
    assert (failed.status.reason, failed.status.message) == (error.reason, "no")
    node = rig.settings.node_name
    template = await rig.until(
        SessionTemplate,
        "tiny",
        lambda each: (entry := each.status.on(node)) is not None and entry.phase is BakePhase.FAILED,
    )
    entry = template.status.on(node)
    assert entry is not None
    assert entry.reason is error.reason
    rig.engine.bake_error = None
    await rig.running_session("two")


async def test_a_session_says_that_its_network_was_lost_and_stays_ready(rig: ControlRig) -> None:
    await rig.running_session("one")
    (machine,) = rig.engine.machines()
    rig.engine.lose_network(machine.owner, "killed by signal 9 (SIGKILL)")
    for _ in ("told", "told again by the next agent"):
        told = await rig.until(Session, "one", lambda each: each.status.reason is Reason.NETWORK_LOST)
        assert told.status.ready
        assert told.status.phase is SessionPhase.RUNNING
        assert told.status.message == (
            "it does not reach the outside any more, a fork of it does: passt killed by signal 9 (SIGKILL)"
        )
        await rig.restart()


async def test_a_deleted_template_lets_go_of_its_baseline_and_spares_its_sessions(rig: ControlRig) -> None:
    await rig.running_session("one")
    assert rig.control is not None
    use_changed = rig.control.world.use_changed
    use_changed.clear()
    await rig.user.delete(SessionTemplate, rig.namespace, "tiny")
    await rig.eventually(lambda: not rig.host.baselines, lambda: rig.host.baselines)
    await rig.eventually(use_changed.is_set, lambda: "nobody was told of the room")
    assert (await rig.get(Session, "one")).status.ready
    assert len(rig.host.machines) == 1


async def test_a_baseline_outlives_a_restart_and_is_not_made_again(rig: ControlRig) -> None:
    await rig.running_session("one")
    await rig.restart()
    await rig.running_session("two")
    assert rig.engine.bakes == 0


async def test_a_template_that_wants_some_in_wait_is_baked_at_once_and_may_change_its_mind(
    rig: ControlRig,
) -> None:
    async def until_ready(count: int) -> None:
        baseline = BaselineId("baseline-of-builtin:ahead")
        await rig.eventually(lambda: rig.engine.ready.get(baseline) == count, lambda: rig.engine.ready)

    name = (await rig.template("ahead", standby=2)).metadata.name
    await until_ready(2)
    await rig.until(SessionTemplate, name, lambda each: _phase(rig, each) is BakePhase.READY)
    await rig.restart()
    await until_ready(2)
    assert rig.engine.bakes == 0
    await rig.user.merge_patch(SessionTemplate, rig.namespace, name, {"spec": {"standby": 5}})
    await until_ready(5)
    with pytest.raises(Invalid, match="cannot be changed"):
        await rig.user.merge_patch(SessionTemplate, rig.namespace, name, {"spec": {"image": "builtin:tiny"}})
    await rig.user.merge_patch(SessionTemplate, rig.namespace, name, {"spec": {"standby": 0}})
    await until_ready(0)


async def test_a_template_that_could_not_be_baked_ahead_is_baked_when_a_root_comes(rig: ControlRig) -> None:
    rig.engine.bake_error = AtCapacity("no room")
    await rig.template("late", standby=1)
    await rig.until(SessionTemplate, "late", lambda each: _phase(rig, each) is BakePhase.BAKING)
    rig.engine.bake_error = None
    await rig.running_session("one", "late")
    assert rig.engine.ready[BaselineId("baseline-of-builtin:late")] == 1


def _phase(rig: ControlRig, template: SessionTemplate) -> BakePhase | None:
    entry = template.status.on(rig.settings.node_name)
    return entry.phase if entry is not None else None


async def test_a_template_no_longer_claims_a_baseline_that_a_reboot_took(rig: ControlRig) -> None:
    await rig.running_session("one")
    node = rig.settings.node_name
    await rig.until(
        SessionTemplate,
        "tiny",
        lambda each: (entry := each.status.on(node)) is not None and entry.phase is BakePhase.READY,
    )
    rig.host.baselines.clear()
    rig.host.points.clear()
    await rig.restart()
    await rig.until(SessionTemplate, "tiny", lambda each: each.status.on(node) is None)
    await rig.running_session("two")


async def test_a_machine_that_ends_by_itself_fails_its_session_and_says_how(rig: ControlRig) -> None:
    session = await rig.running_session("one")
    (child,) = await rig.forked("split", session="one")
    rig.engine.kill(owner_of(child))
    failed = await rig.until(Session, child.metadata.name, lambda each: each.status.phase.terminal)
    assert failed.status.reason is Reason.MACHINE_LOST
    assert "SIGKILL" in (failed.status.message or "")
    await rig.measured("forktree_machines_lost_total", 1)
    assert failed.status.vm_generation_id == child.status.vm_generation_id
    fork = await rig.until(Fork, "split", lambda each: each.status.ready_replicas == 0)
    assert fork.status.phase is ForkPhase.COMPLETE
    assert fork.status.children[0].reason is Reason.MACHINE_LOST
    assert (await rig.get(Session, session.metadata.name)).status.ready


async def test_a_machine_lost_while_no_agent_ran_is_said_to_be_lost(rig: ControlRig) -> None:
    await rig.running_session("one")
    await rig.stop()
    rig.host.machines.clear()
    await rig.start()
    failed = await rig.until(Session, "one", lambda each: each.status.phase.terminal)
    assert failed.status.reason is Reason.MACHINE_LOST


async def test_a_session_that_others_called_failed_loses_its_machine(rig: ControlRig) -> None:
    await rig.running_session("one")
    body = {"status": {"phase": "Failed", "reason": "NodeLost", "ready": False}}
    await rig.operator.merge_patch(Session, rig.namespace, "one", body, subresource="status")
    await rig.machines(0)
    assert (await rig.get(Session, "one")).status.reason is Reason.NODE_LOST


async def test_the_limits_of_a_tree_hold_for_all_below_its_root(rig: ControlRig) -> None:
    await rig.template("narrow", limits=TreeLimits(depth=1, memory="300M"))
    await rig.running_session("one", template="narrow")
    (child,) = await rig.forked("split", session="one")
    await rig.fork("deeper", session=child.metadata.name)
    deeper = await rig.until(Fork, "deeper", lambda each: each.status.phase.terminal)
    assert deeper.status.reason is Reason.DEPTH_LIMIT
    await rig.fork("wider", session="one", replicas=2)
    wider = await rig.until(Fork, "wider", lambda each: each.status.phase.terminal)
    assert wider.status.reason is Reason.MEMORY_LIMIT
    assert len(rig.host.machines) == 2


async def test_without_room_a_session_waits_and_then_starts(rig: ControlRig) -> None:
    await rig.running_session("one")
    rig.engine.capacity = 1
    await rig.session("two")
    waiting = await rig.until(Session, "two", lambda each: each.status.reason is Reason.AT_CAPACITY)
    assert waiting.status.phase is SessionPhase.STARTING
    await rig.delete(Session, "one")
    await rig.until(Session, "two", lambda each: each.status.ready)


async def test_a_session_that_waited_belongs_to_the_template_that_it_was_started_from(
    rig: ControlRig,
) -> None:
    await rig.running_session("one")
    await rig.template("other", limits=TreeLimits(depth=5))
    rig.engine.capacity = 1
    await rig.session("two", template="other")
    await rig.until(Session, "two", lambda each: each.status.reason is Reason.AT_CAPACITY)
    await rig.user.delete(SessionTemplate, rig.namespace, "other")
    anew = await rig.template("other", limits=TreeLimits(depth=1))
    rig.engine.capacity = 3
    two = await rig.until(Session, "two", lambda each: each.status.ready)
    assert two.status.template_uid == anew.metadata.uid
    (child,) = await rig.forked("split", session="two")
    await rig.fork("deeper", session=child.metadata.name)
    deeper = await rig.until(Fork, "deeper", lambda each: each.status.phase.terminal)
    assert deeper.status.reason is Reason.DEPTH_LIMIT


async def test_a_broken_engine_fails_the_session_and_not_the_agent(rig: ControlRig) -> None:
    rig.engine.fork_error = ZeroDivisionError("a defect")
    await rig.session("one")
    failed = await rig.until(Session, "one", lambda each: each.status.phase.terminal)
    assert failed.status.reason is Reason.INTERNAL
    rig.engine.fork_error = None
    await rig.running_session("two")


async def test_a_session_that_cannot_be_noted_waits_with_a_reason_and_then_starts(rig: ControlRig) -> None:
    blocked = rig.folder / "journal" / "session"
    blocked.touch()  # Where a folder should be: it cannot be written by anybody.
    await rig.session("one")
    waiting = await rig.until(Session, "one", lambda each: each.status.reason is Reason.INTERNAL)
    assert waiting.status.phase is SessionPhase.STARTING
    assert "journal" in (waiting.status.message or "")
    blocked.unlink()
    await rig.until(Session, "one", lambda each: each.status.ready)


async def test_a_session_that_can_never_be_noted_fails_and_leaves_no_machine(rig: ControlRig) -> None:
    folder = rig.folder / "journal" / "session"

    def fill(step: str) -> None:
        if step == "branched" and folder.is_dir():
            folder.rename(folder.with_name("kept"))
            folder.touch()

    rig.engine.hook = fill
    await rig.session("one")
    failed = await rig.until(Session, "one", lambda each: each.status.phase.terminal)
    assert failed.status.reason is Reason.INTERNAL
    assert "journal" in (failed.status.message or "")
    await rig.machines(0)


async def test_a_child_that_cannot_be_noted_says_so_until_it_is(rig: ControlRig) -> None:
    await rig.running_session("one")
    folder = rig.folder / "journal" / "session"
    kept = folder.with_name("kept")
    folder.rename(kept)
    folder.touch()
    await rig.fork("split", session="one")
    fork = await rig.until(Fork, "split", lambda each: each.status.ready)
    name = child_name("split", 0, fork.metadata.uid)
    await rig.eventually(
        lambda: rig.control is not None and bool(rig.control.world.sessions.named(rig.namespace, name)),
        lambda: name,
    )
    waiting = await rig.until(Session, name, lambda each: each.status.reason is not None)
    assert (waiting.status.phase, waiting.status.reason) == (SessionPhase.PENDING, Reason.INTERNAL)
    folder.unlink()
    kept.rename(folder)
    running = await rig.until(Session, name, lambda each: each.status.ready)
    assert running.status.reason is None
