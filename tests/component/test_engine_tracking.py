"""One parent forked again and again: each fork copies what is new, and every child has all of its memory."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import secrets
from pathlib import Path

import pytest

from component.keeper_fixtures import running_keeper
from component.node import TINY, Node, engine_on, settings, soon
from component.ram import chain_of, image_of, layer_of, memory_of
from component.shim_machine import differing_pages
from forktree_agent.engine.contract import Command, ForkResult, HookFailed, Hooks, Machine
from forktree_agent.engine.microvm.overlay import MAX_LAYERS
from forktree_agent.engine.microvm.precopying import PRECOPY_BYTES
from forktree_agent.engine.microvm.shim import ShimClient
from forktree_agent.engine.microvm.tracking import new_mark

pytestmark = pytest.mark.asyncio(loop_scope="session")

FORKS = 8
STATE_BYTES = 64 << 10
"""More than device state takes."""
QUIET_PAGES = 64
"""What may be written to the memory of a machine that stands still."""


async def write(node: Node, machine: Machine, turn: int) -> None:
    """Some scattered files anew, and one of half a megabyte."""
    files = " ".join(f"f{(turn * 37 + i * 11) % 300}" for i in range(40))
    script = (
        f"cd /tmp; for f in {files}; do echo {turn} > $f; done; head -c 500000 /dev/urandom > big{turn % 3}"
    )
    await node.sh(machine, script)


async def checked_fork(node: Node, parent: Machine) -> tuple[Machine, int]:
    """A child of the parent, which stands still meanwhile: what it starts with is compared with that.

    Returns the child, and the pages in the fork's own layer.
    """
    await node.engine.pause(parent.id, deadline=soon())
    try:
        (child,) = (await node.fork(parent)).children
        chain = chain_of(node, child)
        memory = await memory_of(node, parent, TINY.memory_bytes)
        assert differing_pages(await image_of(node, chain), memory) == []
        return child, layer_of(node, chain[-1]).pages
    finally:
        await node.engine.resume(parent.id, deadline=soon())


async def test_every_fork_of_a_busy_parent_has_its_memory_and_copies_what_is_new(node: Node) -> None:
    parent = await node.root()
    await node.sh(parent, "mkfifo /tmp/begun")
    copied: list[int] = []
    for turn in range(FORKS):
        await write(node, parent, turn)
        busy = asyncio.create_task(
            node.sh(parent, "echo begun > /tmp/begun; head -c 3000000 /dev/urandom | sha256sum"), name="busy"
        )
        assert await node.sh(parent, "cat /tmp/begun") == "begun\n"
        child, pages = await checked_fork(node, parent)
        copied.append(pages)
        assert await busy
        sums = [await node.sh(each, "cat /tmp/f* /tmp/big* | sha256sum") for each in (parent, child)]
        assert sums[0] == sums[1]
        await node.engine.release(child.id)
    assert max(copied[1:]) < copied[0], copied


async def test_a_fork_right_after_another_copies_next_to_nothing(node: Node) -> None:
    parent = await node.root()
    await write(node, parent, 1)
    _, first = await checked_fork(node, parent)
    assert first > 500
    await node.engine.pause(parent.id, deadline=soon())
    forked: list[ForkResult] = []
    for _ in range(2):
        forked.append(await node.fork(parent))
        await node.engine.drop_point(forked[-1].point.id)  # One that is held would not be copied again.
    pages = [layer_of(node, chain_of(node, each.children[0])[-1]).pages for each in forked]
    assert pages[1] < QUIET_PAGES
    assert forked[1].point.bytes < first * 4096 / 4


async def test_children_of_every_fork_are_parents_as_good(node: Node) -> None:
    parent = await node.root()
    for turn in range(2):
        await write(node, parent, turn)
        child, _ = await checked_fork(node, parent)
        await write(node, child, turn + 10)
        for later in (20, 30):
            grandchild, _ = await checked_fork(node, child)
            await write(node, grandchild, later)
            await checked_fork(node, grandchild)
            await write(node, child, later + turn)


async def test_a_fork_that_failed_leaves_its_layer_with_the_parent(node: Node) -> None:
    parent = await node.root()
    await write(node, parent, 1)
    _, first = await checked_fork(node, parent)
    before = chain_of(node, parent)
    await write(node, parent, 2)
    with pytest.raises(HookFailed):
        await node.fork(parent, hooks=Hooks(post=Command(argv=("/bin/false",))))
    assert len(chain_of(node, parent)) == len(before) + 1
    await write(node, parent, 3)
    _, pages = await checked_fork(node, parent)
    assert pages < first


async def test_a_new_agent_goes_on_with_the_layers_of_the_old(tmp_path: Path) -> None:
    async with running_keeper(tmp_path, f"forktree-test-{secrets.token_hex(4)}") as socket_path:
        async with engine_on(socket_path, tmp_path / "journal") as first:
            tree = first.tree
            parent = await first.root()
            await write(first, parent, 1)
            forked = await first.fork(parent)
            everything = layer_of(first, chain_of(first, parent)[-1]).pages
            # Nothing but the parent is left of it.
            await first.engine.release(forked.children[0].id)
            await first.engine.drop_point(forked.point.id)
            await first.sh(parent, "echo 2 > /tmp/f2")
        async with engine_on(socket_path, tmp_path / "journal") as second:
            second.tree = tree
            _, pages = await checked_fork(second, parent)
            assert pages < everything / 2
            await write(second, parent, 3)
            await checked_fork(second, parent)
            for machine in second.engine.machines():
                await second.engine.release(machine.id)


async def test_a_layer_that_died_with_its_agent_costs_one_full_copy(tmp_path: Path) -> None:
    async with running_keeper(tmp_path, f"forktree-test-{secrets.token_hex(4)}") as socket_path:
        async with engine_on(socket_path, tmp_path / "journal") as first:
            tree = first.tree
            parent = await first.root()
            await write(first, parent, 1)
            _, everything = await checked_fork(first, parent)
            await write(first, parent, 2)
            channels = await first.keeper.lend(parent.id, deadline=soon())
        # What an agent does that dies before it has written down what it had dumped.
        shim, layer = ShimClient(channels["shim"]), os.memfd_create("lost")
        await shim.prepare(layer, 0, deadline=soon())
        await shim.dump(4, since=0, mark=new_mark(), deadline=soon())
        os.close(layer)
        for channel in channels.values():
            channel.close()
        async with engine_on(socket_path, tmp_path / "journal") as second:
            second.tree = tree
            await second.sh(parent, "echo 3 > /tmp/f3")
            _, pages = await checked_fork(second, parent)
            assert pages >= everything
            await second.sh(parent, "echo 4 > /tmp/f4")
            _, pages = await checked_fork(second, parent)
            assert pages < everything / 2
            for machine in second.engine.machines():
                await second.engine.release(machine.id)


async def test_long_chains_are_merged_and_show_the_same_memory(node: Node) -> None:
    parent = await node.root()
    await write(node, parent, 0)
    early = (await node.fork(parent)).children[0]
    files = set((await node.keeper.listing(deadline=soon())).files)
    turn = 0
    while len(chain_of(node, parent)) <= MAX_LAYERS + 1:  # A baseline lies below them.
        turn += 1
        await write(node, parent, turn)
        forked = await node.fork(parent)
        await node.engine.release(forked.children[0].id)
        await node.engine.drop_point(forked.point.id)
    async with asyncio.timeout_at(soon()):
        while len(chain_of(node, parent)) > MAX_LAYERS:
            await node.keeper.listing(deadline=soon())  # Gives the merge its turn.
    merged = chain_of(node, parent)
    await write(node, parent, turn + 1)
    child, _ = await checked_fork(node, parent)
    assert chain_of(node, child)[:-1] == merged
    grandchild, _ = await checked_fork(node, child)
    assert await node.sh(early, "cat /tmp/f0") == "0\n"
    assert await node.sh(grandchild, f"cat /tmp/f{(turn + 1) * 37 % 300}") == f"{turn + 1}\n"
    # What the merged layer stands for is gone, but for what others still use.
    left = set((await node.keeper.listing(deadline=soon())).files) - files
    used = {*merged, *chain_of(node, child), *chain_of(node, grandchild)}
    assert {each for each in left if each.startswith("layer-")} <= used


async def test_most_of_a_large_layer_is_copied_while_the_parent_runs(node: Node) -> None:
    parent = await node.root(dataclasses.replace(TINY, memory_bytes=256 << 20, overlay_bytes=128 << 20))
    large = (
        "head -c 1000000 /dev/urandom > part; for i in $(seq 30); do cat part; done > big; md5sum < big > sum"
    )
    await node.sh(parent, f"cd /tmp; mkfifo go; {large}")
    # It goes on writing: whatever is copied ahead of the instant is not all of it.
    writer = (
        "exec 3<> go; while ! read -t 0 x <&3; do i=$((i + 1)); echo $i > a; echo $i > b$((i % 99)); done"
    )
    await node.sh(parent, f"cd /tmp; (i=0; {writer}) > /dev/null 2>&1 &")
    for _ in range(2):
        before = chain_of(node, parent)
        forked = await node.fork(parent)
        (child,) = forked.children
        ahead, last = (layer_of(node, each) for each in chain_of(node, parent)[len(before) :])
        assert ahead.bytes + last.bytes < forked.point.bytes < ahead.bytes + last.bytes + STATE_BYTES
        assert ahead.bytes > PRECOPY_BYTES
        assert last.bytes < PRECOPY_BYTES / 2
        assert await node.sh(child, "cd /tmp; md5sum < big | cmp - sum && cat a b* | wc -l") != "0\n"
        await node.sh(parent, f"cd /tmp; {large}")
    await node.engine.pause(parent.id, deadline=soon())
    before = chain_of(node, parent)
    await node.fork(parent)  # What stands still is not copied twice.
    assert len(chain_of(node, parent)) == len(before) + 1


async def test_without_tracking_every_fork_copies_everything_and_is_as_good(tmp_path: Path) -> None:
    async with (
        running_keeper(tmp_path, f"forktree-test-{secrets.token_hex(4)}") as socket_path,
        engine_on(socket_path, tmp_path / "journal", settings(write_tracking="pagemap")) as node,
    ):
        said = (await node.engine.probe(deadline=soon())).message
        assert "a fork copies all that its parent ever wrote" in said
        parent = await node.root()
        chain = chain_of(node, parent)
        copied: list[int] = []
        for turn in range(3):
            await write(node, parent, turn)
            child, pages = await checked_fork(node, parent)
            copied.append(pages)
            assert chain_of(node, parent) == chain
            await checked_fork(node, child)
        assert copied == sorted(copied)
        for machine in node.engine.machines():
            await node.engine.release(machine.id)


async def test_a_node_says_whether_its_forks_copy_what_is_new(node: Node) -> None:
    said = (await node.engine.probe(deadline=soon())).message
    assert said.endswith("a fork copies what was written since the one before")
