"""The host threads that run a machine's guest, and when they give way.

A guest that runs takes a core from whatever its siblings still need to come up: the agent, and the threads
that load their state. So the guests of a fork stand back until all of them run.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger(__name__)

_NO_PRIORITY = os.sched_param(0)


@dataclass(frozen=True, slots=True)
class Vcpus:
    """Thread ids of one QEMU's vCPUs."""

    threads: tuple[int, ...] = ()

    @classmethod
    def of(cls, pid: int, threads: Iterable[int]) -> Vcpus:
        """Those of `threads` that are process `pid`'s: who they are is QEMU's word, and no proof.

        None where the agent does not see the keeper's processes: then nobody gives way.
        """
        tasks = Path(f"/proc/{pid}/task")
        return cls(tuple(thread for thread in threads if (tasks / str(thread)).exists()))

    def give_way(self) -> None:
        """Run only where nothing else wants to."""
        self._schedule(os.SCHED_IDLE)

    def take_part(self) -> None:
        """Run as everything else does."""
        self._schedule(os.SCHED_OTHER)

    def _schedule(self, policy: int) -> None:
        for thread in self.threads:
            try:
                os.sched_setscheduler(thread, policy, _NO_PRIORITY)
            except ProcessLookupError:
                pass  # It has ended; whoever waits for it is told.
            except PermissionError as err:
                log.warning("priority_not_set thread=%d error=%s", thread, err)
