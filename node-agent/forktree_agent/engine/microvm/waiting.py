"""A QEMU that waits for device state, and the memory that it is going to start from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forktree_agent.engine.microvm.records import Build, LayerRecord, MachineRecord
from forktree_agent.engine.microvm.vmms import Vmm, VmmOrder

if TYPE_CHECKING:
    from forktree_agent.engine.microvm.resources import Resources
    from forktree_agent.engine.microvm.store import FileStore


@dataclass(frozen=True, slots=True)
class Origin:
    """What children start from: all that their parent, or the instant, was made of."""

    baseline: str
    chain: tuple[str, ...]
    build: Build


@dataclass(frozen=True, slots=True)
class Standby:
    """One that was started ahead of its fork. The chain of its record is what it has mapped."""

    record: MachineRecord
    vmm: Vmm

    @property
    def name(self) -> str:
        return self.record.id


async def start_waiting(resources: Resources, record: MachineRecord, group: str, *, deadline: float) -> Vmm:
    """Start a QEMU with all layers of the record's chain mapped. The record must be written down already."""
    base, *layers = record.chain
    store = resources.store
    vmm = await resources.vmms.wait_for_state(
        VmmOrder(
            name=record.id,
            uid=record.uid,
            build=record.build,
            ram=store.descriptor(base),
            disk=store.descriptor(record.build.disk_file),
            group=group,
        ),
        deadline=deadline,
    )
    await map_layers(resources, vmm, layers, deadline=deadline)
    return vmm


async def map_layers(resources: Resources, vmm: Vmm, layers: Iterable[str], *, deadline: float) -> None:
    """Oldest first: a later layer's page covers an earlier one's."""
    async with resources.vmms.unborn(vmm.name):
        for name in layers:
            await map_layer(vmm, resources.store, resources.store.layer(name), deadline=deadline)


async def map_layer(vmm: Vmm, store: FileStore, layer: LayerRecord, *, deadline: float) -> None:
    if layer.runs == 0:
        return
    await vmm.shim.map_layer(
        store.descriptor(layer.id), layer.table_offset, layer.runs, layer.copied_runs, deadline=deadline
    )
