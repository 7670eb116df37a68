"""Next layers: memory for what the next fork of a parent will copy, taken and touched after the fork before.

First touch is what costs, and it is the parent's shim that touches, as the memory is the parent's tree's.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from forktree_agent.engine.contract import EngineError, MachineId, TreeLimits
from forktree_agent.engine.microvm.endings import to_the_end
from forktree_agent.engine.microvm.keeping import soon
from forktree_agent.engine.microvm.layers import whole_pages
from forktree_agent.journal import JournalError

if TYPE_CHECKING:
    from forktree_agent.engine.microvm.calm import Calm
    from forktree_agent.engine.microvm.forking import Live
    from forktree_agent.engine.microvm.resources import Resources

log = logging.getLogger(__name__)

REMEMBERED = 3
"""Forks by which the next layer is sized: the largest of them."""
MARGIN = 1.25
EXTRA_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class PreparedLayer:
    """An empty file that the parent's shim has ready. It is no layer yet, and no record tells of it."""

    id: str
    fd: int
    size_bytes: int


@dataclass(slots=True)
class Ahead:
    """What is there ahead of a machine's next fork, and what its last ones took."""

    layer: PreparedLayer | None = None
    taken: deque[int] = field(default_factory=lambda: deque[int](maxlen=REMEMBERED))

    @property
    def next_bytes(self) -> int:
        """What the next layer should have room for; 0: nothing is known of it."""
        return whole_pages(int(max(self.taken) * MARGIN) + EXTRA_BYTES) if self.taken else 0

    def fitting(self, least_bytes: int) -> PreparedLayer | None:
        """The layer, if it is there and large enough."""
        return self.layer if self.layer is not None and self.layer.size_bytes >= least_bytes else None


class Preparer:
    """Prepares one layer at a time, when nobody forks. `run` has to be running for anything to happen."""

    def __init__(
        self, resources: Resources, live: dict[MachineId, Live], calm: Calm, tasks: asyncio.TaskGroup
    ) -> None:
        """`live` is the engine's own table."""
        self._resources = resources
        self._live = live
        self._calm = calm
        self._tasks = tasks
        self._wanted: dict[MachineId, TreeLimits] = {}
        self._wanted_changed = asyncio.Event()
        self._dropping: set[asyncio.Task[None]] = set()

    def consider(self, machine: MachineId, limits: TreeLimits) -> None:
        """A fork of it has ended, well or not: have its next layer ready."""
        self._wanted[machine] = limits
        self._wanted_changed.set()

    async def run(self) -> None:
        while True:
            await self._wanted_changed.wait()
            self._wanted_changed.clear()
            while self._wanted:
                await self._calm.comes()
                machine = next(iter(self._wanted))
                limits = self._wanted.pop(machine)
                live = self._live.get(machine)
                if live is None:
                    continue
                try:
                    async with live.forking:
                        await self._prepare(live, limits)
                except (EngineError, JournalError) as err:  # The next fork prepares its own.
                    log.info("not_prepared machine=%s reason=%s message=%r", machine, err.reason, err.message)

    async def close(self) -> None:
        if self._dropping:
            await asyncio.wait(self._dropping)

    async def _prepare(self, live: Live, limits: TreeLimits) -> None:
        size_bytes = live.ahead.next_bytes
        wanted = 0 < size_bytes <= self._resources.settings.prepared_bytes
        if not wanted or live.ahead.fitting(size_bytes) is not None:
            return
        await discard(self._resources, live)
        name = f"layer-{uuid.uuid4().hex[:12]}"
        self._resources.ledger.spare(name, size_bytes, limits, give_up=partial(self._evict, live, name))
        try:
            fd = await self._resources.store.create(name)
            await live.vmm.answering.to(
                live.vmm.shim.prepare(fd, size_bytes, deadline=soon()),
                "the shim's PREPARE",
                work_bytes=size_bytes,
            )
        except BaseException:
            self._resources.ledger.free(name)
            await to_the_end(self._resources.store.drop(name), f"undo-{name}")
            raise
        live.ahead.layer = PreparedLayer(name, fd, size_bytes)

    def _evict(self, live: Live, name: str) -> None:
        """Somebody takes its room, which is free at once; the memory is in a moment."""
        task = self._tasks.create_task(self._let_go(live, name), name=f"let-go-{name}")
        self._dropping.add(task)
        task.add_done_callback(self._dropping.discard)

    async def _let_go(self, live: Live, name: str) -> None:
        async with live.forking:
            if live.ahead.layer is None or live.ahead.layer.id != name:
                return  # A fork has taken it meanwhile, and its room with it.
            try:
                await discard(self._resources, live)
            except (EngineError, JournalError) as err:
                log.info("not_let_go machine=%s message=%r", live.record.id, err.message)


async def discard(resources: Resources, live: Live) -> None:
    """Drop the layer prepared for a machine, if there is one. Nobody may fork the machine meanwhile."""
    layer, live.ahead.layer = live.ahead.layer, None
    if layer is None:
        return
    try:
        if not live.vmm.closing.is_set():
            finish = live.vmm.shim.finish(deadline=soon())
            await live.vmm.answering.to(finish, "the shim's FINISH")
    finally:
        await to_the_end(resources.store.drop(layer.id), f"drop-{layer.id}")
