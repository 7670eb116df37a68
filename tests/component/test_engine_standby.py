"""VMMs that wait for a fork: children of them are as good as any, and nobody but the keeper sees them."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import secrets
import signal
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
import pytest_asyncio

from component.keeper_fixtures import group_folders, running_keeper
from component.node import TINY, Node, engine_on, held, order, running_node, settings, soon
from component.ram import chain_of, image_of, memory_of
from component.shim_machine import differing_pages
from forktree_agent.engine.contract import Command, HookFailed, Hooks, Machine, TreeId, TreeLimits
from forktree_agent.engine.microvm.overlay import MAX_LAYERS
from forktree_agent.engine.microvm.records import MachineRecord
from forktree_agent.engine.microvm.resources import MACHINE_KIND
from forktree_agent.journal import Journal
from forktree_agent.typed_records import load_all

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def node(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Node]:
    async with held(running_node(tmp_path_factory.mktemp("ahead"), settings(ahead=True))) as node:
        yield node


@pytest_asyncio.fixture(autouse=True, loop_scope="session")
async def _own_tree(node: Node) -> AsyncGenerator[None]:
    """Each test has a tree of its own, and ends it."""
    node.tree = TreeLimits(tree=TreeId(secrets.token_hex(4)))
    yield
    for machine in node.engine.machines():
        await node.engine.release(machine.id)


def records(node: Node) -> dict[str, MachineRecord]:
    """Of those in wait."""
    found = load_all(Journal(node.journal, node.keeper.boot_id), MACHINE_KIND, MachineRecord)
    return {name: record for name, record in found.items() if record.waiting}


async def processes(node: Node) -> set[str]:
    listing = await node.keeper.listing(deadline=soon())
    return {entry.machine for entry in listing.machines if entry.exit is None}


async def in_wait(node: Node, parent: Machine, count: int) -> set[str]:
    """Once so many wait for the parent's next fork, with all of its chain mapped."""
    async with asyncio.timeout_at(soon()):
        while True:
            running = await processes(node)
            chain = chain_of(node, parent)
            names = {name for name, each in records(node).items() if each.chain == chain and name in running}
            if len(names) == count and names <= node.engine.in_wait():
                return names


async def none_in_wait(node: Node) -> None:
    async with asyncio.timeout_at(soon()):
        # Asks the keeper first, so that each turn lets the engine work.
        while await processes(node) != {each.id for each in node.engine.machines()} or records(node):
            pass


async def same(node: Node, parent: Machine, child: Machine) -> None:
    """What the child started with is the memory of the parent, which stands still."""
    memory = await memory_of(node, parent, TINY.memory_bytes)
    assert differing_pages(await image_of(node, chain_of(node, child)), memory) == []


async def test_a_fork_takes_what_waits_and_starts_the_rest_itself(node: Node) -> None:
    parent = await node.root()
    await node.sh(parent, "echo 1 > /tmp/f; head -c 300000 /dev/urandom > /tmp/big")
    first = await node.fork(parent, 2)
    waiting = await in_wait(node, parent, 2)
    assert waiting.isdisjoint(each.id for each in node.engine.machines())
    await node.sh(parent, "echo 2 > /tmp/f; head -c 300000 /dev/urandom > /tmp/big2")
    await node.engine.pause(parent.id, deadline=soon())
    second = await node.fork(parent, 3)
    assert waiting < {each.id for each in second.children}
    for child in second.children:
        await same(node, parent, child)
    await node.engine.resume(parent.id, deadline=soon())
    sums = [await node.sh(each, "cat /tmp/f /tmp/big* | md5sum") for each in (parent, *second.children)]
    assert len(set(sums)) == 1
    assert await node.sh(first.children[0], "cat /tmp/f") == "1\n"
    await in_wait(node, parent, 3)
    generations = {each.generation for each in node.engine.machines()}
    assert len(generations) == len(node.engine.machines())
    # One of a standby is a parent like any other.
    (grandchild,) = (await node.fork(second.children[0])).children
    assert await node.sh(grandchild, "cat /tmp/f") == "2\n"


async def test_what_waits_for_a_parent_serves_the_first_fork_of_its_child(node: Node) -> None:
    parent = await node.root()
    (child, other) = (await node.fork(parent, 2)).children
    waiting = await in_wait(node, parent, 2)
    await node.sh(child, "echo child > /tmp/f; head -c 300000 /dev/urandom > /tmp/big")
    await node.engine.pause(child.id, deadline=soon())
    forked = await node.fork(child, 2)
    assert waiting == {each.id for each in forked.children}
    for grandchild in forked.children:
        await same(node, child, grandchild)
        assert await node.sh(grandchild, "cat /tmp/f") == "child\n"
    await in_wait(node, child, 2)
    await in_wait(node, parent, 2)  # For whoever of its children is next.
    # What waits for a child has memory of its own that its sibling has not.
    await node.engine.release(parent.id)
    (nephew,) = (await node.fork(other)).children
    assert await node.sh(nephew, "ls /tmp") == ""


