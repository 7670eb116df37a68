"""What the node may still promise: memory by its worst case (pure). Refusing early beats the OOM killer."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

from forktree_agent.engine.contract import AtCapacity, MemoryLimit, TreeLimits, Usage
from forktree_agent.engine.microvm.egress import COMPANION_BYTES

VMM_OVERHEAD_BYTES = 96 << 20
"""A QEMU beside its guest's RAM: 30 MB at rest, 32 of translated code, room for its buffers."""


@dataclass(frozen=True, slots=True)
class Reservation:
    tree: str | None
    bytes: int
    give_up: Callable[[], None] | None = None
    """Told that the room was taken: of what is only there ahead of time. None: it stays."""


class Ledger:
    """Reservations by holder (a machine's or a layer's id), against one capacity and each tree's limit.

    What is spare gives way to everything else, oldest first, and only where that makes enough room.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._held: dict[Hashable, Reservation] = {}

    def admit(self, size_bytes: int, limits: TreeLimits | None, what: str) -> None:
        """Refuse what does not fit as a whole, before any part of it is reserved. `what` is for the sentence.

        Raises `AtCapacity`, `MemoryLimit`.
        """
        self._make_room(size_bytes, limits)
        self._admit(size_bytes, limits, what)

    def _admit(self, size_bytes: int, limits: TreeLimits | None, what: str) -> None:
        free = self._free()
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

    def spare(
        self,
        holder: Hashable,
        size_bytes: int,
        limits: TreeLimits | None,
        *,
        give_up: Callable[[], None],
    ) -> None:
        """Promise what nothing else has, until something else needs it: then `give_up` is called.

        Raises `AtCapacity`, `MemoryLimit`.
        """
        self._admit(size_bytes, limits, "what is made ahead of time")
        self._held[holder] = Reservation(limits.tree if limits else None, size_bytes, give_up)

    def record(self, holder: Hashable, size_bytes: int, tree: str | None) -> None:
        """Note what exists already, whatever the limits say: adoption, or a size now known exactly."""
        self._held[holder] = Reservation(tree, size_bytes)

    def free(self, holder: Hashable) -> None:
        """Idempotent."""
        self._held.pop(holder, None)

    def usage(self) -> Usage:
        """Without what is spare: whoever needs that room has it."""
        firm = sum(r.bytes for r in self._held.values() if r.give_up is None)
        return Usage(capacity_bytes=self._capacity_bytes, reserved_bytes=firm)

    def _make_room(self, size_bytes: int, limits: TreeLimits | None) -> None:
        if limits is not None and limits.memory_bytes is not None:
            over = self._of_tree(limits.tree) + size_bytes - limits.memory_bytes
            self._take_spare(over, lambda r: r.tree == limits.tree)
        self._take_spare(size_bytes - self._free(), lambda _: True)

    def _take_spare(self, size_bytes: int, among: Callable[[Reservation], bool]) -> None:
        spare = [(holder, r) for holder, r in self._held.items() if r.give_up is not None and among(r)]
        if sum(r.bytes for _, r in spare) < size_bytes:
            return
        for holder, reservation in spare:
            if size_bytes <= 0:
                return
            size_bytes -= reservation.bytes
            del self._held[holder]
            assert reservation.give_up is not None
            reservation.give_up()

    def _free(self) -> int:
        return self._capacity_bytes - sum(r.bytes for r in self._held.values())

    def _of_tree(self, tree: str) -> int:
        return sum(r.bytes for r in self._held.values() if r.tree == tree)


def machine_bytes(memory_bytes: int, *, egress: bool) -> int:
    """The worst case of one machine: all its RAM made its own, its QEMU, and its companion."""
    return memory_bytes + VMM_OVERHEAD_BYTES + (COMPANION_BYTES if egress else 0)


def in_mib(size_bytes: int) -> str:
    return f"{size_bytes >> 20} MiB"
