"""Guest memory as it is, and as an engine's layers say that it is: for tests that compare every byte."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from component.node import Node, soon
from forktree_agent.engine.contract import Machine
from forktree_agent.engine.microvm.layers import PAGE_BYTES, RUN_BYTES, Run
from forktree_agent.engine.microvm.records import LayerRecord, MachineRecord
from forktree_agent.engine.microvm.resources import MACHINE_KIND
from forktree_agent.engine.microvm.store import LAYER_KIND
from forktree_agent.journal import Journal
from forktree_agent.typed_records import RecordType, load_one


def chain_of(node: Node, machine: Machine) -> tuple[str, ...]:
    """The layers that a fork of the machine would start from, oldest first, as the journal has them."""
    return _read(node, MACHINE_KIND, machine.id, MachineRecord).chain


def layer_of(node: Node, layer: str) -> LayerRecord:
    return _read(node, LAYER_KIND, layer, LayerRecord)


def _read(node: Node, kind: str, key: str, form: type[RecordType]) -> RecordType:
    record = load_one(Journal(node.journal, node.keeper.boot_id), kind, key, form)
    assert record is not None
    return record


async def memory_of(node: Node, machine: Machine, size_bytes: int) -> bytes:
    """All of a paused machine's memory, read from outside: its QEMU has no part in it."""
    pid = await node.pid(machine)
    start = _ram_address(Path(f"/proc/{pid}/maps").read_text(), size_bytes)
    memory = os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.pread(memory, size_bytes, start)
    finally:
        os.close(memory)


def _ram_address(maps: str, size_bytes: int) -> int:
    """Where guest memory lies: mappings of memory files one behind the other, together of its size."""
    first = last = 0
    for line in maps.splitlines():
        fields = line.split()
        start, end = (int(edge, 16) for edge in fields[0].split("-"))
        if not (len(fields) > 5 and fields[5].startswith("/memfd:forktree-") and fields[1] == "rw-p"):
            continue
        first, last = (first if start == last else start), end
        if last - first == size_bytes:
            return first
    raise AssertionError("guest memory was not found")


async def image_of(node: Node, chain: Sequence[str]) -> bytes:
    """The memory that a child starts with which maps these layers, oldest first."""
    image = bytearray()
    for name in chain:
        layer = layer_of(node, name)
        file = await node.keeper.lend_file(name, deadline=soon())
        try:
            if not image:
                image += os.pread(file, layer.bytes, 0)
                continue
            table = os.pread(file, layer.runs * RUN_BYTES, layer.table_offset)
            for run in Run.decode_table(table):
                page = os.pread(file, run.pages * PAGE_BYTES, run.offset)
                image[run.page * PAGE_BYTES : (run.page + run.pages) * PAGE_BYTES] = page
        finally:
            os.close(file)
    return bytes(image)
