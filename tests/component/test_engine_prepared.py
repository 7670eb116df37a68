"""Layers prepared ahead of the next fork: used when they fit, let go when not, and never anybody's memory."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
import pytest_asyncio

from component.keeper_fixtures import running_keeper
from component.node import TINY, Node, engine_on, held, running_node, settings, soon
from component.ram import chain_of, image_of, layer_of, memory_of
from component.shim_machine import differing_pages
from forktree_agent.engine.contract import Command, HookFailed, Hooks, Machine, TreeId, TreeLimits

pytestmark = pytest.mark.asyncio(loop_scope="session")

MARGIN_BYTES = 3 << 20
"""What is prepared beyond what a fork took is less."""


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def node(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Node]:
    async with held(running_node(tmp_path_factory.mktemp("prepared"), settings(ahead=True))) as node:
        yield node


@pytest_asyncio.fixture(autouse=True, loop_scope="session")
async def _own_tree(node: Node) -> AsyncGenerator[None]:
    node.tree = TreeLimits(tree=TreeId(secrets.token_hex(4)))
    yield
    for machine in node.engine.machines():
        await node.engine.release(machine.id)


async def layer_files(node: Node) -> set[str]:
    files = (await node.keeper.listing(deadline=soon())).files
    return {name for name in files if name.startswith("layer-")}


async def size_of(node: Node, name: str) -> int:
    """Bytes in memory of a file of the keeper's."""
    file = await node.keeper.lend_file(name, deadline=soon())
    try:
        return os.fstat(file).st_blocks * 512
    finally:
        os.close(file)


async def prepared(node: Node, known: set[str], least_bytes: int) -> str:
    """The file that is there besides those known, once its memory is."""
    async with asyncio.timeout_at(soon()):
        while True:
            for name in await layer_files(node) - known:
                if await size_of(node, name) >= least_bytes:
                    return name


async def same(node: Node, parent: Machine, child: Machine) -> None:
    memory = await memory_of(node, parent, TINY.memory_bytes)
    assert differing_pages(await image_of(node, chain_of(node, child)), memory) == []


async def test_the_next_fork_takes_what_was_prepared_sized_by_those_before(node: Node) -> None:
    parent = await node.root()
    known = await layer_files(node)
    await node.sh(parent, "head -c 3000000 /dev/urandom > /tmp/big")
    (child,) = (await node.fork(parent)).children
    first = layer_of(node, chain_of(node, parent)[-1])
    assert first.bytes > 3_000_000
    known.add(first.id)
    name = await prepared(node, known, first.bytes)
    assert await size_of(node, name) < first.bytes * 1.25 + MARGIN_BYTES
    await node.sh(parent, "echo small > /tmp/small")
    await node.engine.pause(parent.id, deadline=soon())
    (second,) = (await node.fork(parent)).children
    layer = layer_of(node, chain_of(node, parent)[-1])
    assert layer.id == name
    assert await size_of(node, name) < layer.bytes + MARGIN_BYTES  # Cut to what is in it.
    await same(node, parent, second)
    await node.engine.release(child.id)


async def test_one_that_is_too_small_is_replaced(node: Node) -> None:
    parent = await node.root()
    known = await layer_files(node)
    await node.fork(parent)
    known.add(chain_of(node, parent)[-1])
    small = await prepared(node, known, 1)
    await node.sh(parent, "head -c 12000000 /dev/urandom > /tmp/big")
    await node.engine.pause(parent.id, deadline=soon())
    (child,) = (await node.fork(parent)).children
    assert layer_of(node, chain_of(node, parent)[-1]).bytes > 12_000_000
    assert chain_of(node, parent)[-1] != small
    await same(node, parent, child)
    await prepared(node, known | {small, chain_of(node, parent)[-1]}, 12_000_000)
    assert small not in await layer_files(node)


async def test_it_is_dropped_with_a_fork_that_fails_and_with_its_parent(node: Node) -> None:
    parent = await node.root()
    known, usage = await layer_files(node), node.engine.usage()
    await node.fork(parent)
    known.add(chain_of(node, parent)[-1])
    await prepared(node, known, 1)
    with pytest.raises(HookFailed):
        await node.fork(parent, hooks=Hooks(pre=Command(argv=("/bin/false",))))
    await prepared(node, known, 1)  # Another.
    await node.sh(parent, "echo 1 > /tmp/f")
    (child,) = (await node.fork(parent)).children
    assert await node.sh(child, "cat /tmp/f") == "1\n"
    for machine in node.engine.machines():
        await node.engine.release(machine.id)
    for point in node.engine.points():
        if point.tree is not None:
            await node.engine.drop_point(point.id)
    async with asyncio.timeout_at(soon()):
        while await layer_files(node) or node.engine.usage().reserved_bytes > usage.reserved_bytes:
            pass  # One that was being prepared as its parent ended is dropped by who prepares it.


async def test_a_new_agent_does_without_what_the_old_had_prepared(tmp_path: Path) -> None:
    async with running_keeper(tmp_path, f"forktree-test-{secrets.token_hex(4)}") as socket_path:
        async with engine_on(socket_path, tmp_path / "journal", settings(ahead=True)) as first:
            parent = await first.root()
            known = await layer_files(first)
            await first.sh(parent, "echo kept > /tmp/file")
            await first.fork(parent)
            known.add(chain_of(first, parent)[-1])
            name = await prepared(first, known, 1)
            tree = first.tree
        async with engine_on(socket_path, tmp_path / "journal", settings(ahead=True)) as second:
            second.tree = tree
            assert name not in await layer_files(second)
            await second.engine.pause(parent.id, deadline=soon())
            (child,) = (await second.fork(parent)).children
            await same(second, parent, child)
            assert await second.sh(child, "cat /tmp/file") == "kept\n"
            for machine in second.engine.machines():
                await second.engine.release(machine.id)
