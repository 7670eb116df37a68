"""A QEMU that stands still and answers nothing: its machine is ended as lost, and nobody waits for ever."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from component.node import Node, newcomer, running_node, settings, soon
from forktree_agent.engine.contract import Machine, MachineGone, ParentLost

pytestmark = pytest.mark.asyncio(loop_scope="session")

ANSWER_SECONDS = 2.0


@pytest.mark.parametrize("when", ["before", "meanwhile"])
async def test_a_parent_that_stands_still_is_ended_and_its_fork_fails(tmp_path: Path, when: str) -> None:
    async with running_node(tmp_path, settings(answer_seconds=ANSWER_SECONDS)) as node:
        other, parent = await node.root(name="other"), await node.root()
        before, usage = await node.keeper.listing(deadline=soon()), node.engine.usage()
        pid = await node.pid(parent)
        if when == "before":
            os.kill(pid, signal.SIGSTOP)
        forking = asyncio.create_task(node.fork(parent, 2), name="forking")
        if when == "meanwhile":
            await newcomer(node, {entry.machine for entry in before.machines})
            os.kill(pid, signal.SIGSTOP)
        with pytest.raises(ParentLost, match=r"lost while it was forked: QEMU did not answer .* for \d+ s"):
            await forking
        await reported(node, parent)
        after = await node.keeper.listing(deadline=soon())
        assert {entry.machine for entry in after.machines} == {other.id}
        assert after.files == before.files
        assert [point.tree for point in node.engine.points()] == [None]
        assert node.engine.usage().reserved_bytes < usage.reserved_bytes
        for kind in ("batch", "point", "layer"):
            assert len(list((node.journal / kind).iterdir())) == {"batch": 0}.get(kind, 1), kind
        (child,) = (await node.fork(other)).children
        assert await node.sh(child, "echo runs") == "runs\n"
        for machine in node.engine.machines():
            await node.engine.release(machine.id)


async def test_a_machine_that_stands_still_is_ended_when_it_is_to_be_paused(tmp_path: Path) -> None:
    async with running_node(tmp_path, settings(answer_seconds=ANSWER_SECONDS)) as node:
        machine = await node.root()
        os.kill(await node.pid(machine), signal.SIGSTOP)
        with pytest.raises(MachineGone, match=r"QEMU did not answer stop for 2 s"):
            await node.engine.pause(machine.id, deadline=soon())
        await reported(node, machine)
        assert (await node.keeper.listing(deadline=soon())).machines == ()


async def test_a_parent_that_stood_still_for_a_moment_is_forked_all_the_same(node: Node) -> None:
    parent = await node.root()
    before = {entry.machine for entry in (await node.keeper.listing(deadline=soon())).machines}
    pid = await node.pid(parent)
    forking = asyncio.create_task(node.fork(parent), name="forking")
    await newcomer(node, before)
    os.kill(pid, signal.SIGSTOP)
    await asyncio.sleep(1)  # That it stands still is all that happens.
    os.kill(pid, signal.SIGCONT)
    (child,) = (await forking).children
    assert await node.sh(child, "echo runs") == "runs\n"
    assert await node.sh(parent, "echo runs") == "runs\n"


async def reported(node: Node, machine: Machine) -> None:
    async with asyncio.timeout_at(soon()):
        ended = await anext(aiter(node.engine.exits()))
    assert (ended.machine, ended.owner) == (machine.id, machine.owner)
    assert ended.text.startswith("QEMU did not answer ")
    assert "and was ended" in ended.text
