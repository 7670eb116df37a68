"""Machines that stand still: that they do nothing, can be forked all the same, and who lets them go on."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from component.keeper_fixtures import running_keeper
from component.node import Node, engine_on, order, soon
from component.ram import chain_of
from forktree_agent.engine.contract import Command, HookFailed, Hooks, Machine, MachineGone, MachinePaused
from forktree_agent.engine.microvm.monitor import Monitor
from forktree_agent.engine.microvm.store import LAYER_KIND
from forktree_agent.keeper_client import Keeper

pytestmark = pytest.mark.asyncio(loop_scope="session")

COUNTING = "(while true; do date +%s > /tmp/beat; usleep 20000; done) >/dev/null 2>&1 &"


async def test_a_paused_machine_does_nothing_and_goes_on_where_it_was_with_the_clock_of_now(
    node: Node,
) -> None:
    machine = await node.root()
    await node.sh(machine, f"echo kept > /tmp/file; {COUNTING}")
    await node.engine.pause(machine.id, deadline=soon())
    await node.engine.pause(machine.id, deadline=soon())  # Again: nothing to do, and no error.
    assert [each.paused for each in node.engine.machines() if each.id == machine.id] == [True]
    with pytest.raises(MachinePaused):
        await node.run(machine, "true")
    before = await cpu_ticks(node, machine)
    await asyncio.sleep(2)  # That nothing happens cannot be waited for in another way.
    assert await cpu_ticks(node, machine) - before <= 5, "a machine that stands still computed"
    await node.engine.resume(machine.id, deadline=soon())
    await node.engine.resume(machine.id, deadline=soon())
    assert await node.sh(machine, "cat /tmp/file") == "kept\n"
    assert abs(int(await node.sh(machine, "date +%s")) - time.time()) < 1.5
    assert [each.paused for each in node.engine.machines() if each.id == machine.id] == [False]


async def test_children_of_a_paused_machine_run_and_it_stays_paused(node: Node) -> None:
    parent = await node.root()
    await node.sh(parent, "echo then > /tmp/file")
    await node.engine.pause(parent.id, deadline=soon())
    forked = await node.fork(parent, 2)
    assert forked.clocks.pause_ms is None  # Nothing was stopped.
    assert 0 < forked.clocks.fork_ms < (forked.clocks.ready_ms or 0)
    assert [each.paused for each in forked.children] == [False, False]
    assert [await node.sh(each, "cat /tmp/file") for each in forked.children] == ["then\n", "then\n"]
    with pytest.raises(MachinePaused):
        await node.run(parent, "true")
    with pytest.raises(HookFailed, match="paused and cannot run the preFork hook"):
        await node.fork(parent, hooks=Hooks(pre=Command(argv=("true",))))
    await node.engine.resume(parent.id, deadline=soon())
    assert await node.sh(parent, "cat /tmp/file") == "then\n"


async def test_a_paused_machine_is_copied_once_however_often_it_is_forked(node: Node) -> None:
    parent = await node.root()
    await node.sh(parent, "echo then > /tmp/file")
    await node.engine.pause(parent.id, deadline=soon())
    first = await node.fork(parent)
    chain, layers = chain_of(node, parent), layers_of(node)
    second, third = await node.fork(parent, 2), await node.fork(parent, 0)
    assert (chain_of(node, parent), layers_of(node)) == (chain, layers)
    assert second.clocks.pause_ms is None
    assert len({each.point.id for each in (first, second, third)}) == 3
    assert len({each.point.owner for each in (first, second, third)}) == 3
    assert third.point.bytes == second.point.bytes < 1 << 20  # What it added: its device state.
    held, usage = node.engine.points(), node.engine.usage()
    with pytest.raises(HookFailed):
        await node.fork(parent, hooks=Hooks(post=Command(argv=("false",))))
    assert (node.engine.points(), node.engine.usage(), layers_of(node)) == (held, usage, layers)
    # Each is held for itself.
    for point in (first.point, second.point):
        await node.engine.drop_point(point.id)
    later = await node.engine.branch(third.point.id, [order("later")], node.tree, deadline=soon())
    children = (*first.children, *second.children, *later.children)
    assert [await node.sh(each, "cat /tmp/file") for each in children] == ["then\n"] * 4
    # Once it went on, it is another instant.
    await node.engine.resume(parent.id, deadline=soon())
    await node.sh(parent, "echo now > /tmp/file")
    await node.engine.pause(parent.id, deadline=soon())
    (child,) = (await node.fork(parent)).children
    assert await node.sh(child, "cat /tmp/file") == "now\n"
    # One of which no instant is left is copied anew.
    await node.engine.drop_point(third.point.id)
    for point in node.engine.points():
        if point.tree == node.tree.tree:
            await node.engine.drop_point(point.id)
    (child,) = (await node.fork(parent, answered=False)).children
    (twin,) = (await node.fork(parent, answered=False)).children
    assert [await node.sh(each, "cat /tmp/file") for each in (child, twin)] == ["now\n"] * 2


def layers_of(node: Node) -> set[str]:
    return {path.name for path in (node.journal / LAYER_KIND).glob("*.json")}


async def test_a_command_under_way_waits_with_its_machine(node: Node) -> None:
    machine = await node.root()
    await node.sh(machine, "mkfifo /tmp/begun /tmp/go")
    script = "echo begun > /tmp/begun; usleep 300000; echo done"
    under_way = asyncio.create_task(node.sh(machine, script), name="under-way")
    assert await node.sh(machine, "cat /tmp/begun") == "begun\n"
    await node.engine.pause(machine.id, deadline=soon())
    await asyncio.sleep(1)
    assert not under_way.done()
    await node.engine.resume(machine.id, deadline=soon())
    assert await under_way == "done\n"


async def test_a_machine_that_is_gone_cannot_be_paused(node: Node) -> None:
    machine = await node.root()
    await node.engine.pause(machine.id, deadline=soon())
    await node.engine.release(machine.id)
    for asked in (node.engine.pause, node.engine.resume):
        with pytest.raises(MachineGone, match=machine.id):
            await asked(machine.id, deadline=soon())


async def test_a_new_agent_leaves_paused_what_is_paused_and_wakes_what_a_dead_one_left_stopped(
    tmp_path: Path,
) -> None:
    journal = tmp_path / "journal"
    async with running_keeper(tmp_path, "forktree-test-paused") as socket_path:
        async with engine_on(socket_path, journal) as first:
            paused, stopped = await first.root(), await first.root(name="other")
            await first.engine.pause(paused.id, deadline=soon())
            pid = await first.pid(paused)
        threads = await threads_of_guest(socket_path, paused)
        ran = nanoseconds_run(pid, threads)
        await stop_in_the_midst_of_a_freeze(socket_path, stopped)
        async with engine_on(socket_path, journal) as second:
            known = {each.id: each.paused for each in second.engine.machines()}
            assert known == {paused.id: True, stopped.id: False}
            assert await second.sh(stopped, "echo awake") == "awake\n"
            assert nanoseconds_run(pid, threads) == ran
            second.tree = first.tree
            for parent in (paused, stopped):
                (child,) = (await second.fork(parent)).children
                assert await second.sh(child, "echo runs") == "runs\n"
            await second.engine.resume(paused.id, deadline=soon())
            assert await second.sh(paused, "echo runs") == "runs\n"
            for machine in second.engine.machines():
                await second.engine.release(machine.id)


async def stop_in_the_midst_of_a_freeze(socket_path: Path, machine: Machine) -> None:
    """Leave a machine as an agent does that dies there: stopped, with a file offered for its state."""
    async with Keeper.connected(socket_path, deadline=soon()) as keeper:
        channels = await keeper.lend(machine.id, deadline=soon())
        monitor = Monitor(channels["monitor"], machine.id)
        await monitor.resume(deadline=soon())
        state = os.memfd_create("forktree-test-state")
        await monitor.offer_state_file(state)
        os.close(state)
        await monitor.stop()
        await monitor.close()
        for name in ("guest", "shim"):
            channels[name].close()


async def threads_of_guest(socket_path: Path, machine: Machine) -> tuple[int, ...]:
    """Those that run the guest of a machine, which no agent has now."""
    async with Keeper.connected(socket_path, deadline=soon()) as keeper:
        channels = await keeper.lend(machine.id, deadline=soon())
        monitor = Monitor(channels["monitor"], machine.id)
        await monitor.resume(deadline=soon())
        threads = await monitor.vcpu_threads()
        await monitor.close()
        for name in ("guest", "shim"):
            channels[name].close()
        return threads


def nanoseconds_run(pid: int, threads: Sequence[int]) -> int:
    files = [Path(f"/proc/{pid}/task/{thread}/schedstat") for thread in threads]
    return sum(int(file.read_text().split()[0]) for file in files)


async def cpu_ticks(node: Node, machine: Machine) -> int:
    """CPU time of a machine's process so far, in hundredths of a second."""
    fields = Path(f"/proc/{await node.pid(machine)}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])
