"""What the node may still promise: memory by its worst case (pure). Refusing early beats the OOM killer."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from forktree_agent.engine.contract import AtCapacity, MemoryLimit, TreeLimits, Usage

VMM_OVERHEAD_BYTES = 96 << 20
"""A QEMU beside its guest's RAM: 30 MB at rest, 32 of translated code, room for its buffers."""


@dataclass(frozen=True, slots=True)
class Reservation:
    tree: str | None
    bytes: int


class Ledger:
    """Reservations by holder (a machine's or a point's id), against one capacity and each tree's limit."""

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._held: dict[Hashable, Reservation] = {}

    def admit(self, size_bytes: int, limits: TreeLimits | None, what: str) -> None:
        """Refuse what does not fit as a whole, before any part of it is reserved. `what` is for the sentence.

        Raises `AtCapacity`, `MemoryLimit`.
        """
        free = self._capacity_bytes - self.usage().reserved_bytes
        if size_bytes > free:
            advice = (
                "more than the node has" if size_bytes > self._capacity_bytes else "delete sessions or wait"
            )
            raise AtCapacity(
                f"{what} may need {in_mib(size_bytes)} but only {in_mib(max(free, 0))} of this node's "
                f"{in_mib(self._capacity_bytes)} are free; {advice}"
            )
        if limits is not None and limits.memory_bytes is not None:
            held = self._of_tree(limits.tree)
            if held + size_bytes > limits.memory_bytes:
                raise MemoryLimit(
                    f"{what} may need {in_mib(size_bytes)}, which would take the tree to "
                    f"{in_mib(held + size_bytes)}, over its limit of {in_mib(limits.memory_bytes)}; delete "
                    "branches, or start from a template with a larger treeLimits.memory"
                )

    def reserve(self, holder: Hashable, size_bytes: int, limits: TreeLimits | None) -> None:
        """Promise `size_bytes` to `holder`. Raises `AtCapacity`, `MemoryLimit`; then nothing changed."""
        if holder in self._held:
            raise ValueError(f"{holder} holds a reservation already")
        self.admit(size_bytes, limits, "it")
        self._held[holder] = Reservation(limits.tree if limits else None, size_bytes)

    def record(self, holder: Hashable, size_bytes: int, tree: str | None) -> None:
        """Note what exists already, whatever the limits say: adoption, or a size now known exactly."""
        self._held[holder] = Reservation(tree, size_bytes)

    def free(self, holder: Hashable) -> None:
        """Idempotent."""
        self._held.pop(holder, None)

    def usage(self) -> Usage:
        return Usage(
            capacity_bytes=self._capacity_bytes, reserved_bytes=sum(r.bytes for r in self._held.values())
        )

    def _of_tree(self, tree: str) -> int:
        return sum(r.bytes for r in self._held.values() if r.tree == tree)


def machine_bytes(memory_bytes: int) -> int:
    """The worst case of one machine: all its RAM made its own, and its QEMU."""
    return memory_bytes + VMM_OVERHEAD_BYTES


def in_mib(size_bytes: int) -> str:
    return f"{size_bytes >> 20} MiB"