async def stand_back(node: Node, name: str) -> set[bool]:
    """Whether threads of a process run only where nothing else wants to, of all its threads."""
    listing = await node.keeper.listing(deadline=soon())
    pid = next(entry.pid for entry in listing.machines if entry.machine == name)
    threads = [int(each.name) for each in Path(f"/proc/{pid}/task").iterdir()]
    return {os.sched_getscheduler(thread) == os.SCHED_IDLE for thread in threads}


async def test_a_guest_gives_way_until_all_of_its_fork_run_and_then_to_nobody(node: Node) -> None:
    parent = await node.root()
    await node.fork(parent, 2)
    (waiting, *_) = await in_wait(node, parent, 2)
    assert await stand_back(node, waiting) == {True, False}  # The guest does, and whoever loads it does not.
    forked = await node.fork(parent, 3)
    assert waiting in {each.id for each in forked.children}
    for machine in node.engine.machines():
        assert await stand_back(node, machine.id) == {False}


async def test_what_was_mapped_before_a_merge_is_right_after_it(node: Node) -> None:
    parent = await node.root()
    turn = 0
    while len(chain_of(node, parent)) <= MAX_LAYERS + 1:
        turn += 1
        await node.sh(parent, f"echo {turn} > /tmp/f{turn}; head -c 200000 /dev/urandom > /tmp/big{turn % 3}")
        forked = await node.fork(parent)
        await node.engine.release(forked.children[0].id)
        await node.engine.drop_point(forked.point.id)
    async with asyncio.timeout_at(soon()):
        while len(chain_of(node, parent)) > MAX_LAYERS:
            await node.keeper.listing(deadline=soon())
    waiting = await in_wait(node, parent, 1)
    await node.sh(parent, "echo last > /tmp/f1")
    await node.engine.pause(parent.id, deadline=soon())
    (child,) = (await node.fork(parent)).children
    assert {child.id} == waiting
    await same(node, parent, child)
    await node.engine.resume(parent.id, deadline=soon())
    sums = [await node.sh(each, "cat /tmp/f* /tmp/big* | md5sum") for each in (parent, child)]
    assert sums[0] == sums[1]


async def test_one_that_was_killed_is_replaced_and_costs_no_fork(node: Node) -> None:
    parent = await node.root()
    await node.fork(parent, 2)
    waiting = await in_wait(node, parent, 2)
    listing = await node.keeper.listing(deadline=soon())
    os.kill(next(each.pid for each in listing.machines if each.machine in waiting), signal.SIGKILL)
    children = (await node.fork(parent, 2)).children
    assert await node.sh(children[0], "echo runs") == await node.sh(children[1], "echo runs") == "runs\n"
    waiting = await in_wait(node, parent, 2)
    listing = await node.keeper.listing(deadline=soon())
    os.kill(next(each.pid for each in listing.machines if each.machine in waiting), signal.SIGKILL)
    async with asyncio.timeout_at(soon()):
        while await in_wait(node, parent, 2) == waiting:  # Until the keeper has told.
            pass


def stands_still(thread: Path) -> bool:
    return (thread / "stat").read_text().rpartition(")")[2].split()[0] == "T"


async def test_one_that_stands_still_costs_no_fork(tmp_path: Path) -> None:
    config = dataclasses.replace(settings(ahead=True, answer_seconds=5.0), standbys_per_parent=1)
    async with running_node(tmp_path, config) as node:
        parent = await node.root()
        await node.fork(parent)
        (name,) = await in_wait(node, parent, 1)
        listing = await node.keeper.listing(deadline=soon())
        pid = next(each.pid for each in listing.machines if each.machine == name)
        os.kill(pid, signal.SIGSTOP)
        async with asyncio.timeout_at(soon()):
            while not all(stands_still(thread) for thread in Path(f"/proc/{pid}/task").iterdir()):
                await node.keeper.listing(deadline=soon())  # Until then one of its threads may still answer.
        (child,) = (await node.fork(parent)).children
        assert child.id != name
        assert await node.sh(child, "echo runs") == "runs\n"


async def test_they_end_with_their_parent_and_its_group_with_them(node: Node) -> None:
    parent = await node.root()
    children = (await node.fork(parent, 2)).children
    waiting = await in_wait(node, parent, 2)
    group = f"tree-{node.tree.tree}"
    root = node.keeper_root
    assert any(folder.name == group for folder in group_folders(root))
    assert {record.tree for record in records(node).values()} == {node.tree.tree}
    for machine in (parent, *children):
        await node.engine.release(machine.id)
    assert waiting.isdisjoint(await processes(node))
    assert not records(node)
    assert not any(folder.name == group for folder in group_folders(root))


async def test_what_needs_their_room_has_it(tmp_path: Path) -> None:
    # The parent, its child, one in wait, their baseline, and no room for one machine more.
    async with running_node(
        tmp_path, settings(ahead=True, capacity_bytes=(128 + 3 * 224 + 60) << 20)
    ) as node:
        parent = await node.root()
        await node.fork(parent)
        usage = node.engine.usage()
        (waiting,) = await in_wait(node, parent, 1)
        assert node.engine.usage() == usage
        other = await node.root()  # Nothing waits for that.
        assert other.id != waiting
        assert waiting not in await processes(node)
        assert await node.sh(other, "echo runs") == "runs\n"
        for machine in node.engine.machines():
            await node.engine.release(machine.id)


