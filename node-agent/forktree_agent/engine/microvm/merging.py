"""Layers of long chains merged into one, in the background: what children map stays bounded.

A merged layer shows exactly what the layers did that it stands for. It takes their place in every chain that
has them, of machines and of held instants; they are dropped when nobody is left who uses them.
"""

from __future__ import annotations

import asyncio
import logging
import os
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from forktree_agent.engine.contract import EngineError, MachineId, PointId, TreeLimits
from forktree_agent.engine.microvm.endings import to_the_end
from forktree_agent.engine.microvm.keeping import soon
from forktree_agent.engine.microvm.layers import (
    PAGE_BYTES,
    RUN_BYTES,
    Run,
    layer_bytes,
    short_runs,
)
from forktree_agent.engine.microvm.overlay import (
    Piece,
    extents_of,
    merge_due,
    packed,
    seen_through,
    within,
)
from forktree_agent.engine.microvm.records import (
    BatchRecord,
    LayerRecord,
    PointRecord,
)
from forktree_agent.engine.microvm.resources import POINT_KIND, Resources
from forktree_agent.typed_records import to_journal

if TYPE_CHECKING:
    from forktree_agent.engine.microvm.calm import Calm
    from forktree_agent.engine.microvm.forking import Live
    from forktree_agent.engine.microvm.standby import Standbys
    from forktree_agent.engine.microvm.store import FileStore

log = logging.getLogger(__name__)

CHUNK_BYTES = 1 << 20
"""Copied between two looks at whether anybody forks: half a millisecond."""
ALLOCATED_BYTES = 4 << 20
"""Memory taken at once by a shim, which could be asked for a fork meanwhile."""
PATIENCE_SECONDS = 1.0
"""Of a merge, for a moment in which nobody forks. On a node that always forks it goes on all the same."""


@dataclass(frozen=True, slots=True)
class Merged:
    """A merged layer, and which it stands for."""

    chain: tuple[str, ...]
    """From the baseline to the newest layer in it."""
    kept: int
    """So many layers of the chain it stands upon; it stands for the others."""
    layer: str

    @property
    def replaced(self) -> tuple[str, ...]:
        return self.chain[self.kept :]

    def shorten(self, chain: tuple[str, ...]) -> tuple[str, ...] | None:
        """`chain` with the merged layer in place of those it stands for; None where not all are in it."""
        if chain[: len(self.chain)] != self.chain:
            return None
        return (*chain[: self.kept], self.layer, *chain[len(self.chain) :])


@dataclass(frozen=True, slots=True)
class Plan:
    """What a merged layer is made of."""

    runs: tuple[Run, ...]
    pieces: tuple[Piece, ...]
    """One behind the other they are the runs' pages. Each is in one of the layers of the chain."""

    @property
    def pages(self) -> int:
        return sum(run.pages for run in self.runs)

    @property
    def bytes(self) -> int:
        return layer_bytes(self.pages * PAGE_BYTES, len(self.runs))


