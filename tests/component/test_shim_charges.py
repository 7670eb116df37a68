"""Whose memory a layer is: the control group of the QEMU that it was copied from, not the agent's."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from component.shim_machine import firmware_machine, memfd, soon

MOUNT = Path("/sys/fs/cgroup")
LAYER_BYTES = 8 << 20
BATCH_BYTES = 1 << 20
"""The kernel counts in batches for each CPU, so the numbers are this exact at best."""


class MemoryGroup:
    """A control group that counts memory, of version 1 or 2."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        names = ("memory.usage_in_bytes", "memory.current")
        self._usage = next((folder / name for name in names if (folder / name).exists()), None)

    @property
    def counts(self) -> bool:
        return self._usage is not None

    def take(self, pid: int) -> None:
        (self._folder / "cgroup.procs").write_text(str(pid))

    def usage_bytes(self) -> int:
        assert self._usage is not None
        return int(self._usage.read_text())


@pytest.fixture
def group() -> Iterator[MemoryGroup]:
    parent = MOUNT / "memory" if (MOUNT / "memory").is_dir() else MOUNT
    folder = parent / f"forktree-test-{secrets.token_hex(4)}"
    folder.mkdir()
    try:
        group = MemoryGroup(folder)
        if not group.counts:
            pytest.skip("the memory controller is not given to this control group")
        yield group
    finally:
        folder.rmdir()


async def test_a_prepared_layer_is_charged_to_the_machine(group: MemoryGroup) -> None:
    async with firmware_machine() as machine:
        group.take(machine.process.pid)
        before = group.usage_bytes()
        layer = memfd()
        await machine.shim.prepare(layer, LAYER_BYTES, deadline=soon())
        assert group.usage_bytes() - before >= LAYER_BYTES - BATCH_BYTES
        await machine.shim.finish(deadline=soon())
        os.close(layer)


async def test_memory_taken_for_a_file_is_the_machines_whoever_fills_it(group: MemoryGroup) -> None:
    async with firmware_machine() as machine:
        group.take(machine.process.pid)
        before = group.usage_bytes()
        file = memfd()
        await machine.shim.allocate(file, 0, LAYER_BYTES, deadline=soon())
        assert group.usage_bytes() - before >= LAYER_BYTES - BATCH_BYTES
        os.pwrite(file, b"\1" * LAYER_BYTES, 0)  # As we do who merge layers, and stand in another group.
        assert LAYER_BYTES - BATCH_BYTES <= group.usage_bytes() - before <= LAYER_BYTES + BATCH_BYTES
        os.close(file)
