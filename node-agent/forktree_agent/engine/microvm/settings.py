"""What the microVM engine is told at start."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    guest_directory: Path
    """Kernel, initial file system and images, with a manifest; made by the image builder."""
    shim_library: Path
    """The fork shim, preloaded into every QEMU."""
    memory_limit_bytes: int
    """What all machines and points of this node may take together, by their worst case."""
    accelerator: Literal["auto", "kvm", "tcg"] = "auto"
    """`auto` tries KVM on a canary and takes emulation where that fails."""
    qemu_binary: str = "/usr/bin/qemu-system-x86_64"
    uid_base: int = 200_000
    """First of `uid_count` user ids that are nobody else's: every QEMU runs under its own."""
    uid_count: int = 4096
    start_concurrency: int = 2
    """Children whose start is under way at once. More than the cores only queue, and delay the first."""
    answer_seconds: float = 10.0
    """For one command of a running machine's QEMU, which takes a millisecond: beyond it, QEMU is stuck and
    its machine is ended. Commands that copy guest memory have more, by its size."""
