"""The machines as the host sees them: processes, found without asking the agent."""

from __future__ import annotations

import asyncio
import os
from contextlib import ExitStack
from pathlib import Path


def machine_pids(keeper_pid: int) -> list[int]:
    """The keeper's child processes, which are its virtual machines and nothing else."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, parent, *_ = (entry / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue  # It ended while we looked.
            if int(parent) == keeper_pid and state not in "ZX":
                found.append(int(entry.name))
    return found


class Ends:
    """Watches processes that run now. A context manager: leaving it stops watching."""

    def __init__(self, pids: list[int]) -> None:
        self._pids = pids
        self._open = ExitStack()

    def __enter__(self) -> Ends:
        loop = asyncio.get_running_loop()
        self._ended: dict[int, asyncio.Future[float]] = {pid: loop.create_future() for pid in self._pids}
        for pid in self._pids:
            try:
                pidfd = os.pidfd_open(pid)
            except ProcessLookupError:
                self._ended[pid].set_result(loop.time())
                continue
            self._open.callback(os.close, pidfd)
            self._open.callback(loop.remove_reader, pidfd)
            loop.add_reader(pidfd, self._note, pid)  # A pidfd is readable once its process has ended.
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def _note(self, pid: int) -> None:
        if not self._ended[pid].done():
            self._ended[pid].set_result(asyncio.get_running_loop().time())

    async def last(self, *, deadline: float) -> float:
        """When the last of them had ended, in loop time. Raises `TimeoutError`."""
        async with asyncio.timeout_at(deadline):
            return max(await asyncio.gather(*self._ended.values()))
