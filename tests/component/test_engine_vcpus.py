"""Machines with several vCPUs: no program of a child goes on before that is another machine."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import socket
from collections.abc import Sequence
from pathlib import Path

import pytest

from component.keeper_fixtures import running_keeper
from component.node import TINY, Node, all_sh, engine_on, order, running_node, settings, soon
from forktree_agent.engine.contract import BakeFailed, Machine, NotStill, Probe
from forktree_agent.engine.microvm.monitor import Monitor
from forktree_agent.keeper_client import Keeper

pytestmark = pytest.mark.asyncio(loop_scope="session")

TWO = dataclasses.replace(TINY, vcpus=2)
WATCHING = """
for each in a b c; do
    (while read -r name < /proc/sys/kernel/hostname && [ ! -e /tmp/enough ]; do
        echo "$name"
    done > /tmp/seen-$each; touch /tmp/over-$each) >/dev/null 2>&1 &
done
for each in a b c; do while [ ! -s /tmp/seen-$each ]; do usleep 1000; done; done
"""
COUNTED = """
touch /tmp/enough
for each in a b c; do
    while [ ! -e /tmp/over-$each ]; do usleep 1000; done
    grep -cx 'NAME' /tmp/seen-$each
done
"""
SEEING_OWN = """
for each in a b c; do until grep -qx $(hostname) /tmp/seen-$each; do usleep 1000; done; done
"""
NEVER_FREEZES = "mount -o bind /dev/null /sys/fs/cgroup/workload/cgroup.freeze"
FREEZES = "umount /sys/fs/cgroup/workload/cgroup.freeze"


async def seen(node: Node, machines: Sequence[Machine], name: str) -> list[str]:
    """How often the programs of each of these have seen this host name: in a child, before it was itself."""
    return await all_sh(node, machines, COUNTED.replace("NAME", name))


def further(before: str, after: str) -> list[int]:
    return [int(b) - int(a) for a, b in zip(before.split(), after.split(), strict=True)]


async def test_programs_of_children_wait_on_every_vcpu_until_these_are_themselves(node: Node) -> None:
    parent = await node.root(TWO)
    assert await node.sh(parent, "nproc") == "2\n"
    await node.sh(parent, WATCHING)
    forked = await node.fork(parent, 4)
    assert 0 < (forked.clocks.pause_ms or 0) < (forked.clocks.ready_ms or 0)
    await all_sh(node, forked.children, SEEING_OWN)
    # What they had seen at the instant is the same for all; one that had gone on would have seen more.
    counts = await seen(node, forked.children, "root")
    assert len(set(counts)) == 1, counts
    assert "0" not in counts[0].split()
    # The parent's programs went on.
    (now,) = await seen(node, [parent], "root")
    assert min(further(counts[0], now)) > 0


async def test_children_of_children_and_of_instants_and_roots_are_born_alike(node: Node) -> None:
    shape = dataclasses.replace(
        TWO,
        vcpus=4,
        command=("sh", "-c", f"{WATCHING} touch /tmp/watched; sleep 100000"),
        probe=Probe(ask=("test", "-e", "/tmp/watched")),
    )
    roots = [await node.root(shape, name=name) for name in ("one", "two")]
    assert await node.sh(roots[0], "nproc") == "4\n"
    (child,) = (await node.fork(roots[0])).children
    forked = await node.fork(child, 2, prefix="below")
    again = await node.engine.branch(
        forked.point.id, [order("late-0"), order("late-1")], node.tree, deadline=soon()
    )
    below = (*forked.children, *again.children)
    # A line that was about to be written at an instant is, before the counting ends the programs.
    await all_sh(node, (*roots, child, *below), SEEING_OWN)
    assert len(set(await seen(node, below, "child-0"))) == 1
    before = (await node.sh(child, "head -n 1 /tmp/seen-a")).strip()  # Of the template's machine.
    assert len(set(await seen(node, (*roots, child, *below), before))) == 1


async def test_a_paused_machine_is_forked_without_any_program_going_on(node: Node) -> None:
    parent = await node.root(TWO)
    await node.sh(parent, WATCHING)
    await node.engine.pause(parent.id, deadline=soon())
    await node.engine.pause(parent.id, deadline=soon())
    first, second = await node.fork(parent, 2), await node.fork(parent, 2)
    assert first.clocks.pause_ms is None
    children = (*first.children, *second.children)
    counts = await seen(node, children, "root")
    assert len(set(counts)) == 1, counts
    await node.engine.resume(parent.id, deadline=soon())
    await node.engine.resume(parent.id, deadline=soon())
    (now,) = await seen(node, [parent], "root")
    assert min(further(counts[0], now)) >= 0


async def test_a_fork_or_a_pause_that_cannot_stop_the_programs_leaves_nothing(node: Node) -> None:
    parent = await node.root(TWO)
    usage, machines, points = node.engine.usage(), node.engine.machines(), node.engine.points()
    await node.sh(parent, NEVER_FREEZES)
    with pytest.raises(NotStill, match="some program did not stop within 5 s"):
        await node.fork(parent, 2)
    with pytest.raises(NotStill, match="do not stand still"):
        await node.engine.pause(parent.id, deadline=soon())
    assert node.engine.usage() == usage
    assert (node.engine.machines(), node.engine.points()) == (machines, points)
    await node.sh(parent, FREEZES)  # They run on.
    (child,) = (await node.fork(parent)).children
    assert await node.sh(child, "hostname") == "child-0\n"


async def test_a_template_whose_programs_cannot_be_stopped_cannot_be_baked(node: Node) -> None:
    shape = dataclasses.replace(
        TWO,
        command=("sh", "-c", f"{NEVER_FREEZES}; touch /tmp/done; sleep 100000"),
        probe=Probe(ask=("test", "-e", "/tmp/done")),
    )
    with pytest.raises(BakeFailed, match="do not stand still"):
        await node.baseline(shape)


async def test_what_waits_for_a_fork_has_as_many_vcpus(tmp_path: Path) -> None:
    async with running_node(tmp_path, settings(ahead=True)) as node:
        parent = await node.root(TWO)
        await node.fork(parent)
        async with asyncio.timeout_at(soon()):
            while not (waiting := node.engine.in_wait()):
                await node.keeper.listing(deadline=soon())
        await node.sh(parent, WATCHING)
        forked = await node.fork(parent, 2)
        assert waiting <= {child.id for child in forked.children}
        assert await all_sh(node, forked.children, "nproc") == ["2\n", "2\n"]
        assert len(set(await seen(node, forked.children, "root"))) == 1
        for machine in node.engine.machines():
            await node.engine.release(machine.id)


async def test_a_new_agent_lets_programs_go_on_that_a_dead_one_had_stopped(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    async with running_keeper(tmp_path, "forktree-test-vcpus") as socket_path:
        async with engine_on(socket_path, journal) as first:
            held, stopped, paused = [
                await first.root(TWO, name=name) for name in ("held", "stopped", "paused")
            ]
            await first.sh(paused, WATCHING)
            (before,) = (await first.fork(paused)).children
            await first.engine.pause(paused.id, deadline=soon())
            (child,) = (await first.fork(paused)).children
            tree = first.tree
        await freeze_and_die(socket_path, held, stop=False)
        await freeze_and_die(socket_path, stopped, stop=True)
        async with engine_on(socket_path, journal) as second:
            second.tree = tree
            assert await all_sh(second, [held, stopped], "echo goes on") == ["goes on\n"] * 2
            (other,) = (await second.fork(paused)).children
            assert len(set(await seen(second, [child, other], "paused"))) == 1
            assert await second.sh(before, "nproc") == "2\n"
            await second.engine.resume(paused.id, deadline=soon())
            assert await second.sh(paused, "nproc") == "2\n"
            for machine in second.engine.machines():
                await second.engine.release(machine.id)


async def freeze_and_die(socket_path: Path, machine: Machine, *, stop: bool) -> None:
    """Leave a machine as an agent does that dies once it had its programs stopped, or also all of it."""
    async with Keeper.connected(socket_path, deadline=soon()) as keeper:
        channels = await keeper.lend(machine.id, deadline=soon())
        await asyncio.to_thread(have_frozen, channels["guest"])
        if stop:
            monitor = Monitor(channels["monitor"], machine.id)
            await monitor.resume(deadline=soon())
            await monitor.stop()
            await monitor.close()
        else:
            channels["monitor"].close()
        for name in ("guest", "shim"):
            channels[name].close()


def have_frozen(guest: socket.socket) -> None:
    guest.setblocking(True)
    guest.settimeout(60)
    guest.sendall(b'\n{"type":"freeze","nonce":"n"}\n')
    with guest.makefile("rb") as lines:
        for line in lines:
            if json.loads(line) == {"type": "frozen", "nonce": "n", "message": None}:
                return
