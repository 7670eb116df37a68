"""The canary: boot, fork, compare and exec on throw-away machines, to know what this node can really do.

A device file proves nothing: `/dev/kvm` can exist, answer QEMU, and still not run a guest.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import stat
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from forktree_agent.engine.contract import (
    Baseline,
    ChildOrder,
    Command,
    Engine,
    EngineError,
    ForkFailed,
    MachineId,
    Owner,
    Shape,
    TreeId,
    TreeLimits,
)
from forktree_agent.engine.microvm.records import CanaryRecord
from forktree_agent.engine.microvm.tracking import DEVICE
from forktree_agent.typed_records import load_one, to_journal

if TYPE_CHECKING:
    from forktree_agent.engine.microvm.arguments import Accelerator
    from forktree_agent.engine.microvm.resources import Resources

log = logging.getLogger(__name__)

CANARY_KIND = "canary"
CANARY_KEY = "verdict"
CANARY_SHAPE = Shape(image="builtin:tiny", vcpus=1, memory_bytes=128 << 20, overlay_bytes=16 << 20)
KVM_SECONDS = 15.0
"""A guest under a KVM that works is up in a second; one that cannot run hangs for ever."""
KVM_DEVICE = Path("/dev/kvm")
PLANT = "head -c 1000000 /dev/urandom > /tmp/canary; sha256sum < /tmp/canary"
COMPARE = "sha256sum < /tmp/canary"


class Trial(Engine, Protocol):
    """An engine that can be asked for an accelerator which is not proved yet."""

    async def bake_with(self, shape: Shape, accelerator: Accelerator, *, deadline: float) -> Baseline:
        """`bake`, under this accelerator."""
        ...


async def find_accelerator(engine: Trial, resources: Resources, *, deadline: float) -> CanaryRecord:
    """What this node can do: remembered from an earlier try on the same boot, or tried now."""
    tried = _subject(resources)
    known = load_one(resources.journal, CANARY_KIND, CANARY_KEY, CanaryRecord)
    if known is not None and known.tried == tried:
        return known
    verdict = await _verdict(engine, resources, tried, deadline=deadline)
    resources.journal.put(CANARY_KIND, CANARY_KEY, to_journal(verdict))
    log.info(
        "canary passed=%s accelerator=%s reason=%s message=%r",
        verdict.passed,
        verdict.accelerator,
        verdict.reason,
        verdict.message,
    )
    return verdict


async def _verdict(engine: Trial, resources: Resources, tried: str, *, deadline: float) -> CanaryRecord:
    wanted = resources.settings.accelerator
    why_not = "KVM was not asked for"
    if wanted in {"auto", "kvm"}:
        refusal = _kvm_refusal()
        if refusal is None:
            soon = min(deadline, asyncio.get_running_loop().time() + KVM_SECONDS)
            try:
                trip = await _try(engine, resources, "kvm", deadline=soon)
            except EngineError as err:
                refusal = f"a guest does not run under KVM: {err}"
            else:
                return CanaryRecord(
                    tried=tried,
                    passed=True,
                    accelerator="kvm",
                    reason="CanaryPassed",
                    message=f"a guest booted, forked and compared equal under KVM; {trip.told()}",
                    boot_ms=trip.boot_ms,
                    fork_ms=trip.fork_ms,
                )
        why_not = refusal
        if wanted == "kvm":
            return _failed(tried, "kvm", "NoKvm", why_not)
    try:
        trip = await _try(engine, resources, "tcg", deadline=deadline)
    except EngineError as err:
        return _failed(tried, "tcg", "CanaryFailed", f"{why_not}; under emulation: {err}")
    return CanaryRecord(
        tried=tried,
        passed=True,
        accelerator="tcg",
        reason="Emulated",
        message=f"a guest booted, forked and compared equal under emulation; {why_not}; {trip.told()}",
        boot_ms=trip.boot_ms,
        fork_ms=trip.fork_ms,
    )


@dataclass(frozen=True, slots=True)
class Trip:
    """A canary that came back."""

    boot_ms: float
    fork_ms: float
    untracked: str | None
    """Why what it wrote was not noted; None if it was."""

    def told(self) -> str:
        if self.untracked is None:
            return "a fork copies what was written since the one before"
        return f"a fork copies all that its parent ever wrote, since writes are not noted: {self.untracked}"


async def _try(engine: Trial, resources: Resources, accelerator: Accelerator, *, deadline: float) -> Trip:
    """Boot once and fork twice. Nothing is left, whether it works or not."""
    baseline = await engine.bake_with(CANARY_SHAPE, accelerator, deadline=deadline)
    limits = TreeLimits(tree=TreeId("canary"))
    ended: list[MachineId] = []
    try:
        born = await engine.branch(baseline.point, [_order("canary-parent")], limits, deadline=deadline)
        parent = born.children[0]
        ended.append(parent.id)
        # Twice: the second time, where that can be, only what was written since the first is copied.
        fork_ms = [await _compare(engine, parent.id, ended, limits, deadline=deadline) for _ in range(2)]
        return Trip(baseline.boot_ms, fork_ms[0], resources.vmms.why_untracked(parent.id))
    finally:
        for machine in ended:
            await engine.release(machine)
        await engine.drop_baseline(baseline.id)


async def _compare(
    engine: Trial, parent: MachineId, ended: list[MachineId], limits: TreeLimits, *, deadline: float
) -> float:
    """Fork, and compare what the child has with what its parent wrote. Returns the fork's milliseconds."""
    planted = await _say(engine, parent, PLANT, deadline=deadline)
    forked = await engine.fork(
        parent, Owner(f"canary/{uuid.uuid4()}"), [_order("canary-child")], limits, deadline=deadline
    )
    child = forked.children[0]
    ended.append(child.id)
    seen = [await _say(engine, each, COMPARE, deadline=deadline) for each in (parent, child.id)]
    await engine.drop_point(forked.point.id)
    if seen != [planted, planted]:
        raise ForkFailed("memory of the canary's child differs from its parent's")
    return forked.clocks.fork_ms