async def test_a_fork_that_fails_leaves_none_of_those_it_took(node: Node) -> None:
    parent = await node.root()
    await node.fork(parent, 2)
    waiting = await in_wait(node, parent, 2)
    usage, uids = node.engine.usage(), node.engine.machines()
    with pytest.raises(HookFailed):
        await node.fork(parent, 2, hooks=Hooks(post=Command(argv=("/bin/false",))))
    assert waiting.isdisjoint(await processes(node))
    assert node.engine.machines() == uids
    held_now = node.engine.usage().reserved_bytes - usage.reserved_bytes
    assert 0 <= held_now < 64 << 20  # The parent has a layer more, and nobody else has anything.
    (child,) = (await node.fork(parent)).children
    assert await node.sh(child, "echo runs") == "runs\n"


async def test_a_new_agent_ends_those_of_the_old(tmp_path: Path) -> None:
    async with running_keeper(tmp_path, f"forktree-test-{secrets.token_hex(4)}") as socket_path:
        async with engine_on(socket_path, tmp_path / "journal", settings(ahead=True)) as first:
            parent = await first.root()
            await first.sh(parent, "echo kept > /tmp/file")
            (child,) = (await first.fork(parent)).children
            waiting = await in_wait(first, parent, 1)
            tree, usage = first.tree, first.engine.usage()
            files = {each for each in (await first.keeper.listing(deadline=soon())).files if "layer-" in each}
        async with engine_on(socket_path, tmp_path / "journal", settings(ahead=True)) as second:
            second.tree = tree
            assert {each.id for each in second.engine.machines()} == {parent.id, child.id}
            assert waiting.isdisjoint(await processes(second))
            assert not records(second)
            assert second.engine.usage() == usage
            left = {each for each in (await second.keeper.listing(deadline=soon())).files if "layer-" in each}
            assert left <= files
            assert left <= set(chain_of(second, parent)) | set(chain_of(second, child))
            (grandchild,) = (await second.fork(parent)).children
            assert await second.sh(grandchild, "cat /tmp/file") == "kept\n"
            for machine in second.engine.machines():
                await second.engine.release(machine.id)


async def test_roots_are_of_what_waits_for_their_template(node: Node) -> None:
    baseline = await node.baseline()
    node.engine.keep_ready(baseline.id, 2)
    async with asyncio.timeout_at(soon()):
        while len(node.engine.in_wait()) != 2:
            await node.keeper.listing(deadline=soon())
    waiting = node.engine.in_wait()
    root = await node.root()
    assert root.id in waiting
    assert root.tree == node.tree.tree
    (child,) = (await node.fork(root)).children
    assert await node.sh(child, "echo runs") == "runs\n"
    limited = TreeLimits(tree=TreeId(secrets.token_hex(4)), memory_bytes=1 << 30)
    # Its limit holds for what is in its own group.
    born = await node.engine.branch(baseline.point, [order("limited")], limited, deadline=soon())
    assert born.children[0].id not in waiting
    node.engine.keep_ready(baseline.id, 0)
    for machine in node.engine.machines():
        await node.engine.release(machine.id)
    await none_in_wait(node)


async def test_a_tree_has_so_many_and_no_more(tmp_path: Path) -> None:
    config = dataclasses.replace(settings(ahead=True), standbys_per_tree=2)
    async with running_node(tmp_path, config) as node:
        parent = await node.root()
        (child,) = (await node.fork(parent)).children
        old = await in_wait(node, parent, 1)
        await node.fork(child, 2)
        await in_wait(node, child, 2)
        assert old.isdisjoint(node.engine.in_wait())
        for machine in node.engine.machines():
            await node.engine.release(machine.id)


async def test_a_root_of_one_outlives_its_agent_and_those_that_still_wait_do_not(tmp_path: Path) -> None:
    group_root = f"forktree-test-{secrets.token_hex(4)}"
    async with running_keeper(tmp_path, group_root) as socket_path:
        async with engine_on(socket_path, tmp_path / "journal", settings(ahead=True)) as first:
            baseline = await first.baseline()
            first.engine.keep_ready(baseline.id, 1)
            async with asyncio.timeout_at(soon()):
                while not first.engine.in_wait():
                    await first.keeper.listing(deadline=soon())
            (name,) = first.engine.in_wait()
            root = await first.root()
            assert root.id == name
            await first.sh(root, "echo kept > /tmp/file")
            async with asyncio.timeout_at(soon()):
                while not first.engine.in_wait():
                    await first.keeper.listing(deadline=soon())
            tree = first.tree
        async with engine_on(socket_path, tmp_path / "journal", settings(ahead=True)) as second:
            second.tree = tree
            assert await processes(second) == {root.id}
            (child,) = (await second.fork(root)).children
            assert await second.sh(child, "cat /tmp/file") == "kept\n"
            for machine in second.engine.machines():
                await second.engine.release(machine.id)
            await none_in_wait(second)
            left = {folder.name for folder in group_folders(group_root)} - {group_root}
            assert left == set()
