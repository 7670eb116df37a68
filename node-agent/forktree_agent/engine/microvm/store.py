"""Files of guest memory and device state: made here, held by the keeper, dropped when nobody uses them.

A file in memory lives as long as a descriptor or a mapping of it. The keeper's descriptor is what lets it
outlive the agent, ours is for handing it on; the kernel frees the pages when the last mapping goes too.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

from forktree_agent.engine.contract import PointLost
from forktree_agent.engine.microvm.keeping import asking, soon
from forktree_agent.engine.microvm.records import LayerRecord
from forktree_agent.typed_records import load_all, to_journal

if TYPE_CHECKING:
    from pathlib import Path

    from forktree_agent.engine.microvm.admission import Ledger
    from forktree_agent.journal import Journal
    from forktree_agent.keeper_client import Keeper

LAYER_KIND = "layer"
BLOCK_BYTES = 512
"""Of `st_blocks`, on every file system."""
SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
"""Writing to a layer would change, truncating it would kill, every machine that maps it."""


class FileStore:
    """Open files by name, and which machines and points use which layer."""

    def __init__(self, keeper: Keeper, journal: Journal, ledger: Ledger) -> None:
        self._keeper = keeper
        self._journal = journal
        self._ledger = ledger
        self._open: dict[str, int] = {}
        self._layers: dict[str, LayerRecord] = {}
        self._users: dict[str, set[str]] = {}

    async def create(self, name: str) -> int:
        """A new empty file, held by the keeper from the start. The descriptor stays the store's."""
        descriptor = self.make(name)
        await self.hold(name)
        return descriptor

    def make(self, name: str) -> int:
        """A new empty file, gone with this process until the keeper holds it."""
        descriptor = os.memfd_create(f"forktree-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._open[name] = descriptor
        return descriptor

    async def hold_disk(self, name: str, image: Path) -> int:
        """The root disk of this content, held by the keeper from the first machine on that has it.

        The descriptor stays the store's. Images come and go with agents; machines and what is forked of them
        go on with the disk that they began with.
        """
        if name not in self._open:
            descriptor = os.open(image, os.O_RDONLY | os.O_CLOEXEC)
            try:
                with asking(f"file {name}"):
                    await self._keeper.hold(name, descriptor, deadline=soon())
            except BaseException:
                os.close(descriptor)
                raise
            if self._open.setdefault(name, descriptor) != descriptor:
                os.close(descriptor)  # Another bake of this image was as far at the same time.
        return self._open[name]

    async def hold(self, name: str) -> None:
        """Have the keeper hold a file that was made."""
        with asking(f"file {name}"):
            await self._keeper.hold(name, self.descriptor(name), deadline=soon())

    def descriptor(self, name: str) -> int:
        """Raises `PointLost` when no such file is held."""
        try:
            return self._open[name]
        except KeyError:
            raise PointLost(f"memory file {name} is not held any more") from None

    def seal(self, name: str) -> None:
        """Make a finished file immutable. No writable mapping of it may be left."""
        fcntl.fcntl(self._open[name], fcntl.F_ADD_SEALS, SEALS)

    def add_layer(self, layer: LayerRecord, user: str) -> None:
        """Make a file known as a layer. Its first user is named at once: a layer without users is dropped.

        It counts as its tree's memory until then, whoever uses it.
        """
        self._journal.put(LAYER_KIND, layer.id, to_journal(layer))
        self._know(layer)
        self._users[layer.id].add(user)

    def _know(self, layer: LayerRecord) -> None:
        self._layers[layer.id] = layer
        self._users[layer.id] = set()
        self._ledger.record(layer.id, layer.bytes, layer.tree)

    def layer(self, name: str) -> LayerRecord:
        """Raises `PointLost` when there is no such layer."""
        try:
            return self._layers[name]
        except KeyError:
            raise PointLost(f"layer {name} is not held any more") from None

    def taken_bytes(self, name: str) -> int:
        """Memory that a layer's file takes: less than its length where much of it was never written to."""
        return os.fstat(self.descriptor(name)).st_blocks * BLOCK_BYTES

    def users(self, name: str) -> frozenset[str]:
        return frozenset(self._users.get(name, ()))

    def holds(self, name: str) -> bool:
        return name in self._layers

    def use(self, user: str, chain: Iterable[str]) -> None:
        """Keep every layer of `chain` for `user`. Raises `PointLost` when one is gone; then none is kept."""
        layers = [self.layer(name) for name in chain]
        for layer in layers:
            self._users[layer.id].add(user)

    async def leave(self, user: str, chain: Iterable[str]) -> None:
        """`user` needs these layers no more. Those that nobody needs are dropped. Idempotent."""
        unused: list[str] = []
        for name in chain:
            users = self._users.get(name)
            if users is None:
                continue
            users.discard(user)
            if not users:
                unused.append(name)
        await self.drop(*unused)

    async def drop(self, *names: str) -> None:
        """Hold these files no longer. Idempotent."""
        for name in names:
            self._layers.pop(name, None)
            self._users.pop(name, None)
            self._ledger.free(name)
            self._journal.remove(LAYER_KIND, name)
            descriptor = self._open.pop(name, None)
            if descriptor is not None:
                os.close(descriptor)
        if names:
            with asking("dropping files"):
                await self._keeper.drop(*names, deadline=soon())

    async def adopt(self, held: Iterable[str]) -> None:
        """Borrow the files the keeper still holds. Users are told by `use`, then `drop_all_but` ends it."""
        known = load_all(self._journal, LAYER_KIND, LayerRecord)
        for name in held:
            with asking(f"file {name}"):
                self._open[name] = await self._keeper.lend_file(name, deadline=soon())
            if name in known:
                self._know(known[name])
        for name in known.keys() - self._open.keys():
            self._journal.remove(LAYER_KIND, name)

    async def drop_unused(self, names: Iterable[str]) -> None:
        """Drop those of the files that are no layers in use."""
        await self.drop(*(name for name in names if not self._users.get(name)))

    async def drop_all_but(self, wanted: Iterable[str]) -> None:
        """Drop every file that is neither a layer in use nor in `wanted`."""
        await self.drop_unused(self._open.keys() - set(wanted))

    def close(self) -> None:
        """Close our descriptors; the keeper's stay."""
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()
