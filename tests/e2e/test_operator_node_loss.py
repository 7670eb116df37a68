"""What a silent agent and a lost node do to the sessions and forks there."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest

from e2e.operator_rig import OperatorRig
from forktree.models.conditions import ConditionStatus, ConditionType, find
from forktree.models.fork import Fork
from forktree.models.fork_node import ForkNode
from forktree.models.reasons import ForkPhase, Reason, SessionPhase
from forktree.models.session import Session
from forktree_dev import provisioning


def ready_is_unknown(session: Session) -> bool:
    ready = find(session.status.conditions, ConditionType.READY)
    return ready is not None and ready.status is ConditionStatus.UNKNOWN


def failed(each: Session | Fork) -> bool:
    return each.status.phase in {SessionPhase.FAILED, ForkPhase.FAILED}


@pytest.fixture
async def forked(rig: OperatorRig) -> AsyncIterator[OperatorRig]:
    """A session and a fork of it on node `lost`, and a session that had ended before."""
    await rig.add_node("lost")
    await rig.add_template()
    async with rig.operator():
        await rig.running_session("root")
        await rig.running_session("ended")
        await rig.set_session("ended", phase=SessionPhase.RELEASED)
        await rig.add_fork("f", session="root")
        await rig.until(Fork, "f", lambda fork: fork.status.node is not None)
        await rig.set_fork("f", phase=ForkPhase.RUNNING, point=ConditionStatus.TRUE)
        yield rig


async def test_sessions_of_a_silent_agent_are_in_doubt_until_it_is_back(forked: OperatorRig) -> None:
    await forked.silence("lost")
    session = await forked.until(Session, "root", ready_is_unknown)
    assert (session.status.phase, session.status.reason) == (SessionPhase.RUNNING, Reason.AGENT_LOST)
    assert session.status.message == (
        "the agent of node lost is silent; whether the machine runs is not known"
    )
    assert (await forked.get(Session, "ended")).status.reason is None
    assert (await forked.get(Fork, "f")).status.phase is ForkPhase.RUNNING

    await forked.add_fork("while-lost", session="root")
    waiting = await forked.until(Fork, "while-lost", lambda f: f.status.reason == Reason.SOURCE_NOT_READY)
    assert waiting.status.message == "the agent of node lost, where session root runs, does not answer"
    await forked.start_heartbeat("lost")
    await forked.until(Fork, "while-lost", lambda f: f.status.node == "lost")


async def test_a_node_that_is_gone_fails_what_ran_there(forked: OperatorRig) -> None:
    await forked.silence("lost")
    await forked.plane.kubectl.run("delete", "node", "lost")
    await _all_failed(forked, "node lost is gone, and the machine with it")


async def test_a_node_that_was_restarted_fails_what_ran_there(forked: OperatorRig) -> None:
    await forked.silence("lost")
    await provisioning.create_node(forked.plane.kubectl, "lost", boot="another-boot")
    await _all_failed(forked, "node lost was restarted, and the machine is gone")


async def test_a_node_whose_own_record_went_with_it_fails_what_ran_there(forked: OperatorRig) -> None:
    await forked.silence("lost")
    await forked.plane.kubectl.run("delete", "node", "lost")
    await forked.client.delete(ForkNode, None, "lost")
    await _all_failed(forked, "node lost is gone, and the machine with it")


async def _all_failed(forked: OperatorRig, message: str) -> None:
    session = await forked.until(Session, "root", failed)
    fork = await forked.until(Fork, "f", failed)
    for each in (session, fork):
        assert (each.status.reason, each.status.message) == (Reason.NODE_LOST, message)
    point = find(fork.status.conditions, ConditionType.POINT_AVAILABLE)
    assert point is not None
    assert point.status is ConditionStatus.FALSE
    assert (await forked.get(Session, "ended")).status.phase is SessionPhase.RELEASED
    assert await _told_of_loss(forked) == [("Session", "root", message)]


async def _told_of_loss(forked: OperatorRig) -> list[tuple[str, str, str]]:
    """Kind, name and note of the Events about it, once there are any."""
    path = f"/apis/events.k8s.io/v1/namespaces/{forked.namespace}/events"
    deadline = asyncio.get_running_loop().time() + 20
    while True:
        items = json.loads(await forked.client.raw("GET", path))["items"]
        told = [
            (each["regarding"]["kind"], each["regarding"]["name"], each["note"])
            for each in items
            if each["reason"] == "NodeLost"
        ]
        if told or asyncio.get_running_loop().time() > deadline:
            return told
        await asyncio.sleep(0.05)
