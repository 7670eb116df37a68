"""What the null engine writes to the journal: its machines are these records and nothing else."""

from __future__ import annotations

import msgspec

from forktree.models.reasons import Level, Mode
from forktree_agent.engine.contract import (
    Baseline,
    BaselineId,
    Machine,
    MachineId,
    Owner,
    Point,
    PointId,
    TreeId,
)


class MachineRecord(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    owner: str
    tree: str
    baseline: str
    generation: str
    memory_bytes: int
    """What a machine of its template would be promised."""
    paused: bool = False

    def view(self) -> Machine:
        """Level `None`: it carried nothing on, as there is nothing."""
        return Machine(
            id=MachineId(self.id),
            owner=Owner(self.owner),
            tree=TreeId(self.tree),
            baseline=BaselineId(self.baseline),
            generation=self.generation,
            mode=Mode.CLEAN,
            level=Level.NONE,
            paused=self.paused,
        )


class PointRecord(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    owner: str
    tree: str | None
    baseline: str
    memory_bytes: int
    """Of the machines that start from it."""

    def view(self) -> Point:
        tree = None if self.tree is None else TreeId(self.tree)
        return Point(id=PointId(self.id), owner=Owner(self.owner), tree=tree, bytes=0)


class BaselineRecord(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    point: str

    def view(self) -> Baseline:
        return Baseline(id=BaselineId(self.id), point=PointId(self.point), boot_ms=0.0)


class BegunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What one fork is about to make. Found after a crash, it says what is to be taken back."""

    machines: tuple[str, ...]
    points: tuple[str, ...]
