"""Limits and clocks of trees on a real API server: what is refused, released, deleted, and who is told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from e2e.control_rig import ControlRig
from forktree.kube.errors import NotFound
from forktree.models import Fork, ForkPhase, Reason, Session, SessionPhase
from forktree.models.names import HEARTBEAT_ANNOTATION
from forktree.models.session_template import TreeLimits
from forktree_agent.control.owners import owner_of
from forktree_agent.engine.contract import Command
from forktree_dev.control_plane import ControlPlane
from unit.fake_engine import FakeEngine

LEASES = "/apis/coordination.k8s.io/v1/namespaces/{}/leases"


@pytest.fixture
async def rig(control_plane: ControlPlane, namespace: str, tmp_path: Path) -> AsyncIterator[ControlRig]:
    async with ControlRig.running(control_plane, namespace, tmp_path) as rig:
        await rig.stop()
        rig.settings = replace(rig.settings, expiry_seconds=0.1)
        await rig.start()
        yield rig


async def events(rig: ControlRig, reason: str, count: int) -> list[tuple[str, str, str]]:
    """Kind, name and note of each Event of this reason, as soon as there are so many."""
    path = f"/apis/events.k8s.io/v1/namespaces/{rig.namespace}/events"
    deadline = asyncio.get_running_loop().time() + 20
    while True:
        items = json.loads(await rig.user.raw("GET", path))["items"]
        found = [each for each in items if each["reason"] == reason]
        if len(found) >= count:
            return [(each["regarding"]["kind"], each["regarding"]["name"], each["note"]) for each in found]
        assert asyncio.get_running_loop().time() < deadline, items
        await asyncio.sleep(0.05)


async def exec_in(rig: ControlRig, session: Session) -> None:
    assert rig.control is not None
    loop = asyncio.get_running_loop()
    await rig.control.facade.exec(session, Command(argv=("true",)), deadline=loop.time() + 5)


async def renew(rig: ControlRig, name: str, seconds: int) -> None:
    """As a trainer does: make its Lease or write a new time into it."""
    folder = LEASES.format(rig.namespace)
    spec = {
        "holderIdentity": "trainer",
        "leaseDurationSeconds": seconds,
        "renewTime": datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z"),
    }
    try:
        await rig.user.raw(
            "PATCH", f"{folder}/{name}", {"spec": spec}, content_type="application/merge-patch+json"
        )
    except NotFound:
        lease = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": name}}
        await rig.user.raw("POST", folder, {**lease, "spec": spec})


async def announce_heartbeat(rig: ControlRig, root: str, lease: str) -> None:
    body = {"metadata": {"annotations": {HEARTBEAT_ANNOTATION: lease}}}
    await rig.user.merge_patch(Session, rig.namespace, root, body)


# Limits -----------------------------------------------------------------------------------------------------


async def test_a_fork_beyond_the_live_limit_fails_before_anything_starts(rig: ControlRig) -> None:
    await rig.template("three", limits=TreeLimits(live=3))
    await rig.running_session("root", "three")
    (child,) = await rig.forked("one", session="root")
    ordered = len(rig.host.orders)
    await rig.fork("two", session=child.metadata.name, replicas=2)
    failed = await rig.until(Fork, "two", lambda each: each.status.phase is ForkPhase.FAILED)
    assert failed.status.reason is Reason.LIVE_LIMIT
    assert "2 sessions alive and may have 3" in (failed.status.message or "")
    assert len(rig.host.orders) == ordered
    await rig.forked("three", fork="one")
    await rig.delete(Fork, "one")
    await rig.machines(1)
    await rig.forked("four", session="root", replicas=2)
    assert ("Fork", "two", f"LiveLimit: {failed.status.message}") in await events(rig, "Failed", 1)


async def test_two_forks_at_once_do_not_pass_the_live_limit_together(rig: ControlRig) -> None:
    await rig.template("three", limits=TreeLimits(live=3))
    await rig.running_session("root", "three")
    rig.engine.go_on.clear()
    await rig.fork("one", session="root", replicas=2)
    await asyncio.wait_for(rig.engine.waiting.wait(), 10)
    await rig.fork("two", session="root", replicas=1)
    failed = await rig.until(Fork, "two", lambda each: each.status.phase is ForkPhase.FAILED)
    assert failed.status.reason is Reason.LIVE_LIMIT
    rig.engine.go_on.set()
    await rig.until(Fork, "one", lambda each: each.status.recorded == 2)


# Idleness ---------------------------------------------------------------------------------------------------


async def test_an_idle_session_is_released_and_its_place_and_instants_stay(rig: ControlRig) -> None:
    await rig.template("brief", limits=TreeLimits(idle_seconds=1))
    root = await rig.running_session("root", "brief")
    (child,) = await rig.forked("one", session="root")
    for name in ("root", child.metadata.name):
        released = await rig.until(Session, name, lambda each: each.status.phase.terminal)
        assert released.status.phase is SessionPhase.RELEASED
        assert (released.status.ready, released.status.reason) == (False, Reason.EXPIRED)
        assert "1 s" in (released.status.message or "")
        assert released.status.vm_generation_id is not None
    await rig.machines(0)
    told = await events(rig, "Expired", 2)
    assert {name for _, name, _ in told} == {"root", child.metadata.name}
    (again,) = await rig.forked("again", fork="one")
    assert again.status.depth == 1
    await rig.fork("late", session="root")
    failed = await rig.until(Fork, "late", lambda each: each.status.phase is ForkPhase.FAILED)
    assert failed.status.reason is Reason.SOURCE_GONE
    assert root.metadata.uid == (await rig.get(Session, "root")).metadata.uid


async def test_what_is_done_far_below_keeps_all_above_and_nobody_beside(rig: ControlRig) -> None:
    await rig.template("brief", limits=TreeLimits(idle_seconds=2))
    await rig.running_session("root", "brief")
    busy, aside = await rig.forked("one", session="root", replicas=2)
    (below,) = await rig.forked("two", session=busy.metadata.name)
    until = asyncio.get_running_loop().time() + 4
    while asyncio.get_running_loop().time() < until:
        await exec_in(rig, below)
        await asyncio.sleep(0.2)
    for name in ("root", busy.metadata.name, below.metadata.name):
        assert (await rig.get(Session, name)).status.phase is SessionPhase.RUNNING
    assert (await rig.get(Session, aside.metadata.name)).status.phase is SessionPhase.RELEASED


async def test_a_command_that_nobody_waits_for_keeps_its_session(rig: ControlRig) -> None:
    await rig.template("brief", limits=TreeLimits(idle_seconds=1))
    busy, idle = [await rig.running_session(name, "brief") for name in ("busy", "idle")]
    rig.host.under_way[owner_of(busy)] = "detached"
    await rig.until(Session, idle.metadata.name, lambda each: each.status.phase.terminal)
    await asyncio.sleep(2)  # Twice as long as it may be idle.
    assert (await rig.get(Session, "busy")).status.phase is SessionPhase.RUNNING
    rig.host.under_way.clear()
    await rig.until(Session, "busy", lambda each: each.status.phase is SessionPhase.RELEASED)


async def test_a_restarted_agent_counts_anew_and_finishes_what_was_expiring(rig: ControlRig) -> None:
    await rig.template("brief", limits=TreeLimits(idle_seconds=2))
    await rig.running_session("root", "brief")
    died: list[str] = []

    def die(step: str) -> None:
        if step == "released":
            died.append(step)
            raise RuntimeError("the agent dies here")

    rig.engine.hook = die
    await rig.eventually(lambda: bool(died), lambda: "nothing was released")
    await rig.stop()
    rig.engine = FakeEngine(rig.host)
    await rig.start()
    released = await rig.until(Session, "root", lambda each: each.status.phase.terminal)
    assert (released.status.phase, released.status.reason) == (SessionPhase.RELEASED, Reason.EXPIRED)


# A tree's life ----------------------------------------------------------------------------------------------


async def test_a_tree_whose_time_is_over_is_deleted_whatever_is_done_in_it(rig: ControlRig) -> None:
    await rig.template("short", limits=TreeLimits(tree_ttl_seconds=4))
    root = await rig.running_session("root", "short")
    (child,) = await rig.forked("one", session="root")
    while (await rig.user.list(Session, rig.namespace)).items:
        with_machine = rig.control is not None and rig.control.facade.machine(child) is not None
        if with_machine:
            await exec_in(rig, child)
        await asyncio.sleep(0.1)
    assert root.metadata.creation_timestamp is not None
    assert (datetime.now(UTC) - root.metadata.creation_timestamp).total_seconds() >= 4
    await rig.machines(0)
    ((kind, name, note),) = await events(rig, "Expired", 1)
    assert (kind, name) == ("Session", "root")
    assert "4 s" in note


# Heartbeats -------------------------------------------------------------------------------------------------


async def test_a_tree_lives_as_long_as_its_trainer_renews_and_ends_when_it_is_dead(rig: ControlRig) -> None:
    await renew(rig, "root-heartbeat", 2)
    await rig.running_session("root")
    await rig.running_session("other")
    await announce_heartbeat(rig, "root", "root-heartbeat")
    await rig.forked("one", session="root", replicas=2)
    for _ in range(10):
        await asyncio.sleep(0.5)
        await renew(rig, "root-heartbeat", 2)
    assert (await rig.get(Session, "root")).status.phase is SessionPhase.RUNNING
    await rig.gone(Session, "root")
    await rig.machines(1)
    ((_, _, note),) = await events(rig, "Expired", 1)
    assert "root-heartbeat, was not renewed for 2 s" in note
    assert (await rig.get(Session, "other")).status.phase is SessionPhase.RUNNING


async def test_a_restarted_agent_gives_a_trainer_its_whole_time_again(rig: ControlRig) -> None:
    await renew(rig, "beat", 3)
    await rig.running_session("root")
    await announce_heartbeat(rig, "root", "beat")
    await asyncio.sleep(1.5)
    await rig.stop()
    await asyncio.sleep(2)  # Longer than its time together with what was before.
    await rig.start()
    await asyncio.sleep(1.5)
    assert not (await rig.get(Session, "root")).metadata.deleting
    await rig.gone(Session, "root")


async def test_a_lease_that_is_not_there_yet_has_its_grace_and_a_name_is_no_path(rig: ControlRig) -> None:
    await rig.running_session("root")
    await announce_heartbeat(rig, "root", "../../../../api/v1/namespaces/default/pods/x")
    await rig.running_session("second")
    await announce_heartbeat(rig, "second", "none")
    await asyncio.sleep(1)
    for name in ("root", "second"):
        assert (await rig.get(Session, name)).status.phase is SessionPhase.RUNNING


# Events -----------------------------------------------------------------------------------------------------


async def test_people_are_told_what_was_forked_released_pruned_and_refused(rig: ControlRig) -> None:
    await rig.running_session("root")
    await rig.forked("one", session="root", replicas=3)
    await rig.fork("none", session="nothing")
    await rig.running_session("over")
    await rig.user.merge_patch(Session, rig.namespace, "over", {"spec": {"state": "Released"}})
    await rig.until(Session, "over", lambda each: each.status.phase is SessionPhase.RELEASED)
    await rig.delete(Session, "root")
    await rig.machines(0)
    ((kind, name, note),) = await events(rig, "Released", 1)
    assert (kind, name) == ("Session", "over")
    assert "spec.state" in note
    ((kind, name, note),) = await events(rig, "Forked", 1)
    assert (kind, name) == ("Fork", "one")
    assert "3 started from session root" in note
    pruned = await events(rig, "Pruned", 1)
    while sum(int(note.split()[2]) for _, _, note in pruned) < 4:
        pruned = await events(rig, "Pruned", len(pruned) + 1)  # The Fork's end may be heard of first.
    assert ("Session", "root") in {(kind, name) for kind, name, _ in pruned}
    assert all("machines of it and below it were ended" in note for _, _, note in pruned)
    ((kind, name, note),) = await events(rig, "Failed", 1)
    assert (kind, name) == ("Fork", "none")
    assert note.startswith("SourceNotFound: ")


async def test_people_are_told_once_what_waits_for_room_and_what_becomes_of_it(rig: ControlRig) -> None:
    await rig.running_session("one")
    await rig.running_session("two")
    rig.engine.capacity = 2
    await rig.fork("split", session="one", replicas=2)
    ((kind, name, note),) = await events(rig, "AtCapacity", 1)
    assert (kind, name) == ("Fork", "split")
    assert note.startswith("waiting for room: ")
    await rig.delete(Session, "two")
    rig.engine.capacity = 3
    await rig.until(Fork, "split", lambda each: each.status.phase is ForkPhase.COMPLETE)
    ((kind, name, note),) = await events(rig, "Complete", 1)
    assert (kind, name, note) == ("Fork", "split", "2 of 2 children run on")
    assert len(await events(rig, "AtCapacity", 1)) == 1


async def test_people_are_told_that_a_machine_was_lost(rig: ControlRig) -> None:
    root = await rig.running_session("root")
    rig.engine.kill(owner_of(root))
    await rig.until(Session, "root", lambda each: each.status.phase is SessionPhase.FAILED)
    ((kind, name, note),) = await events(rig, "Failed", 1)
    assert (kind, name) == ("Session", "root")
    assert note.startswith("MachineLost: ")