async def _say(engine: Trial, machine: MachineId, script: str, *, deadline: float) -> bytes:
    result = await engine.exec(machine, Command(argv=("/bin/sh", "-c", script)), deadline=deadline)
    if result.exit_code != 0:
        raise ForkFailed(f"the canary's command ended with {result.exit_code}: {result.stderr[:200]!r}")
    return result.stdout


def _order(hostname: str) -> ChildOrder:
    return ChildOrder(owner=Owner(f"canary/{uuid.uuid4()}"), hostname=hostname)


def _kvm_refusal() -> str | None:
    """Why KVM need not even be tried, or None."""
    try:
        found = KVM_DEVICE.stat()
        os.close(os.open(KVM_DEVICE, os.O_RDWR | os.O_CLOEXEC))
    except OSError as err:
        return f"{KVM_DEVICE} cannot be opened ({err.strerror})"
    if not found.st_mode & (stat.S_IRGRP & stat.S_IWGRP) and not found.st_mode & stat.S_IWOTH:
        return f"{KVM_DEVICE} is for its owner alone, and machines run under user ids of their own"
    return None


def _failed(tried: str, accelerator: Accelerator, reason: str, message: str) -> CanaryRecord:
    return CanaryRecord(
        tried=tried,
        passed=False,
        accelerator=accelerator,
        reason=reason,
        message=message,
        boot_ms=0,
        fork_ms=0,
    )


def _subject(resources: Resources) -> str:
    subject = [
        resources.qemu_version,
        resources.guest.manifest.kernel_sha256,
        resources.guest.manifest.initrd_sha256,
        resources.guest.digest(CANARY_SHAPE.image),
        resources.settings.accelerator,
        resources.settings.write_tracking,
        Path(DEVICE).exists(),
    ]
    return hashlib.sha256(json.dumps(subject).encode()).hexdigest()
