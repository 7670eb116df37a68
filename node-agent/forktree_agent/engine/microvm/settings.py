"""What the microVM engine is told at start."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Egress:
    """Machines with egress reach the internet, and not what is inside."""

    allow: tuple[str, ...] = ()
    """Networks (CIDR) inside that they reach all the same."""
    deny: tuple[str, ...] = ()
    """Networks (CIDR) that count as inside, beside those whose addresses say so. `allow` goes before it."""


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
    write_tracking: Literal["auto", "pagemap"] = "auto"
    """`auto` has the kernel note what machines write, where it can (Linux 6.7), so that a fork copies what is
    new since the one before. `pagemap` works everywhere, and copies all that a machine ever wrote."""
    qemu_binary: str = "/usr/bin/qemu-system-x86_64"
    uid_base: int = 200_000
    """First of `uid_count` user ids that are nobody else's: every QEMU runs under its own."""
    uid_count: int = 4096
    start_concurrency: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))
    """Children whose start is under way at once. More than the cores only queue, and delay the first."""
    run_concurrency: int = field(default_factory=lambda: 4 * len(os.sched_getaffinity(0)))
    """Children that are let run from their instant at once. Each waits for three threads in turn, so that
    fewer leave cores idle."""
    standbys_per_parent: int = 8
    """VMMs that wait for the next fork of a machine, as many as its last fork had children, but no more than
    this. Each takes some 25 MB, and 20 ms of a core to start. 0: none."""
    standbys_per_tree: int = 16
    """Of all machines of one tree. Those of the machine that was forked longest ago make place first."""
    standbys_per_node: int = 64
    """Of all trees, and of the templates that ask for some."""
    prepared_bytes: int = 32 << 20
    """The largest layer that is prepared ahead of a machine's next fork. 0: none is."""
    egress: Egress | None = None
    """Where machines whose template asks for it reach the outside. None: no machine does."""
    answer_seconds: float = 10.0
    """For one command of a running machine's QEMU, which takes a millisecond: beyond it, QEMU is stuck and
    its machine is ended. Commands that copy guest memory have more, by its size."""
