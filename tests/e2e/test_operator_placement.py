"""Roots find their nodes, with a real API server and nodes that are only objects."""

from __future__ import annotations

import asyncio

from e2e.operator_rig import MIB, OperatorRig
from forktree.models.fork_node import ForkNodeStatus
from forktree.models.reasons import Reason
from forktree.models.session import Session
from forktree_dev.processes import boot_id


def placed(session: Session) -> bool:
    return session.spec.node_name is not None


async def test_a_root_goes_to_the_ready_node_with_most_room(rig: OperatorRig) -> None:
    await rig.add_node("full", capacity_mib=4096, reserved_mib=4000)
    await rig.add_node("roomy", capacity_mib=2048)
    await rig.add_node("broken", capacity_mib=8192, ready=False)
    await rig.add_node("silent", capacity_mib=8192)
    await rig.silence("silent")
    await asyncio.sleep(4)  # The silent node's Lease runs out: nothing that could be awaited tells.
    await rig.add_template()
    async with rig.operator():
        await rig.add_session("s")
        session = await rig.until(Session, "s", placed)
    assert session.spec.node_name == "roomy"


async def test_objects_may_come_in_any_order(rig: OperatorRig) -> None:
    async with rig.operator():
        await rig.add_session("s")
        waiting = await rig.until(Session, "s", lambda s: s.status.reason == Reason.TEMPLATE_NOT_FOUND)
        assert waiting.status.message == "there is no session template named tiny in this namespace"
        assert waiting.status.phase == "Pending"
        await rig.add_template()
        waiting = await rig.until(Session, "s", lambda s: s.status.reason == Reason.UNSCHEDULED)
        assert waiting.status.message == "no ready node"
        await rig.add_node("n1")
        assert (await rig.until(Session, "s", placed)).spec.node_name == "n1"


async def test_a_root_without_room_says_so_once_and_goes_on_when_there_is_room(rig: OperatorRig) -> None:
    await rig.add_node("n1", capacity_mib=2048, reserved_mib=1920)
    await rig.add_template(memory="512Mi")
    async with rig.operator():
        await rig.add_session("s")
        waiting = await rig.until(Session, "s", lambda s: s.status.reason == Reason.UNSCHEDULED)
        assert waiting.status.message == (
            "no node has room: a machine of 512 MiB and the baseline of its template takes 1120 MiB, and "
            "node n1, which comes closest, has 128 MiB free"
        )
        await asyncio.sleep(5)  # Two sweeps ask again, and have nothing new to say.
        again = await rig.get(Session, "s")
        assert again.metadata.resource_version == waiting.metadata.resource_version
        status = ForkNodeStatus(ready=True, capacity_bytes=2048 * MIB, reserved_bytes=0, boot_id=boot_id())
        await rig.set_node("n1", status)
        await rig.until(Session, "s", placed)


async def test_a_burst_of_roots_does_not_overfill_a_node_before_its_agent_counts(rig: OperatorRig) -> None:
    await rig.add_node("n1", capacity_mib=256 + 4 * 352)  # The first session brings the baseline.
    await rig.add_node("n2", capacity_mib=256 + 3 * 352 - 1)
    await rig.add_template(memory="256Mi")
    async with rig.operator():
        names = [f"s{number}" for number in range(8)]
        await asyncio.gather(*(rig.add_session(name) for name in names))
        sessions = await rig.until_all(
            Session, names, lambda s: placed(s) or s.status.reason == Reason.UNSCHEDULED
        )
    nodes = [session.spec.node_name for session in sessions]
    assert (nodes.count("n1"), nodes.count("n2"), nodes.count(None)) == (4, 2, 2)


async def test_a_session_that_goes_while_it_waits_disturbs_nobody(rig: OperatorRig) -> None:
    async with rig.operator():
        await rig.add_session("first", template="missing")
        await rig.until(Session, "first", lambda s: s.status.reason == Reason.TEMPLATE_NOT_FOUND)
        await rig.client.delete(Session, rig.namespace, "first")
        await rig.add_template()
        await rig.add_node("n1")
        await rig.add_session("second")
        await rig.until(Session, "second", placed)
