"""One machine dumped again and again: each layer has what is new, and all of them together its memory."""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, ExitStack

import pytest

from component.shim_machine import ShimMachine, differing_pages, firmware_machine, memfd, soon
from component.test_shim_guest import guest_machine, sh
from forktree_agent.engine.microvm.guest import UNIDENTIFIED
from forktree_agent.engine.microvm.layers import PAGE_BYTES
from forktree_agent.engine.microvm.shim import Dump, ShimError, Status
from forktree_agent.engine.microvm.tracking import new_mark

Layer = tuple[int, Dump]

FORKS = 8
QUIET_PAGES = 64
"""What QEMU itself may write to guest memory between two dumps of a machine that stands still."""


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


class Parent:
    """A machine and the chain of its dumps, as the engine keeps it."""

    def __init__(self, machine: ShimMachine, files: ExitStack) -> None:
        self.machine = machine
        self.layers: list[Layer] = []
        self.mark = 0
        self._files = files

    async def dump(self, *, armed: bool = True) -> Dump:
        """Add a layer. What it is a difference to is what was asked for."""
        since, mark = self.mark, new_mark()
        if armed:
            await self.machine.shim.arm(since, deadline=soon())
        layer = await self.machine.dump(since=since, mark=mark)
        self._files.callback(os.close, layer[0])
        assert layer[1].since == since
        self.mark = mark
        self.layers.append(layer)
        return layer[1]


async def map_all(child: ShimMachine, layers: list[Layer]) -> None:
    for fd, dump in layers:
        await child.shim.map_layer(fd, dump.table_offset, dump.runs, deadline=soon())


async def tracked_firmware(machines: AsyncExitStack, *, stride_pages: int = 1) -> ShimMachine:
    machine = await machines.enter_async_context(firmware_machine(stride_pages=stride_pages))
    await machine.track()
    return machine


@pytest.mark.parametrize("stride_pages", [1, 7])
async def test_eight_forks_of_one_machine_are_each_its_memory_at_that_instant(
    machines: AsyncExitStack, files: ExitStack, stride_pages: int
) -> None:
    parent = Parent(await tracked_firmware(machines, stride_pages=stride_pages), files)
    for fork in range(FORKS):
        await parent.machine.run_until_written()
        await parent.machine.save()
        await parent.dump(armed=fork % 2 == 0)  # It saves time and copies, and is not needed to be right.
        memory = await parent.machine.memory()
        async with firmware_machine(stride_pages=stride_pages, incoming=True) as child:
            await map_all(child, parent.layers)
            await child.load(parent.machine.state)
            assert differing_pages(await child.memory(), memory) == []
        assert differing_pages(await parent.machine.memory(), memory) == []


@pytest.mark.parametrize("stride_pages", [1, 7])
async def test_a_layer_copied_from_a_running_machine_is_made_right_by_the_next(
    machines: AsyncExitStack, files: ExitStack, stride_pages: int
) -> None:
    parent = Parent(await tracked_firmware(machines, stride_pages=stride_pages), files)
    torn = False
    for _ in range(3):
        await parent.machine.run_until_written()
        await parent.machine.qmp.execute("cont")
        await parent.dump()  # It never stops writing.
        await parent.machine.qmp.execute("stop")
        await parent.machine.save()
        late = await parent.dump()
        torn |= late.dirty_pages > QUIET_PAGES
        memory = await parent.machine.memory()
        async with firmware_machine(stride_pages=stride_pages, incoming=True) as child:
            await map_all(child, parent.layers)
            await child.load(parent.machine.state)
            assert differing_pages(await child.memory(), memory) == []
    assert torn, "nothing was written while it was copied"


async def test_a_dump_has_what_was_written_since_the_one_before(
    machines: AsyncExitStack, files: ExitStack
) -> None:
    parent = Parent(await tracked_firmware(machines), files)
    await parent.machine.run_until_written()
    everything = await parent.dump()
    assert everything.dirty_pages > 1000
    counted = await parent.machine.shim.stat(since=parent.mark, deadline=soon())
    assert counted.private_pages >= everything.dirty_pages
    assert counted.written_pages < QUIET_PAGES
    assert await parent.machine.shim.arm(parent.mark, deadline=soon()) < QUIET_PAGES
    nothing = await parent.dump()
    assert nothing.pages < QUIET_PAGES


async def test_the_child_of_a_tracked_machine_is_tracked_from_its_own_birth(
    machines: AsyncExitStack, files: ExitStack
) -> None:
    parent = Parent(await tracked_firmware(machines, stride_pages=3), files)
    for _ in range(2):
        await parent.machine.run_until_written()
        await parent.machine.save()
        await parent.dump()
    machine = await machines.enter_async_context(firmware_machine(stride_pages=3, incoming=True))
    await machine.track()  # Before its memory is mapped, as in the engine.
    await map_all(machine, parent.layers)
    await machine.load(parent.machine.state)
    child = Parent(machine, files)
    child.layers = list(parent.layers)
    for _ in range(3):
        await machine.run_until_written()
        await machine.save()
        await child.dump()
        memory = await machine.memory()
        async with firmware_machine(stride_pages=3, incoming=True) as grandchild:
            await map_all(grandchild, child.layers)
            await grandchild.load(machine.state)
            assert differing_pages(await grandchild.memory(), memory) == []


