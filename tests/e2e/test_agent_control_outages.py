"""The API server away, in whole or in part: machines go on, and nothing is ended in doubt."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest

from e2e.control_rig import WAIT_SECONDS, ControlRig
from e2e.late_client import late_agent
from forktree.kube.access import ClusterAccess
from forktree.kube.client import KubeClient
from forktree.kube.errors import Forbidden, NotFound, Unavailable
from forktree.models import ApiObject, Fork, ForkPhase, ForkSpec, Reason, Session, SessionPhase
from forktree.models.fork import ForkSource, Prune, SourceRef
from forktree_agent.control.owners import owner_of
from forktree_dev.control_plane import ControlPlane

ObjectT = TypeVar("ObjectT", bound=ApiObject)


class FlakyClient(KubeClient):
    """A client to whom a test says what fails, and how: `fails` returns the error for a method and path."""

    fails: Callable[[str, str], Exception | None] | None = None
    failed = 0

    async def raw(
        self,
        method: str,
        path: str,
        body: Mapping[str, object] | None = None,
        *,
        query: Mapping[str, str] | None = None,
        content_type: str = "application/json",
        deadline: float | None = None,
    ) -> bytes:
        error = None if self.fails is None else self.fails(method, path)
        if error is not None:
            self.failed += 1
            raise error
        return await super().raw(
            method, path, body, query=query, content_type=content_type, deadline=deadline
        )


@pytest.fixture
async def rig(control_plane: ControlPlane, namespace: str, tmp_path: Path) -> AsyncIterator[ControlRig]:
    async with ControlRig.running(control_plane, namespace, tmp_path) as rig:
        yield rig


@pytest.fixture
async def flaky(rig: ControlRig) -> AsyncIterator[FlakyClient]:
    """Control goes on with this client."""
    await rig.stop()
    async with FlakyClient.connected(
        ClusterAccess.from_kubeconfig(rig.folder / "agent.kubeconfig")
    ) as client:
        assert isinstance(client, FlakyClient)
        await rig.start(client)
        yield client
        await rig.stop()


async def test_a_fork_whose_writes_fail_is_done_once_and_written_later(
    rig: ControlRig, flaky: FlakyClient
) -> None:
    await rig.running_session("root")
    flaky.fails = lambda method, _: Unavailable("away") if method != "GET" else None
    await rig.fork("split", session="root", replicas=2)
    await rig.machines(3)
    before = flaky.failed
    await rig.eventually(lambda: flaky.failed > before + 2, lambda: flaky.failed)
    assert (await rig.get(Fork, "split")).status.parent_uid is None
    flaky.fails = None
    fork = await rig.until(Fork, "split", lambda each: each.status.recorded == 2)
    for child in fork.status.children:
        await rig.until(Session, child.name, lambda each: each.status.ready)
    assert len(rig.host.orders) == 3


async def test_a_verdict_that_cannot_be_written_is_not_tried_for_again(
    rig: ControlRig, flaky: FlakyClient
) -> None:
    await rig.running_session("root")
    flaky.fails = lambda method, _: Unavailable("away") if method != "GET" else None
    await rig.fork("split", session="nobody")
    before = flaky.failed
    await rig.eventually(lambda: flaky.failed > before + 2, lambda: flaky.failed)
    await rig.session("nobody")  # Too late: the fork was refused.
    flaky.fails = None
    failed = await rig.until(Fork, "split", lambda each: each.status.phase.terminal)
    assert failed.status.reason is Reason.SOURCE_NOT_FOUND


async def test_lists_that_fail_end_nothing(rig: ControlRig, flaky: FlakyClient) -> None:
    session = await rig.running_session("root")
    assert rig.control is not None
    world = rig.control.world
    for error in (NotFound("no such kind", code=404), Forbidden("no", code=403), Unavailable("away")):
        flaky.fails = partial(_lists_fail, error)
        before = flaky.failed
        world.sweep_wanted.set()
        await rig.eventually(partial(_more_than, flaky, before), lambda: flaky.failed)
    assert world.tree.get(session.metadata.uid) is not None
    assert len(rig.host.machines) == 1


async def test_a_sweep_reads_again_only_what_has_changed(rig: ControlRig) -> None:
    same, changed = await rig.running_session("same"), await rig.running_session("changed")
    async with late_agent(rig) as late:
        assert rig.control is not None
        world = rig.control.world
        await rig.eventually(lambda: len(world.sessions.all()) == 2, world.sessions.all)
        before = world.sessions.get(same.metadata.uid)
        late.telling.clear()  # From here on only a sweep can learn anything.
        judged = {"spec": {"score": 7.0}}
        await rig.user.merge_patch(Session, rig.namespace, "changed", judged)
        late.listed.clear()
        world.sweep_wanted.set()
        await late.listing.wait()
        late.listed.set()
        await rig.until(Session, "changed", lambda each: each.status.score == 7.0)
        after = world.sessions.get(changed.metadata.uid)
        assert after is not None
        assert after.spec.score == 7.0
        assert world.sessions.get(same.metadata.uid) is before
        late.telling.set()


async def test_a_child_recorded_while_a_sweep_lists_keeps_its_machine(rig: ControlRig) -> None:
    await rig.running_session("root")
    async with late_agent(rig) as late:
        assert rig.control is not None
        world = rig.control.world
        await rig.eventually(lambda: len(world.sessions.all()) == 1, world.sessions.all)
        rig.engine.go_on.clear()
        await rig.fork("split", session="root")
        await rig.engine.waiting.wait()  # The Fork is known, and no machine of it is there.
        late.telling.clear()
        late.creating.clear()
        rig.engine.go_on.set()
        await rig.machines(2)
        late.listed.clear()
        world.sweep_wanted.set()
        await late.listing.wait()
        late.creating.set()
        await rig.eventually(lambda: len(world.records.sessions()) == 2, world.records.sessions)
        swept = world.sweep_wanted
        late.listed.set()
        swept.set()  # Another sweep only begins when the first has ended.
        await rig.eventually(lambda: not swept.is_set(), lambda: "sweeping")
        assert len(rig.host.machines) == 2
        late.telling.set()
        fork = await rig.until(Fork, "split", lambda each: each.status.recorded == 1)
        await rig.until(Session, fork.status.children[0].name, lambda each: each.status.ready)


async def test_a_child_orphaned_while_a_sweep_lists_keeps_its_machine(rig: ControlRig) -> None:
    await rig.running_session("root")
    (child,) = await rig.forked("split", session="root")
    async with late_agent(rig) as late:
        assert rig.control is not None
        world = rig.control.world
        await asyncio.wait_for(world.synced.wait(), WAIT_SECONDS)
        late.telling.clear()
        late.listed.clear()
        late.listing.clear()
        world.sweep_wanted.set()
        await asyncio.wait_for(late.listing.wait(), WAIT_SECONDS)
        # Sessions are listed, the child below its fork. Now that lets it go, and is in no list of forks.
        await rig.delete(Fork, "split", "Orphan")
        await rig.gone(Fork, "split")
        late.listed.set()
        await rig.eventually(lambda: len(rig.host.points) == 1, lambda: rig.host.points)
        assert len(rig.host.machines) == 2
        late.telling.set()
        alone = await rig.until(Session, child.metadata.name, lambda each: each.status.ready)
        assert alone.metadata.owner_references == ()


async def test_a_child_that_no_watch_told_of_keeps_its_machine_when_a_list_fails(rig: ControlRig) -> None:
    await rig.running_session("root")
    async with late_agent(rig) as late:
        assert rig.control is not None
        world = rig.control.world
        await rig.eventually(lambda: len(world.sessions.all()) == 1, world.sessions.all)
        rig.engine.go_on.clear()
        await rig.fork("split", session="root")
        await rig.engine.waiting.wait()
        late.telling.clear()
        rig.engine.go_on.set()
        await rig.eventually(lambda: len(world.records.sessions()) == 2, world.records.sessions)
        late.refusing = True
        swept = world.sweep_wanted
        swept.set()
        await asyncio.wait_for(late.refused.wait(), WAIT_SECONDS)
        swept.set()  # Another sweep only begins when this one has ended.
        await rig.eventually(lambda: not swept.is_set(), lambda: "sweeping")
        assert len(rig.host.machines) == 2
        late.refusing = False
        late.telling.set()
        fork = await rig.until(Fork, "split", lambda each: each.status.recorded == 1)
        await rig.until(Session, fork.status.children[0].name, lambda each: each.status.ready)


async def test_an_object_that_cannot_be_asked_about_keeps_its_machine(
    rig: ControlRig, flaky: FlakyClient
) -> None:
    root = await rig.running_session("root")
    await rig.stop()
    await rig.delete(Session, "root")
    flaky.fails = lambda method, path: Unavailable("away") if path.endswith("/sessions/root") else None
    await rig.start(flaky)
    assert rig.control is not None
    await rig.eventually(lambda: flaky.failed > 0, lambda: flaky.failed)
    assert [each.owner for each in rig.host.machines.values()] == [owner_of(root)]
    flaky.fails = None
    rig.control.world.sweep_wanted.set()
    await rig.machines(0)


async def test_a_child_whose_object_is_refused_is_ended_alone(rig: ControlRig, flaky: FlakyClient) -> None:
    await rig.running_session("root")
    refused: list[str] = []

    def fails(method: str, path: str) -> Exception | None:
        if method == "POST" and path.endswith("/sessions") and not refused:
            refused.append(path)
            return Forbidden("exceeded quota", code=403)
        return None

    flaky.fails = fails
    await rig.fork("split", session="root", replicas=3)
    fork = await rig.until(Fork, "split", lambda each: each.status.recorded == 2)
    assert sorted(child.phase for child in fork.status.children) == [
        SessionPhase.FAILED,
        SessionPhase.RUNNING,
        SessionPhase.RUNNING,
    ]
    assert "exceeded quota" in (fork.status.message or "")
    await rig.machines(3)


async def test_a_loser_that_is_forked_before_it_can_be_deleted_is_kept(
    rig: ControlRig, flaky: FlakyClient
) -> None:
    await rig.running_session("root")
    flaky.fails = lambda method, _: Unavailable("away") if method == "DELETE" else None
    source = ForkSource(session=SourceRef(name="root"))
    await rig.branched("search", ForkSpec(source=source, replicas=2, prune=Prune(keep_top=1)))
    await rig.eventually(lambda: flaky.failed > 0, lambda: flaky.failed)  # It is decided who lost.
    loser = (await rig.get(Fork, "search")).status.children[1].name
    (below,) = await rig.forked("below", session=loser)
    flaky.fails = None
    fork = await rig.until(Fork, "search", lambda each: each.status.phase is ForkPhase.COMPLETE)
    assert [each.phase for each in fork.status.children] == [SessionPhase.RUNNING] * 2
    assert not (await rig.get(Session, loser)).metadata.deleting
    assert (await rig.get(Session, below.metadata.name)).status.ready


async def test_who_lost_is_decided_once_however_late_it_is_carried_out(
    rig: ControlRig, flaky: FlakyClient
) -> None:
    await rig.running_session("root")
    flaky.fails = lambda method, _: Unavailable("away") if method == "DELETE" else None
    source = ForkSource(session=SourceRef(name="root"))
    await rig.branched("search", ForkSpec(source=source, replicas=2, prune=Prune(keep_top=1)))
    await rig.eventually(lambda: flaky.failed > 0, lambda: flaky.failed)
    loser = (await rig.get(Fork, "search")).status.children[1].name
    await rig.user.merge_patch(Session, rig.namespace, loser, {"spec": {"score": 7}})
    await rig.until(Session, loser, lambda each: each.status.score == 7)
    flaky.fails = None
    fork = await rig.until(Fork, "search", lambda each: each.status.phase is ForkPhase.COMPLETE)
    assert [each.phase for each in fork.status.children] == [SessionPhase.RUNNING, SessionPhase.RELEASED]
    assert [each.reason for each in fork.status.children] == [None, Reason.PRUNED]
    await rig.machines(2)


async def test_a_template_that_is_ready_before_its_session_could_say_so_is_made_ready_once(
    rig: ControlRig,
) -> None:
    async with late_agent(rig) as late:
        late.applying.clear()
        await rig.session("root")
        await rig.eventually(lambda: rig.engine.bakes == 1, lambda: rig.engine.bakes)
        late.applying.set()
        await rig.until(Session, "root", lambda each: each.status.ready)
        assert len(rig.engine.shapes) == 1


def _lists_fail(error: Exception, _method: str, path: str) -> Exception | None:
    return error if path.endswith("/sessions") else None


def _more_than(client: FlakyClient, before: int) -> bool:
    return client.failed > before
