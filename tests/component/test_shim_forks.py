"""Guest memory through the shim: what a child gets is what its parent had, to the byte, and stays its own."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, ExitStack

import pytest

from component.shim_machine import (
    RAM_BYTES,
    ShimMachine,
    differing_pages,
    firmware_machine,
    is_one_instant,
    memfd,
    rounds,
    soon,
)
from forktree_agent.engine.microvm.layers import PAGE_BYTES, TARGET_RUNS, Run
from forktree_agent.engine.microvm.shim import Dump

Layer = tuple[int, Dump]


@pytest.fixture
def files() -> Iterator[ExitStack]:
    """Closes the descriptors that are handed to it."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture
async def machines() -> AsyncIterator[AsyncExitStack]:
    """Ends the machines that are entered in it."""
    async with AsyncExitStack() as stack:
        yield stack


async def frozen(parent: ShimMachine, files: ExitStack, **options: int) -> tuple[Layer, int, bytes]:
    """The stopped parent's layer and device state, and its memory."""
    await parent.save()
    layer = await parent.dump(**options)
    files.callback(os.close, layer[0])
    return layer, parent.state, await parent.memory()


async def born(
    machines: AsyncExitStack, layers: list[Layer], state: int, *, stride_pages: int = 1
) -> ShimMachine:
    """A child of all these layers, stopped where its parent was."""
    child = await machines.enter_async_context(firmware_machine(stride_pages=stride_pages, incoming=True))
    for fd, dump in layers:
        await child.shim.map_layer(fd, dump.table_offset, dump.runs, deadline=soon())
    await child.load(state)
    return child


async def test_a_child_has_its_parents_memory_and_goes_on_alone(
    machines: AsyncExitStack, files: ExitStack
) -> None:
    parent = await machines.enter_async_context(firmware_machine())
    await parent.run_until_written()
    layer, state, memory = await frozen(parent, files)
    child = await born(machines, [layer], state)
    assert differing_pages(await child.memory(), memory) == []
    assert differing_pages(await parent.memory(), memory) == []  # The dump itself changed nothing.
    before = rounds(memory)
    assert is_one_instant(before)
    await child.run_until_written(beyond=before[0])
    after = rounds(await child.memory())
    assert is_one_instant(after)
    assert after != before
    assert rounds(await parent.memory()) == before
    await parent.run_until_written()
    assert is_one_instant(rounds(await parent.memory()))


async def test_every_generation_is_the_one_before_it_plus_one_layer(
    machines: AsyncExitStack, files: ExitStack
) -> None:
    machine = await machines.enter_async_context(firmware_machine(stride_pages=7))
    layers: list[Layer] = []
    for _ in range(4):
        await machine.run_until_written()
        layer, state, memory = await frozen(machine, files, gap_pages=2)
        layers.append(layer)
        machine = await born(machines, layers, state, stride_pages=7)
        assert differing_pages(await machine.memory(), memory) == []
        fresh = await machine.shim.stat(deadline=soon())
        assert fresh.private_pages < 64  # Only what loading device state itself wrote.
        assert is_one_instant(rounds(memory, 7))


async def test_siblings_of_one_layer_share_nothing_they_write(
    machines: AsyncExitStack, files: ExitStack
) -> None:
    parent = await machines.enter_async_context(firmware_machine())
    await parent.run_until_written()
    layer, state, memory = await frozen(parent, files)
    one, other = [await born(machines, [layer], state) for _ in range(2)]
    await one.run_until_written()
    assert differing_pages(await other.memory(), memory) == []
    late = await born(machines, [layer], state)
    assert differing_pages(await late.memory(), memory) == []


@pytest.mark.parametrize("prepared_bytes", [0, PAGE_BYTES, 3 << 20, RAM_BYTES])
async def test_a_layer_is_the_same_however_much_of_it_was_prepared(
    machines: AsyncExitStack, files: ExitStack, prepared_bytes: int
) -> None:
    parent = await machines.enter_async_context(firmware_machine())
    await parent.run_until_written()
    layer, state, memory = await frozen(parent, files, prepared_bytes=prepared_bytes)
    child = await born(machines, [layer], state)
    assert differing_pages(await child.memory(), memory) == []


async def test_scattered_writes_are_joined_into_few_runs(machines: AsyncExitStack, files: ExitStack) -> None:
    parent = await machines.enter_async_context(firmware_machine(stride_pages=2))
    await parent.run_until_written()
    layer, state, memory = await frozen(parent, files, gap_pages=0)
    dump = layer[1]
    assert dump.dirty_pages > TARGET_RUNS
    assert dump.runs <= TARGET_RUNS
    assert dump.dirty_pages < dump.pages <= 2 * dump.dirty_pages
    assert dump.gap_pages == 1
    child = await born(machines, [layer], state, stride_pages=2)
    assert differing_pages(await child.memory(), memory) == []


async def test_a_layer_says_itself_which_pages_it_holds(machines: AsyncExitStack, files: ExitStack) -> None:
    parent = await machines.enter_async_context(firmware_machine(stride_pages=9))
    await parent.run_until_written()
    (fd, dump), _, memory = await frozen(parent, files)
    runs = Run.decode_table(os.pread(fd, dump.bytes - dump.table_offset, dump.table_offset))
    assert len(runs) == dump.runs
    assert sum(run.pages for run in runs) == dump.pages
    for run in runs:
        start, size = run.page * PAGE_BYTES, run.pages * PAGE_BYTES
        assert os.pread(fd, size, run.offset) == memory[start : start + size]


async def test_a_whole_file_can_back_all_of_memory(machines: AsyncExitStack, files: ExitStack) -> None:
    content = b"".join(page.to_bytes(8, "little") * 512 for page in range(RAM_BYTES // PAGE_BYTES))
    flat = memfd(content)
    files.callback(os.close, flat)
    machine = await machines.enter_async_context(firmware_machine(incoming=True))
    await machine.shim.map_all(flat, RAM_BYTES, deadline=soon())
    assert differing_pages(await machine.memory(), content) == []
    assert (await machine.shim.stat(deadline=soon())).private_pages == 0


async def test_layer_memory_is_taken_when_it_is_prepared(machines: AsyncExitStack, files: ExitStack) -> None:
    parent = await machines.enter_async_context(firmware_machine())
    layer = memfd()
    files.callback(os.close, layer)
    await parent.shim.prepare(layer, (1 << 20) - 1, deadline=soon())
    found = os.fstat(layer)
    assert (found.st_size, found.st_blocks * 512) == (1 << 20, 1 << 20)
    await parent.shim.finish(deadline=soon())  # Nothing was dumped: given up.
    assert os.fstat(layer).st_size == 0