class Merger:
    """Merges one chain at a time, when nobody forks. `run` has to be running for anything to happen."""

    def __init__(
        self,
        resources: Resources,
        live: dict[MachineId, Live],
        points: dict[PointId, PointRecord],
        standbys: Standbys,
        calm: Calm,
    ) -> None:
        """`live` and `points` are the engine's own tables."""
        self._resources = resources
        self._standbys = standbys
        self._calm = calm
        self._live = live
        self._points = points
        self._wanted: dict[MachineId, TreeLimits] = {}
        self._wanted_changed = asyncio.Event()
        self._done: list[Merged] = []

    def consider(self, machines: Iterable[MachineId], limits: TreeLimits) -> None:
        """See to it in the background that the chains of these machines are not too long."""
        self._wanted.update(dict.fromkeys(machines, limits))
        self._wanted_changed.set()

    async def run(self) -> None:
        """Merge what is to be considered, until cancelled."""
        while True:
            await self._wanted_changed.wait()
            self._wanted_changed.clear()
            while self._wanted:
                machine = next(iter(self._wanted))
                limits = self._wanted.pop(machine)
                try:
                    await self._look_at(machine, limits)
                except Exception as err:
                    if _is_cancelled():  # It failed on the way out.
                        return
                    if not isinstance(err, EngineError):
                        log.exception("merge_failed machine=%s", machine)
                    else:  # It is asked for again after the next fork; until then children map more.
                        log.info("not_merged machine=%s reason=%s message=%r", machine, err.reason, str(err))

    async def _look_at(self, machine: MachineId, limits: TreeLimits) -> None:
        self._done = [merged for merged in self._done if self._resources.store.holds(merged.layer)]
        for merged in self._done:
            await self._shorten_machine(machine, merged)
        live = self._live.get(machine)
        if live is not None:
            await self._merge(live, limits)

    async def _merge(self, live: Live, limits: TreeLimits) -> None:
        store, chain = self._resources.store, live.record.chain
        layers = [store.layer(name) for name in chain]
        count = merge_due([(layer.bytes, layer.runs) for layer in layers[1:]])
        if count == 0:
            return
        merged = Merged(chain, len(chain) - count, f"layer-{uuid.uuid4().hex[:12]}")
        store.use(merged.layer, chain)  # Whoever else leaves them meanwhile: they are read.
        try:
            async with self._resources.begun(BatchRecord(machines=(), files=(merged.layer,))) as batch:
                plan = await self._plan(layers, merged.kept)
                self._resources.ledger.reserve(merged.layer, plan.bytes, limits)
                await self._copy(plan, live, [store.descriptor(name) for name in chain], merged.layer)
                store.seal(merged.layer)
                store.add_layer(_record(merged.layer, plan, live.record.tree), user=merged.layer)
                self._done.append(merged)
                await self._replace(merged)
                batch.commit()
        finally:
            await to_the_end(store.leave(merged.layer, (*chain, merged.layer)), f"merged-{merged.layer}")
        log.info(
            "merged layers=%d layer=%s bytes=%d runs=%d", count, merged.layer, plan.bytes, len(plan.runs)
        )

    async def _plan(self, layers: Sequence[LayerRecord], kept: int) -> Plan:
        """Some milliseconds of thinking in a thread, for thousands of runs."""
        tables = [_table(self._resources.store, layer) for layer in layers]
        await self._moment()
        extents = extents_of(await asyncio.to_thread(seen_through, tables[kept:]))
        await self._moment()
        # A gap's pages may be of any layer, down to the baseline.
        pieces = within(await asyncio.to_thread(seen_through, tables), extents)
        return Plan(tuple(packed(extents)), tuple(pieces))

    async def _copy(self, plan: Plan, live: Live, sources: Sequence[int], name: str) -> None:
        """Fill a new file. Its memory is the machine's, whose shim takes it before we write to it."""
        target = await self._resources.store.create(name)
        for start in range(0, plan.bytes, ALLOCATED_BYTES):
            size_bytes = min(ALLOCATED_BYTES, plan.bytes - start)
            await self._moment()
            await live.vmm.shim.allocate(target, start, size_bytes, deadline=soon())
        offset = 0
        for chunk in chunks_of(plan.pieces):
            await self._moment()
            # Not left alone while it writes: its descriptors would be closed, and be another file's.
            offset += await to_the_end(
                asyncio.to_thread(copy_chunk, chunk, sources, target, offset), f"merge-{name}"
            )
        os.pwrite(target, b"".join(run.encode() for run in plan.runs), offset)

    async def _moment(self) -> None:
        """Until nobody forks, or not much longer."""
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                await self._calm.comes()
        except TimeoutError:
            pass

    async def _replace(self, merged: Merged) -> None:
        for machine in list(self._live):
            await self._shorten_machine(machine, merged)
        for point in list(self._points):
            await self._shorten_point(point, merged)

    async def _shorten_machine(self, machine: MachineId, merged: Merged) -> None:
        live = self._live.get(machine)
        if live is None or merged.shorten(live.record.chain) is None:
            return
        async with live.forking:  # A fork under way starts from the chain that it has seen.
            chain = merged.shorten(live.record.chain)
            if self._live.get(machine) is not live or chain is None:
                return
            record = msgspec.structs.replace(live.record, chain=chain)
            self._resources.register(record)
            live.record = record
            await self._resources.store.leave(live.record.id, merged.replaced)
            await self._standbys.shorten(machine, merged)

    async def _shorten_point(self, point: PointId, merged: Merged) -> None:
        record = self._points.get(point)
        chain = merged.shorten(record.chain) if record is not None else None
        if record is None or chain is None:
            return
        shorter = msgspec.structs.replace(record, chain=chain)
        self._resources.journal.put(POINT_KIND, shorter.id, to_journal(shorter))
        self._resources.store.use(shorter.id, chain)
        self._points[point] = shorter
        await self._resources.store.leave(shorter.id, merged.replaced)


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _table(store: FileStore, layer: LayerRecord) -> Sequence[Run]:
    """The runs of a layer; of one without a table, all of guest RAM in place."""
    if layer.table_offset == 0 and layer.runs == 0 and layer.pages > 0:
        return (Run(0, layer.pages, 0),)
    return Run.decode_table(os.pread(store.descriptor(layer.id), layer.runs * RUN_BYTES, layer.table_offset))


def _record(name: str, plan: Plan, tree: str) -> LayerRecord:
    return LayerRecord(
        id=name,
        bytes=plan.bytes,
        pages=plan.pages,
        runs=len(plan.runs),
        table_offset=plan.pages * PAGE_BYTES,
        copied_runs=short_runs(plan.runs),
        tree=tree,
    )


def chunks_of(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """The pieces in their order, cut and gathered to what is copied at once."""
    chunk: list[Piece] = []
    room = most = CHUNK_BYTES // PAGE_BYTES
    for piece in pieces:
        page = piece.page
        while page < piece.end:
            part = piece.cut(page, min(piece.end, page + room))
            chunk.append(part)
            page, room = part.end, room - part.pages
            if room == 0:
                yield chunk
                chunk, room = [], most
    if chunk:
        yield chunk


def copy_chunk(pieces: Sequence[Piece], sources: Sequence[int], target: int, offset: int) -> int:
    """Write pages of the layers `sources` to the file `target`, one piece behind the other.

    Returns how many bytes. For a thread: nearly all of it is reading and writing files in memory, which holds
    up no other.
    """
    pages = b"".join(
        os.pread(sources[piece.layer], piece.pages * PAGE_BYTES, piece.offset) for piece in pieces
    )
    wanted = sum(piece.pages for piece in pieces) * PAGE_BYTES
    if len(pages) != wanted or os.pwrite(target, pages, offset) != wanted:
        raise OSError(f"{wanted} bytes of layers could not be copied")
    return wanted
