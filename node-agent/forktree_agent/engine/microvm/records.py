"""What the engine writes to the journal, as types. Each record is whole: reading one needs no other's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

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
from forktree_agent.engine.microvm.admission import machine_bytes
from forktree_agent.engine.microvm.arguments import Accelerator

if TYPE_CHECKING:
    from forktree.models.reasons import Level, Mode


class Build(msgspec.Struct, frozen=True, kw_only=True):
    """What a machine and its children must agree in for device state to fit."""

    image: str
    image_sha256: str
    """Says which the root disk is. An agent of a later version may have another image of this name."""
    memory_bytes: int
    accelerator: Accelerator
    vcpus: int = 1
    egress: bool = False
    """It has a network device, and beside it a process that is its way to the outside."""

    @property
    def admitted_bytes(self) -> int:
        """What one such machine counts for."""
        return machine_bytes(self.memory_bytes, egress=self.egress)

    @property
    def disk_file(self) -> str:
        """Name under which the keeper holds the root disk, whatever becomes of the image it came from."""
        return disk_file(self.image_sha256)


def disk_file(digest: str) -> str:
    return f"disk-{digest}"


class LayerRecord(msgspec.Struct, frozen=True, kw_only=True, tag=False):
    """Guest pages in a file that the keeper holds as `id`. Without runs it is all of guest RAM, in place."""

    id: str
    bytes: int
    pages: int
    runs: int
    table_offset: int
    copied_runs: int = 0
    """So many of the runs are short and too many to be mapped: children copy them."""
    tree: str | None = None
    """Whose memory it is; None for a baseline's, which belongs to no tree."""
    ahead: bool = False
    """Copied while its machine ran, for the instant whose layer comes next."""


class HookRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A command that has to be done in a machine before anybody hears of it."""

    argv: tuple[str, ...]
    timeout_seconds: float


class Unanswered(msgspec.Struct, frozen=True, kw_only=True):
    """What is still to come of a child that runs: its answer, and then the end of this."""

    post_fork: HookRecord | None = None


class MachineRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A machine, written before its process is started."""

    id: str
    owner: str
    tree: str
    baseline: str
    generation: str
    uid: int
    chain: tuple[str, ...]
    """Layers that a fork of it starts from, oldest first, and one more: those it was born with and, where its
    writes are noted, that of every dump since; or what some of them were merged into."""
    build: Build
    mark: int = 0
    """Of the dump whose layer is the last of the chain. What it wrote since is not in the chain, and all that
    it had written until then is. 0: it has not been dumped yet."""
    paused: bool = False
    """It is meant to stand still. Written before it does, so that no agent lets it go on by mistake."""
    waiting: bool = False
    """It waits for a fork that is not asked for yet, and is nobody's: the next agent ends it."""
    unanswered: Unanswered | None = None
    """It runs and has not answered its identity yet, of which somebody may have heard: the next agent asks it
    again. None: it has, or its fork is undone as a whole."""

    def grown(self, layer: str) -> MachineRecord:
        """This machine as born of a chain with one layer more."""
        return msgspec.structs.replace(self, chain=(*self.chain, layer))

    def dumped(self, layer: str, mark: int) -> MachineRecord:
        """This machine once `layer` has what it wrote since its dump before."""
        return msgspec.structs.replace(self.grown(layer), mark=mark)

    def view(self, mode: Mode, level: Level) -> Machine:
        return Machine(
            id=MachineId(self.id),
            owner=Owner(self.owner),
            tree=TreeId(self.tree),
            baseline=BaselineId(self.baseline),
            generation=self.generation,
            mode=mode,
            level=level,
            paused=self.paused,
        )


class PointRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A held instant: device state in the file `state_file`, memory in `chain`."""

    id: str
    owner: str
    tree: str | None
    baseline: str
    chain: tuple[str, ...]
    own_bytes: int
    build: Build

    def sized(self, own_bytes: int) -> PointRecord:
        """This instant, with what it was found to take."""
        return msgspec.structs.replace(self, own_bytes=own_bytes)

    @property
    def state_file(self) -> str:
        return f"state-{self.id}"

    def view(self) -> Point:
        return Point(
            id=PointId(self.id),
            owner=Owner(self.owner),
            tree=TreeId(self.tree) if self.tree is not None else None,
            bytes=self.own_bytes,
        )


class BaselineRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A template's ready state, by the digest of the shape it was asked for with."""

    id: str
    shape_digest: str
    point: str
    boot_ms: float

    def view(self) -> Baseline:
        return Baseline(id=BaselineId(self.id), point=PointId(self.point), boot_ms=self.boot_ms)


class BatchRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Work begun. While this record exists all that it names is to be undone; removing it is the commit."""

    machines: tuple[str, ...]
    files: tuple[str, ...] = ()
    """Names under which the keeper holds files made for this work."""
    points: tuple[str, ...] = ()
    group: str | None = None
    """Control group made for these machines alone."""


class CanaryRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The canary's verdict. It holds until the node boots anew or what it tried changes."""

    tried: str
    """Digest of QEMU, guest and settings: another one asks for another canary."""
    passed: bool
    accelerator: Accelerator
    reason: str
    message: str
    boot_ms: float
    fork_ms: float
