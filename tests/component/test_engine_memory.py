"""What memory a machine takes: what it has for itself goes with it, what it shares is there once."""

from __future__ import annotations

import asyncio

import pytest

from component.node import Node, soon
from forktree_agent.engine.contract import Machine, MachineGone, MemoryUse

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]

MB = 1 << 20
WRITTEN_BYTES = 16 * MB
NOISE_BYTES = 6 * MB
"""What a guest and its emulator take meanwhile for running one command. It may be shared memory too: a page
that nobody has ever touched becomes one of the baseline's when somebody reads it."""


async def memory(node: Node, machine: Machine) -> MemoryUse:
    return await node.engine.memory(machine.id, deadline=soon())


async def write(node: Node, machine: Machine) -> None:
    await node.sh(machine, f"head -c {WRITTEN_BYTES} /dev/urandom > /tmp/written")


async def test_what_a_child_writes_is_its_own_and_nothing_of_its_siblings(node: Node) -> None:
    parent = await node.root()
    writer, sibling = (await node.fork(parent, 2)).children
    # The first command of each translates what the second finds translated.
    await asyncio.gather(*(node.sh(each, "head -c 4096 /dev/urandom > /tmp/w") for each in (writer, sibling)))
    before = {each: await memory(node, each) for each in (parent, writer, sibling)}
    await write(node, writer)
    await node.sh(sibling, "head -c 4096 /dev/urandom > /tmp/w")
    after = {each: await memory(node, each) for each in (parent, writer, sibling)}

    grown = {each: after[each].unique_bytes - before[each].unique_bytes for each in before}
    assert WRITTEN_BYTES <= grown[writer] < WRITTEN_BYTES + NOISE_BYTES
    assert grown[sibling] < NOISE_BYTES
    assert grown[parent] < NOISE_BYTES
    shared = [use.shared_bytes for use in (*before.values(), *after.values())]
    assert max(shared) - min(shared) < NOISE_BYTES


async def test_what_was_copied_for_a_fork_is_shared_until_one_is_left_who_uses_it(node: Node) -> None:
    parent = await node.root()
    await write(node, parent)
    alone = await memory(node, parent)
    forked = await node.fork(parent)
    (child,) = forked.children
    assert forked.point.bytes > WRITTEN_BYTES
    both = {each: await memory(node, each) for each in (parent, child)}
    assert abs(both[parent].shared_bytes - both[child].shared_bytes) < NOISE_BYTES
    assert both[child].shared_bytes > alone.shared_bytes + WRITTEN_BYTES
    assert both[child].unique_bytes < alone.unique_bytes - WRITTEN_BYTES + NOISE_BYTES

    await node.engine.release(parent.id)
    held = await memory(node, child)  # The instant is, and so is its layer.
    assert abs(held.shared_bytes - both[child].shared_bytes) < NOISE_BYTES
    await node.engine.drop_point(forked.point.id)
    last = await memory(node, child)
    assert abs(last.shared_bytes - alone.shared_bytes) < NOISE_BYTES
    assert last.unique_bytes > both[child].unique_bytes + WRITTEN_BYTES


async def test_one_that_stands_still_can_be_weighed_and_one_that_is_gone_cannot(node: Node) -> None:
    machine = await node.root()
    await node.engine.pause(machine.id, deadline=soon())
    assert (await memory(node, machine)).unique_bytes > 0
    await node.engine.release(machine.id)
    with pytest.raises(MachineGone):
        await memory(node, machine)