@pytest.mark.parametrize("lost", ["unknown-mark", "layer-not-made"])
async def test_without_the_layer_before_it_a_dump_has_everything(
    machines: AsyncExitStack, files: ExitStack, lost: str
) -> None:
    parent = Parent(await tracked_firmware(machines), files)
    await parent.machine.run_until_written()
    first = await parent.dump()
    if lost == "unknown-mark":  # An agent made a layer, and died before it could tell anybody.
        forgotten, _ = await parent.machine.dump(since=parent.mark, mark=new_mark())
        os.close(forgotten)
    else:
        while (await parent.machine.shim.stat(since=parent.mark, deadline=soon())).written_pages < 10:
            await parent.machine.run_until_written()
        full = memfd()
        await parent.machine.shim.prepare(full, PAGE_BYTES, deadline=soon())
        fcntl.fcntl(full, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
        with pytest.raises(ShimError) as caught:
            await parent.machine.shim.dump(4, since=parent.mark, mark=new_mark(), deadline=soon())
        assert caught.value.status is Status.OS
        os.close(full)
    layer, dump = await parent.machine.dump(since=parent.mark, mark=new_mark())
    files.callback(os.close, layer)
    assert dump.since == 0
    assert dump.dirty_pages >= first.dirty_pages


async def test_a_mark_needs_tracking_and_a_refusal_costs_no_layer(machines: AsyncExitStack) -> None:
    machine = await machines.enter_async_context(firmware_machine())
    await machine.run_until_written()
    layer = memfd()
    await machine.shim.prepare(layer, PAGE_BYTES, deadline=soon())
    with pytest.raises(ShimError) as caught:
        await machine.shim.dump(4, since=0, mark=7, deadline=soon())
    assert caught.value.status is Status.NOT_TRACKED
    dump = await machine.shim.dump(4, deadline=soon())
    assert dump.dirty_pages > 0
    os.close(layer)


async def test_what_is_no_userfaultfd_device_tracks_nothing(machines: AsyncExitStack) -> None:
    machine = await machines.enter_async_context(firmware_machine())
    file = memfd()
    with pytest.raises(ShimError) as caught:
        await machine.shim.track(file, deadline=soon())
    os.close(file)
    assert caught.value.status is Status.OS
    await machine.track()
    await machine.track()  # Again, as an agent does that takes over.


async def test_memory_of_a_file_is_taken_for_the_machine(machines: AsyncExitStack) -> None:
    machine = await machines.enter_async_context(firmware_machine())
    file = memfd()
    await machine.shim.allocate(file, PAGE_BYTES, 3 * PAGE_BYTES, deadline=soon())
    found = os.fstat(file)
    assert (found.st_size, found.st_blocks * 512) == (4 * PAGE_BYTES, 3 * PAGE_BYTES)
    for offset, size_bytes in ((0, 0), (0, 1 << 40), ((1 << 64) - PAGE_BYTES, PAGE_BYTES)):
        with pytest.raises(ShimError) as caught:
            await machine.shim.allocate(file, offset, size_bytes, deadline=soon())
        assert caught.value.status is Status.BAD_LAYER
    os.close(file)


async def test_short_runs_are_copied_where_mappings_would_be_too_many(
    machines: AsyncExitStack, files: ExitStack
) -> None:
    parent = Parent(await tracked_firmware(machines, stride_pages=9), files)
    await parent.machine.run_until_written()
    await parent.machine.save()
    dump = await parent.dump()
    memory = await parent.machine.memory()
    child = await machines.enter_async_context(firmware_machine(stride_pages=9, incoming=True))
    before = (await child.shim.stat(deadline=soon())).mappings
    # The firmware's pages lie one by one, all else in a few runs.
    await child.shim.map_layer(
        parent.layers[0][0], dump.table_offset, dump.runs, dump.runs - 1, deadline=soon()
    )
    await child.load(parent.machine.state)
    assert differing_pages(await child.memory(), memory) == []
    assert (await child.shim.stat(deadline=soon())).mappings - before < dump.runs / 4


async def test_every_fork_of_a_busy_guest_is_its_memory_with_a_command_in_flight(
    machines: AsyncExitStack, files: ExitStack
) -> None:
    machine, guest = await machines.enter_async_context(guest_machine(incoming=False))
    await machine.track()
    await machine.qmp.execute("cont")
    await guest.wait_booted(deadline=soon())
    parent = Parent(machine, files)
    await sh(guest, UNIDENTIFIED, "mkfifo /tmp/begun")
    copied: list[int] = []
    for fork in range(FORKS):
        scatter = f"while [ $i -lt 200 ]; do echo $i > /tmp/f$(((i * 7 + {fork}) % 500)); i=$((i + 1)); done"
        script = f"echo begun > /tmp/begun; i=0; {scatter}; sha256sum /tmp/f*"
        running = asyncio.create_task(sh(guest, UNIDENTIFIED, script))
        assert await sh(guest, UNIDENTIFIED, "cat /tmp/begun") == "begun\n"
        await machine.qmp.execute("stop")
        await machine.save()
        dump = await parent.dump()
        copied.append(dump.pages)
        memory = await machine.memory()
        await machine.qmp.execute("cont")
        async with guest_machine(incoming=True) as (child, _):
            await map_all(child, parent.layers)
            await child.load(machine.state)
            assert differing_pages(await child.memory(), memory) == [], fork
        assert await running
    assert max(copied[1:]) < copied[0] / 2, copied
