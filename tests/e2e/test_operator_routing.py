"""Forks find their source's node or fail with one sentence, with a real API server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from e2e.operator_rig import OperatorRig
from forktree.models.conditions import ConditionStatus, ConditionType, find
from forktree.models.fork import Fork
from forktree.models.reasons import ForkPhase, Reason, SessionPhase
from forktree.models.session import Session

NO_UID = "00000000-0000-4000-8000-000000000000"


def routed(fork: Fork) -> bool:
    return fork.status.node is not None


def settled(fork: Fork) -> bool:
    return routed(fork) or fork.status.phase.terminal


@pytest.fixture
async def node(rig: OperatorRig) -> AsyncIterator[str]:
    """One node and the template, with an operator at work."""
    await rig.add_node("n1", capacity_mib=65536)
    await rig.add_template()
    async with rig.operator():
        yield "n1"


async def test_a_fork_of_a_running_session_goes_to_its_node_in_one_write(rig: OperatorRig, node: str) -> None:
    source = await rig.running_session("root")
    made = await rig.add_fork("f", session="root", uid=source.metadata.uid)
    fork = await rig.until(Fork, "f", settled)
    assert (fork.status.node, fork.status.phase, fork.status.reason) == (node, ForkPhase.PENDING, None)
    assert fork.metadata.resource_version != made.metadata.resource_version
    assert not fork.metadata.finalizers
    assert not fork.metadata.annotations


async def test_a_fork_of_an_earlier_instant_goes_to_that_forks_node(rig: OperatorRig, node: str) -> None:
    await rig.running_session("root")
    await rig.add_fork("first", session="root")
    await rig.until(Fork, "first", routed)
    await rig.add_fork("second", fork="first")
    assert (await rig.until(Fork, "second", settled)).status.node == node


async def test_a_fork_waits_for_a_source_that_is_made_after_it(rig: OperatorRig, node: str) -> None:
    await rig.add_fork("f", session="root")
    await rig.add_session("root", template="late")
    waiting = await rig.until(Fork, "f", lambda f: f.status.reason == Reason.SOURCE_NOT_READY)
    assert waiting.status.message == "session root has no node yet"
    await rig.add_template("late")
    fork = await rig.until(Fork, "f", settled)
    assert (fork.status.node, fork.status.reason, fork.status.message) == (node, None, None)


@pytest.mark.parametrize(
    ("source", "uid", "reason", "message"),
    [
        pytest.param(
            "nobody",
            None,
            Reason.SOURCE_NOT_FOUND,
            "there is no session named nobody in this namespace",
            id="unknown",
        ),
        pytest.param(
            "root",
            NO_UID,
            Reason.SOURCE_GONE,
            f"session root with uid {NO_UID} is gone; another has its name now",
            id="another uid",
        ),
        pytest.param(
            "failed",
            None,
            Reason.SOURCE_FAILED,
            "session failed has failed: the machine was killed",
            id="failed",
        ),
        pytest.param(
            "released",
            None,
            Reason.SOURCE_GONE,
            "session released was released and has no machine any more",
            id="released",
        ),
        pytest.param(
            "deleting", None, Reason.SOURCE_GONE, "session deleting is being deleted", id="deleting"
        ),
        pytest.param(
            "slow",
            None,
            Reason.DEADLINE_EXCEEDED,
            "waited 6 s for the source: session slow has no node yet",
            id="never ready",
        ),
    ],
)
@pytest.mark.usefixtures("node")
async def test_a_fork_that_cannot_be_fails_with_one_sentence(
    rig: OperatorRig, source: str, uid: str | None, reason: Reason, message: str
) -> None:
    await _make_source(rig, source)
    await rig.add_fork("f", session=source, uid=uid, timeout_seconds=6)
    fork = await rig.until(Fork, "f", settled)
    assert (fork.status.phase, fork.status.reason, fork.status.message) == (ForkPhase.FAILED, reason, message)
    assert fork.status.node is None
    ready = find(fork.status.conditions, ConditionType.READY)
    assert ready is not None
    assert (ready.status, ready.reason) == (ConditionStatus.FALSE, reason)


async def _make_source(rig: OperatorRig, name: str) -> None:
    match name:
        case "root":
            await rig.running_session(name)
        case "failed":
            await rig.running_session(name)
            await rig.set_session(name, phase=SessionPhase.FAILED, message="the machine was killed")
        case "released":
            await rig.running_session(name)
            await rig.set_session(name, phase=SessionPhase.RELEASED)
        case "deleting":
            session = await rig.running_session(name)
            hold = {"metadata": {"finalizers": ["forktree.dev/test"], "uid": session.metadata.uid}}
            await rig.client.merge_patch(Session, rig.namespace, name, hold)
            await rig.client.delete(Session, rig.namespace, name)
        case "slow":
            await rig.add_session(name, template="never-made")
        case _:
            pass


async def test_a_fork_of_an_instant_that_is_gone_fails(rig: OperatorRig, node: str) -> None:
    await rig.running_session("root")
    await rig.add_fork("first", session="root")
    await rig.until(Fork, "first", routed)
    await rig.set_fork("first", phase=ForkPhase.RUNNING, point=ConditionStatus.FALSE)
    await rig.add_fork("second", fork="first")
    fork = await rig.until(Fork, "second", settled)
    assert (fork.status.phase, fork.status.reason) == (ForkPhase.FAILED, Reason.POINT_LOST)


async def test_a_fork_made_while_no_operator_runs_is_routed_by_the_next(rig: OperatorRig) -> None:
    await rig.add_node("n1")
    await rig.add_template()
    async with rig.operator() as first:
        await rig.running_session("root")
    await rig.add_fork("f", session="root")
    await asyncio.sleep(0.5)
    assert not routed(await rig.get(Fork, "f"))
    async with rig.operator() as second:
        assert (await rig.until(Fork, "f", settled)).status.node == "n1"
    assert first.identity != second.identity


async def test_a_burst_of_forks_is_routed_without_a_loss(rig: OperatorRig, node: str) -> None:
    await rig.running_session("root")
    names = [f"f{number}" for number in range(100)]
    began = time.monotonic()
    await asyncio.gather(*(rig.add_fork(name, session="root") for name in names))
    forks = await rig.until_all(Fork, names, settled)
    print(f"100 forks made and routed in {time.monotonic() - began:.2f} s")
    assert {fork.status.node for fork in forks} == {node}
    # One write each: what would be a second version of the object is the operator's only one.
    assert {fork.status.phase for fork in forks} == {ForkPhase.PENDING}
