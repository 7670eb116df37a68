"""What all of the engine's operations work with, and the two ways in which work ends: kept, or undone."""

from __future__ import annotations

import logging
import uuid
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import msgspec

from forktree_agent.engine.microvm.endings import to_the_end
from forktree_agent.engine.microvm.records import (
    BatchRecord,
    LayerRecord,
    MachineRecord,
    PointRecord,
)
from forktree_agent.typed_records import load_one, to_journal

if TYPE_CHECKING:
    from forktree_agent.engine.microvm.admission import Ledger
    from forktree_agent.engine.microvm.images import GuestDirectory
    from forktree_agent.engine.microvm.settings import EngineSettings
    from forktree_agent.engine.microvm.store import FileStore
    from forktree_agent.engine.microvm.vmms import Vmms
    from forktree_agent.journal import Journal

log = logging.getLogger(__name__)

Owned = TypeVar("Owned", MachineRecord, PointRecord)

MACHINE_KIND = "machine"
POINT_KIND = "point"
BATCH_KIND = "batch"


@dataclass(frozen=True, slots=True)
class Resources:
    settings: EngineSettings
    guest: GuestDirectory
    qemu_version: str
    journal: Journal
    store: FileStore
    vmms: Vmms
    ledger: Ledger

    def register(self, record: MachineRecord) -> None:
        """Write a machine down before it is started, and keep the layers it is going to map.

        Raises `JournalError`, and `PointLost` when a layer is gone.
        """
        self.journal.put(MACHINE_KIND, record.id, to_journal(record))
        self.store.use(record.id, record.chain)

    def note_dumped(self, record: MachineRecord, layer: LayerRecord, mark: int) -> MachineRecord:
        """Write down that a machine's next layer will be a difference to this one, which it keeps."""
        noted = record.dumped(layer.id, mark)
        self.register(noted)
        return noted

    def note_paused(self, record: MachineRecord, *, paused: bool) -> MachineRecord:
        """Write down that a machine is to stand still, or to run, before it does."""
        noted = msgspec.structs.replace(record, paused=paused)
        self.journal.put(MACHINE_KIND, record.id, to_journal(noted))
        return noted

    def note_answered(self, record: MachineRecord) -> MachineRecord:
        """Write down that a child has answered its identity."""
        noted = msgspec.structs.replace(record, unanswered=None)
        self.journal.put(MACHINE_KIND, record.id, to_journal(noted))
        return noted

    def note_owner(self, record: Owned, owner: str) -> Owned:
        """Write down that a machine or an instant belongs to another."""
        noted = msgspec.structs.replace(record, owner=owner)
        kind = MACHINE_KIND if isinstance(record, MachineRecord) else POINT_KIND
        self.journal.put(kind, record.id, to_journal(noted))
        return noted

    async def end_machine(self, name: str) -> None:
        """End a machine and all that was its own; its record goes last. Idempotent."""
        await self.vmms.end(name)
        self.ledger.free(name)
        # Only now: until it ended, a fork of it could add to its chain.
        record = load_one(self.journal, MACHINE_KIND, name, MachineRecord)
        if record is None:
            return
        await self.store.leave(name, record.chain)
        self.vmms.give_back_uid(record.uid)
        self.journal.remove(MACHINE_KIND, name)

    async def end_point(self, name: str) -> None:
        """Hold an instant no longer; its record goes last. Idempotent."""
        record = load_one(self.journal, POINT_KIND, name, PointRecord)
        if record is None:
            return
        await self.store.leave(name, record.chain)
        await self.store.drop(record.state_file)
        self.journal.remove(POINT_KIND, name)

    async def undo(self, key: str, batch: BatchRecord) -> None:
        """Take back everything that a batch names, however far it got; its record goes last.

        But for layers that others use: what was dumped of a parent stays in the parent's chain.
        """
        if batch.group is not None:
            self.vmms.note_group(batch.group, batch.machines)
        for machine in batch.machines:
            await self.end_machine(machine)
        for point in batch.points:
            await self.end_point(point)
        await self.store.drop_unused(batch.files)
        self.journal.remove(BATCH_KIND, key)

    @asynccontextmanager
    async def begun(self, record: BatchRecord) -> AsyncGenerator[Batch]:
        """Work that is undone on any way out but `commit()`, a crash of the agent included."""
        batch = Batch(self.journal, uuid.uuid4().hex)
        self.journal.put(BATCH_KIND, batch.key, to_journal(record))
        try:
            yield batch
        finally:
            if not batch.committed:
                await to_the_end(self.undo(batch.key, record), f"undo-{batch.key}")


@dataclass(slots=True)
class Batch:
    journal: Journal
    key: str
    committed: bool = field(default=False)

    def commit(self) -> None:
        """Keep what was made. Nothing may be awaited between this and leaving the batch.

        Raises `JournalError` where the record cannot be removed: the next agent would undo all of it, so this
        one does.
        """
        self.journal.remove(BATCH_KIND, self.key)
        self.committed = True
