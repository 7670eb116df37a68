"""A machine's companion: the process that is its way to the outside, from start until it is reaped."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from forktree_keeper.processes import Launch, Spawned, read_report, reap, spawn
from forktree_keeper.protocol import MAX_TEXT_CHARACTERS
from forktree_keeper.ready_loop import ReadyLoop

DESCRIPTORS = 2
"""That one costs the keeper: its pidfd, and the report of its start."""
MAX_SAID_CHARACTERS = 200
"""Of what it said last."""

_log = logging.getLogger("forktree_keeper")


@dataclass(slots=True)
class Companion:
    """A process beside a machine's. `on_gone` is called once, when it is reaped."""

    loop: ReadyLoop
    machine: str
    log: Path
    on_gone: Callable[[], None]
    spawned: Spawned
    sentence: str = ""
    """Why its program could not be started."""
    how: str | None = None
    """How it ended, in words; None while it is there."""

    @classmethod
    def started(cls, loop: ReadyLoop, machine: str, launch: Launch, on_gone: Callable[[], None]) -> Companion:
        """Raises `OSError`, and then there is none."""
        companion = cls(loop, machine, launch.log, on_gone, spawn(launch))
        loop.watch(companion.spawned.report, companion._on_report)
        return companion

    def end(self) -> None:
        """Kill it, if it is there. It is reaped later."""
        if self.how is None:
            signal.pidfd_send_signal(self.spawned.pidfd, signal.SIGKILL)

    def forget(self) -> None:
        """Remove its log, once it is reaped."""
        with suppress(OSError):  # It may not even have come to be.
            self.log.unlink()

    def _on_report(self) -> None:
        self.loop.unwatch(self.spawned.report)
        self.sentence = read_report(self.spawned.report)
        os.close(self.spawned.report)
        self.loop.watch(self.spawned.pidfd, self._on_exit)

    def _on_exit(self) -> None:
        self.loop.unwatch(self.spawned.pidfd)
        ended = reap(self.spawned.pid, self.spawned.pidfd)
        os.close(self.spawned.pidfd)
        said = " ".join(_tail(self.log).split())[-MAX_SAID_CHARACTERS:]
        how = self.sentence or ended.text + (f"; it said: {said}" if said else "")
        self.how = how[:MAX_TEXT_CHARACTERS]
        _log.info("companion_exited machine=%s pid=%d how=%r", self.machine, self.spawned.pid, self.how)
        self.on_gone()


def _tail(log: Path) -> str:
    try:
        with log.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 4 * MAX_SAID_CHARACTERS))
            return file.read(4 * MAX_SAID_CHARACTERS).decode(errors="replace")
    except OSError:
        return ""
