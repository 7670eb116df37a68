"""Forks that are made before their objects are written: what becomes of them, whatever comes in between."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TypeVar

import pytest

from e2e.control_rig import ControlRig
from e2e.late_client import LateClient, late_agent
from forktree.kube.access import ClusterAccess
from forktree.kube.errors import NotFound, Unavailable
from forktree.models import ApiObject, Fork, ForkPhase, Reason, Session, SessionPhase
from forktree.models.conditions import ConditionStatus, ConditionType, find
from forktree.models.names import BORN_ANNOTATION, BORN_ON_ANNOTATION, ROOT_LABEL
from forktree.models.session_template import TreeLimits
from forktree_agent.control.early import Forked, NameTaken, Outcome, Refused
from forktree_agent.control.owners import is_early
from forktree_agent.engine.contract import Command, MachineGone, Owner
from forktree_dev.control_plane import ControlPlane

ObjectT = TypeVar("ObjectT", bound=ApiObject)

SECONDS = 20.0


@pytest.fixture
async def rig(control_plane: ControlPlane, namespace: str, tmp_path: Path) -> AsyncIterator[ControlRig]:
    async with ControlRig.running(control_plane, namespace, tmp_path) as rig:
        yield rig


def soon() -> float:
    return asyncio.get_running_loop().time() + SECONDS


def go_on(_: str) -> None:
    """Do not die here."""


async def fork(
    rig: ControlRig, parent: str, name: str, replicas: int = 1, labels: dict[str, str] | None = None
) -> Outcome | None:
    """As the HTTP API asks for it."""
    assert rig.control is not None
    session = rig.control.facade.session(rig.namespace, parent)
    assert session is not None
    return await rig.control.facade.early.fork(
        session, name, replicas, labels or {}, seen_at=time.monotonic(), deadline=soon()
    )


async def forked(
    rig: ControlRig, parent: str, name: str, replicas: int = 1, labels: dict[str, str] | None = None
) -> list[str]:
    """Fork, and name the children."""
    outcome = await fork(rig, parent, name, replicas, labels)
    assert isinstance(outcome, Forked), outcome
    assert outcome.made
    return [outcome.record.child_name(index) for index in range(replicas)]


async def swept(rig: ControlRig, late: LateClient) -> None:
    """Have a sweep begin, and let it go on from its list."""
    assert rig.control is not None
    late.listing.clear()
    late.listed.clear()
    rig.control.world.sweep_wanted.set()
    await late.listing.wait()
    late.listed.set()


def child(rig: ControlRig, name: str) -> Session:
    assert rig.control is not None
    found = rig.control.facade.session(rig.namespace, name)
    assert found is not None, name
    return found


async def echo(rig: ControlRig, name: str) -> Owner:
    """Run something in a child, and return which machine it ran in."""
    assert rig.control is not None
    await rig.control.facade.exec(child(rig, name), Command(argv=("echo",)), deadline=soon())
    owner, _ = rig.host.ran[-1]
    return owner


async def no_fork(rig: ControlRig, name: str) -> None:
    with pytest.raises(NotFound):
        await rig.get(Fork, name)


async def there(rig: ControlRig, name: str, kind: type[Fork] | type[Session] = Fork) -> None:
    """Wait until an object of that name exists."""
    async with asyncio.timeout(SECONDS):
        while True:
            try:
                await rig.user.get(kind, rig.namespace, name)
            except NotFound:
                await asyncio.sleep(0.02)
            else:
                return


async def recorded(rig: ControlRig, name: str, children: list[str]) -> Fork:
    """Wait until a fork and its children are recorded, and see that all of it is there once."""
    await there(rig, name)
    fork = await rig.until(Fork, name, lambda each: each.status.recorded == len(children))
    assert fork.status.ready
    assert fork.status.node == rig.settings.node_name
    assert [each.name for each in fork.status.children] == children
    for each in children:
        session = await rig.until(Session, each, lambda found: found.status.ready)
        assert session.metadata.owner_references == (fork.owner_reference(),)
    listed = await rig.user.list(Session, rig.namespace)
    assert sorted(each.metadata.name for each in listed.items if each.spec.fork_ref) == sorted(children)
    assert len((await rig.user.list(Fork, rig.namespace)).items) == 1
    owners = {each.owner for each in rig.host.machines.values()}
    assert {Owner(f"fork/{fork.metadata.uid}/{index}") for index in range(len(children))} <= owners
    assert len(owners) == len(children) + 1
    assert [each.owner for each in rig.host.points.values() if each.tree] == [f"fork/{fork.metadata.uid}"]
    assert rig.control is not None
    assert [each.uid for each in rig.control.world.records.forks()] == [fork.metadata.uid]
    return fork


async def test_a_fork_is_answered_before_any_object_is_written(rig: ControlRig) -> None:
    async with late_agent(rig) as late:
        root = await rig.running_session("root")
        late.creating.clear()
        outcome = await fork(rig, "root", "fast", 2)
        assert isinstance(outcome, Forked)
        await no_fork(rig, "fast")
        await rig.machines(3)
        names = [outcome.record.child_name(index) for index in range(2)]
        assert {await echo(rig, each) for each in names} == {
            each.owner
            for each in rig.host.machines.values()
            if is_early(each.owner.split("/")[1])  # type: ignore[arg-type]
        }
        late.creating.set()
        made = await recorded(rig, "fast", names)
    assert made.metadata.owner_references == (root.owner_reference(),)
    assert made.metadata.labels[ROOT_LABEL] == root.metadata.uid
    assert made.metadata.annotations[BORN_ON_ANNOTATION] == rig.settings.node_name
    assert made.metadata.annotations[BORN_ANNOTATION] == outcome.record.uid
    assert made.status.parent_uid == root.metadata.uid
    assert made.status.phase is ForkPhase.COMPLETE
    assert made.status.ready_ms == 9.0
    assert made.status.total_ms is not None


async def test_a_child_is_the_same_machine_before_and_after_its_object(rig: ControlRig) -> None:
    await rig.running_session("root")
    (name,) = await forked(rig, "root", "fast")
    await recorded(rig, "fast", [name])
    machines = set(rig.host.machines)
    assert await echo(rig, name) == f"fork/{(await rig.get(Fork, 'fast')).metadata.uid}/0"
    assert set(rig.host.machines) == machines
    assert (await rig.forked("again", session=name))[0].status.depth == 2


async def test_what_is_sent_to_a_child_waits_for_its_identity(rig: ControlRig) -> None:
    await rig.running_session("root")
    rig.engine.identities.clear()
    (name,) = await forked(rig, "root", "fast")
    running = asyncio.create_task(echo(rig, name))
    await no_fork(rig, "fast")
    assert rig.host.ran == []
    rig.engine.identities.set()
    await running
    await recorded(rig, "fast", [name])


async def test_a_child_is_forked_once_it_has_its_object(rig: ControlRig) -> None:
    async with late_agent(rig) as late:
        await rig.running_session("root")
        late.creating.clear()
        (name,) = await forked(rig, "root", "fast")
        assert rig.control is not None
        waiting = asyncio.create_task(rig.control.facade.recorded(child(rig, name), deadline=soon()))
        done, _ = await asyncio.wait([waiting], timeout=0)
        assert not done
        late.creating.set()
        parent = await waiting
        assert parent is not None
        assert parent.metadata.uid
        (below,) = await forked(rig, name, "deeper")
        await there(rig, below, Session)
        assert (await rig.until(Session, below, lambda each: each.status.ready)).status.depth == 2


async def test_a_repeated_call_is_the_same_fork_and_another_one_a_conflict(rig: ControlRig) -> None:
    async with late_agent(rig) as late:
        await rig.running_session("root")
        await rig.running_session("other")
        late.creating.clear()
        rig.engine.go_on.clear()
        first = asyncio.create_task(fork(rig, "root", "once", 2))
        await rig.engine.waiting.wait()
        second = asyncio.create_task(fork(rig, "root", "once", 2))
        assert isinstance(await fork(rig, "root", "once", 3), NameTaken)
        assert isinstance(await fork(rig, "other", "once", 2), NameTaken)
        rig.engine.go_on.set()
        one, two = await first, await second
        three = await fork(rig, "root", "once", 2)
        assert isinstance(one, Forked)
        assert isinstance(two, Forked)
        assert isinstance(three, Forked)
        assert (one.made, two.made, three.made) == (True, False, False)
        assert one.record.uid == two.record.uid == three.record.uid
        await rig.machines(4)
        late.creating.set()
        await there(rig, "once")
        await rig.until(Fork, "once", lambda each: each.status.recorded == 2)
        # Whoever asks now is answered by the object.
        assert await fork(rig, "root", "once", 2) is None


class Dies(LateClient):
    """Creations do not get through: before they reach the server, or their answers after."""

    lost: str = ""

    async def create(
        self, obj: ObjectT, *, manager: str | None = None, deadline: float | None = None
    ) -> ObjectT:
        if isinstance(obj, Fork) and self.lost == "before":
            raise Unavailable("away")
        made = await super().create(obj, manager=manager, deadline=deadline)
        if isinstance(obj, Fork) and self.lost == "after":
            raise Unavailable("the answer was lost")
        return made


@pytest.mark.parametrize("lost", ["before", "after"])
async def test_a_fork_that_was_answered_is_recorded_by_the_next_agent(rig: ControlRig, lost: str) -> None:
    await rig.stop()
    async with Dies.connected(ClusterAccess.from_kubeconfig(rig.folder / "agent.kubeconfig")) as dying:
        assert isinstance(dying, Dies)
        await rig.start(dying)
        await rig.running_session("root")
        dying.lost = lost
        names = await forked(rig, "root", "fast", 2, {"team": "x"})
        if lost == "after":
            await there(rig, "fast")
        await rig.restart()
    await recorded(rig, "fast", names)
    for name in names:
        assert (await rig.agent.get(Session, rig.namespace, name)).metadata.labels["team"] == "x"


async def test_a_fork_whose_node_forgot_its_machines_is_not_forked_again(rig: ControlRig) -> None:
    await rig.running_session("root")
    metadata = {
        "name": "lost",
        "namespace": rig.namespace,
        "annotations": {BORN_ANNOTATION: "early-of-before", BORN_ON_ANNOTATION: rig.settings.node_name},
    }
    spec = {"source": {"session": {"name": "root"}}}
    made = await rig.agent.create(Fork.model_validate({"metadata": metadata, "spec": spec}))
    await rig.route(made)
    lost = await rig.until(Fork, "lost", lambda each: each.status.phase is ForkPhase.FAILED)
    assert lost.status.reason is Reason.MACHINE_LOST
    await rig.machines(1)


async def test_an_agent_that_dies_while_it_gives_machines_over_leaves_that_to_the_next(
    rig: ControlRig,
) -> None:
    await rig.running_session("root")

    def die(step: str) -> None:
        if step == "given":
            raise RuntimeError("killed")

    rig.engine.hook = die
    names = await forked(rig, "root", "fast", 3)
    await there(rig, "fast")
    await rig.eventually(lambda: bool(rig.host.given), lambda: rig.host.given)
    await rig.stop()
    rig.engine.hook = go_on
    await rig.restart()
    await recorded(rig, "fast", names)


async def test_a_fork_that_was_not_answered_leaves_nothing(rig: ControlRig) -> None:
    await rig.running_session("root")

    def die(step: str) -> None:
        if step == "forked":
            raise RuntimeError("killed")

    rig.engine.hook = die
    outcome = await fork(rig, "root", "fast", 2)
    assert isinstance(outcome, Refused)
    await rig.stop()
    rig.engine.hook = go_on
    await rig.restart()
    await rig.machines(1)
    await no_fork(rig, "fast")


async def test_an_api_server_that_is_away_delays_objects_and_nothing_else(rig: ControlRig) -> None:
    await rig.stop()
    async with Dies.connected(ClusterAccess.from_kubeconfig(rig.folder / "agent.kubeconfig")) as away:
        assert isinstance(away, Dies)
        await rig.start(away)
        await rig.running_session("root")
        away.lost = "before"
        names = await forked(rig, "root", "fast", 2)
        for each in names:
            await echo(rig, each)
        await swept(rig, away)
        await swept(rig, away)  # And so the first is over, whatever it ended.
        await rig.machines(3)
        await no_fork(rig, "fast")
        away.lost = ""
        await recorded(rig, "fast", names)
        await rig.stop()


async def test_a_sweep_that_began_before_the_objects_ends_none_of_their_machines(rig: ControlRig) -> None:
    async with late_agent(rig) as late:
        await rig.running_session("root")
        late.creating.clear()
        names = await forked(rig, "root", "fast", 2)
        assert rig.control is not None
        world = rig.control.world
        late.listed.clear()
        world.sweep_wanted.set()
        await late.listing.wait()  # It knows the machines by what they were called before.
        late.creating.set()
        await recorded(rig, "fast", names)
        late.listed.set()
        await swept(rig, late)  # The next one: that one is over.
        await recorded(rig, "fast", names)


async def test_a_name_that_another_fork_has_ends_the_children_and_says_so(rig: ControlRig) -> None:
    await rig.running_session("root")
    async with late_agent(rig) as late:
        await rig.until(Session, "root", lambda each: each.status.ready)
        assert rig.control is not None
        await rig.control.world.synced.wait()
        late.creating.clear()
        (name,) = await forked(rig, "root", "taken")
        await rig.user.create(
            Fork.model_validate(
                {
                    "metadata": {"name": "taken", "namespace": rig.namespace},
                    "spec": {"source": {"session": {"name": "elsewhere"}}},
                }
            )
        )
        late.creating.set()
        await rig.machines(1)
        facade = rig.control.facade
        await rig.eventually(lambda: facade.session(rig.namespace, name) is None, lambda: name)
        assert "the name taken is taken by another Fork" in (facade.why_gone(rig.namespace, name) or "")
        records = rig.control.world.records
        await rig.eventually(lambda: not records.forks(), records.forks)
    other = await rig.get(Fork, "taken")
    assert BORN_ANNOTATION not in other.metadata.annotations
    assert other.status.node is None


async def quota(rig: ControlRig, plane: ControlPlane, resource: str, most: int) -> None:
    """Returns when it counts what is there: until then it may be unknown to whoever admits."""
    counted, namespace = f"count/{resource}.forktree.dev", f"--namespace={rig.namespace}"
    await plane.kubectl.run("create", "quota", "few", f"--hard={counted}={most}", namespace)
    field = counted.replace(".", r"\.")
    told = f"--for=jsonpath={{.status.used.{field}}}"
    await plane.kubectl.run("wait", "quota/few", told, namespace, "--timeout=60s")


@pytest.mark.parametrize("refused", ["forks", "sessions"])
async def test_a_quota_ends_only_what_it_refuses(
    rig: ControlRig, control_plane: ControlPlane, refused: str
) -> None:
    await rig.running_session("root")
    await quota(rig, control_plane, refused, 0 if refused == "forks" else 2)
    names = await forked(rig, "root", "fast", 2)
    assert rig.control is not None
    facade = rig.control.facade
    left = 1 if refused == "forks" else 2
    await rig.machines(left)
    gone = [each for each in names if facade.why_gone(rig.namespace, each)]
    await rig.eventually(
        lambda: len([each for each in names if facade.why_gone(rig.namespace, each)]) == 3 - left,
        lambda: gone,
    )
    for each in names:
        why = facade.why_gone(rig.namespace, each)
        assert why is None or "quota" in why
    if refused == "forks":
        await no_fork(rig, "fast")
    else:
        await there(rig, "fast")
        fork = await rig.until(Fork, "fast", lambda each: each.status.recorded == 1)
        assert fork.status.phase is ForkPhase.COMPLETE


async def test_what_is_deleted_above_takes_children_without_objects_along(rig: ControlRig) -> None:
    async with late_agent(rig) as late:
        await rig.running_session("root")
        late.creating.clear()
        (name,) = await forked(rig, "root", "fast")
        await rig.delete(Session, "root")
        await rig.machines(0)
        assert rig.control is not None
        facade = rig.control.facade
        await rig.eventually(lambda: facade.session(rig.namespace, name) is None, lambda: name)
        assert "root" in (facade.why_gone(rig.namespace, name) or "")
        late.creating.set()
        await rig.eventually(
            lambda: not rig.host.points or all(not each.tree for each in rig.host.points.values()), str
        )
    await rig.restart()
    await no_fork(rig, "fast")


async def test_what_is_deleted_while_it_is_forked_has_no_children(rig: ControlRig) -> None:
    await rig.running_session("root")
    rig.engine.go_on.clear()
    forking = asyncio.create_task(fork(rig, "root", "fast"))
    await rig.engine.waiting.wait()
    await rig.delete(Session, "root")
    outcome = await forking
    assert isinstance(outcome, Refused)
    assert outcome.reason is Reason.SOURCE_GONE
    await rig.machines(0)
    assert rig.control is not None
    assert not rig.control.world.records.forks()


async def test_a_child_that_does_not_answer_ends_alone(rig: ControlRig) -> None:
    await rig.running_session("root")
    rig.engine.identities.clear()
    names = await forked(rig, "root", "fast", 2)
    rig.engine.mute.add(names[1])
    rig.engine.identities.set()
    await rig.machines(2)
    await there(rig, "fast")
    fork = await rig.until(Fork, "fast", lambda each: each.status.recorded == 2)
    ready = find(fork.status.conditions, ConditionType.READY)
    assert ready is not None
    assert (ready.status, ready.reason) == (ConditionStatus.FALSE, "NotAllAnswered")
    assert not fork.status.ready
    assert fork.status.ready_ms is None
    assert (await rig.until(Session, names[0], lambda each: each.status.ready)).status.phase is (
        SessionPhase.RUNNING
    )
    lost = await rig.until(Session, names[1], lambda each: each.status.phase.terminal)
    assert lost.status.phase is SessionPhase.FAILED
    assert "did not answer" in (lost.status.message or "")
    assert rig.control is not None
    with pytest.raises(MachineGone):
        await rig.control.facade.heard(child(rig, names[1]), deadline=soon())


async def test_limits_hold_at_once(rig: ControlRig) -> None:
    await rig.template("few", limits=TreeLimits(live=2, depth=1))
    await rig.running_session("root", "few")
    outcome = await fork(rig, "root", "many", 2)
    assert isinstance(outcome, Refused)
    assert outcome.reason is Reason.LIVE_LIMIT
    (name,) = await forked(rig, "root", "one")
    await there(rig, name, Session)
    await rig.until(Session, name, lambda each: each.status.ready)
    deep = await fork(rig, name, "deep")
    assert isinstance(deep, Refused)
    assert deep.reason is Reason.DEPTH_LIMIT
    rig.engine.capacity = 2
    await rig.delete(Fork, "one")
    await rig.machines(1)
    rig.engine.capacity = 1
    full = await fork(rig, "root", "full")
    assert isinstance(full, Refused)
    assert full.reason is Reason.AT_CAPACITY
    await rig.measured('forktree_at_capacity_refusals_total{road="early"}', 1)
    for reason in (Reason.LIVE_LIMIT, Reason.DEPTH_LIMIT, Reason.AT_CAPACITY):
        await rig.measured(f'forktree_fork_failures_total{{reason="{reason}"}}', 1)
    await rig.machines(1)
    await no_fork(rig, "many")
    await no_fork(rig, "full")


async def test_an_instant_alone_is_recorded_too(rig: ControlRig) -> None:
    await rig.running_session("root")
    outcome = await fork(rig, "root", "instant", 0)
    assert isinstance(outcome, Forked)
    assert rig.control is not None
    async with asyncio.timeout(SECONDS):
        await rig.control.facade.early.recorded(rig.namespace, "instant")
    await there(rig, "instant")
    done = await rig.until(Fork, "instant", lambda each: each.status.phase is ForkPhase.COMPLETE)
    assert done.status.fork_point_id
    assert len(await rig.forked("from", fork="instant")) == 1


async def test_more_forks_than_the_api_server_takes_wait_for_their_objects(
    rig: ControlRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forktree_agent.control.early.UNRECORDED_MAX", 1)
    async with late_agent(rig) as late:
        await rig.running_session("root")
        late.creating.clear()
        await forked(rig, "root", "first")
        assert await fork(rig, "root", "second") is None
        late.creating.set()
        await there(rig, "first")
        await rig.until(Fork, "first", lambda each: each.status.recorded == 1)
        await forked(rig, "root", "second")
