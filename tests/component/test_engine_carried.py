"""Commands under way at a fork: they go on in the parent and in every child, each answering for itself."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from component.keeper_fixtures import running_keeper
from component.node import Node, engine_on, order, soon
from forktree_agent.engine.contract import (
    Command,
    DeadlineExceeded,
    ExecNotFound,
    ExecResult,
    Machine,
    MachineGone,
)

pytestmark = pytest.mark.asyncio(loop_scope="session")

PATIENT = "echo before; echo begun > /tmp/begun; cat /tmp/go; echo after >&2; exit 5"


async def begun(
    node: Node, machine: Machine, exec_id: str, script: str = PATIENT
) -> asyncio.Task[ExecResult]:
    """A command under way: it has written, and waits for somebody to write to /tmp/go."""
    await node.sh(machine, "mkfifo /tmp/begun /tmp/go")
    command = Command(argv=("/bin/sh", "-c", script), id=exec_id, timeout_seconds=100)
    running = asyncio.create_task(node.engine.exec(machine.id, command, deadline=soon()), name=exec_id)
    assert await node.sh(machine, "cat /tmp/begun") == "begun\n"
    return running


def ids(node: Node, machine: Machine) -> tuple[str, ...]:
    return tuple(each.id for each in node.engine.execs(machine.id))


async def test_a_command_goes_on_in_every_child_under_its_id_with_an_end_of_its_own(node: Node) -> None:
    parent = await node.root()
    running = await begun(node, parent, "work")
    assert ids(node, parent) == ("work",)
    first, second = (await node.fork(parent, 2)).children
    assert ids(node, first) == ids(node, second) == ("work",)
    with pytest.raises(DeadlineExceeded):  # It has not ended, and giving up leaves it alone.
        await node.engine.attach(first.id, "work", deadline=soon() - 119.5)

    await node.sh(first, "echo first > /tmp/go")
    ended = await node.engine.attach(first.id, "work", deadline=soon())
    # Only what it wrote since: the rest is the parent's.
    assert (ended.exit_code, ended.stdout, ended.stderr) == (5, b"first\n", b"after\n")
    assert not running.done()
    await node.sh(second, "echo second > /tmp/go")
    assert (await node.engine.attach(second.id, "work", deadline=soon())).stdout == b"second\n"
    await node.sh(parent, "echo parent > /tmp/go")
    assert (await running).stdout == b"before\nparent\n"

    assert (await node.engine.attach(first.id, "work", deadline=soon())) == ended, "kept for whoever asks"
    with pytest.raises(ExecNotFound, match="no command other"):
        await node.engine.attach(first.id, "other", deadline=soon())
    with pytest.raises(ExecNotFound):
        await node.engine.attach(parent.id, "work", deadline=soon())  # It was answered.


async def test_it_goes_on_over_generations_and_in_a_late_child_of_the_instant(node: Node) -> None:
    parent = await node.root()
    running = await begun(node, parent, "work")
    forked = await node.fork(parent)
    (grandchild,) = (await node.fork(forked.children[0])).children
    late = await node.engine.branch(forked.point.id, [order("late")], node.tree, deadline=soon())
    for machine in (grandchild, late.children[0]):
        await node.sh(machine, "echo here > /tmp/go")
        assert (await node.engine.attach(machine.id, "work", deadline=soon())).stdout == b"here\n"
    running.cancel()


async def test_what_a_carried_command_writes_is_kept_within_a_bound(node: Node) -> None:
    parent = await node.root()
    script = "echo begun > /tmp/begun; cat /tmp/go; yes | head -c 5000000"
    running = await begun(node, parent, "loud", script)
    (child,) = (await node.fork(parent)).children
    await node.sh(child, "echo > /tmp/go")
    ended = await node.engine.attach(child.id, "loud", deadline=soon())
    assert (len(ended.stdout), ended.truncated, ended.exit_code) == (1 << 20, True, 0)
    running.cancel()


async def test_a_carried_command_keeps_its_time_limit(node: Node) -> None:
    parent = await node.root()
    await node.sh(parent, "mkfifo /tmp/begun")
    command = Command(
        argv=("/bin/sh", "-c", "echo begun > /tmp/begun; sleep 1000"), id="slow", timeout_seconds=4
    )
    running = asyncio.create_task(node.engine.exec(parent.id, command, deadline=soon()), name="slow")
    await node.sh(parent, "cat /tmp/begun")
    (child,) = (await node.fork(parent)).children
    ended = await node.engine.attach(child.id, "slow", deadline=soon())
    assert (ended.exit_code, ended.timed_out) == (-1, True)
    assert (await running).timed_out


async def test_a_command_outlives_the_agent_that_began_it(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    async with running_keeper(tmp_path, f"forktree-test-carried-{os.getpid()}") as socket_path:
        async with engine_on(socket_path, journal) as first:
            machine = await first.root()
            running = await begun(first, machine, "work")
        with pytest.raises(MachineGone):  # Whoever asked does not learn how it ends.
            await running
        async with engine_on(socket_path, journal) as second:
            assert await second.sh(machine, "echo go > /tmp/go; echo asked") == "asked\n"
            assert ids(second, machine) == ("work",)
            ended = await second.engine.attach(machine.id, "work", deadline=soon())
            assert (ended.stdout, ended.exit_code) == (b"go\n", 5)
            await second.engine.release(machine.id)
