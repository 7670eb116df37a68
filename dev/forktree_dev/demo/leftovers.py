"""The independent search for what is left, run as the program that it is: it shares nothing with the demo."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from pydantic import BaseModel

from forktree_dev.checkout import CHECKOUT
from forktree_dev.kubectl import Kubectl

_PROGRAM = CHECKOUT / "tests" / "leftovers.py"
_SECONDS = 120.0


class Found(BaseModel):
    """What is there now, is ours, and was not there before."""

    counts: dict[str, int]
    found: list[str]
    """One line a thing."""


class Search:
    """Compares the machine, and optionally a cluster, with how they were when it was begun."""

    def __init__(self, before: Path, cluster: Kubectl | None) -> None:
        self._before = before
        self._cluster = cluster

    @classmethod
    async def begun(cls, before: Path, *, cluster: Kubectl | None = None) -> Search:
        """Keeps what is there now in the file `before`."""
        _keep(await _run("before", cluster), before)
        return cls(before, cluster)

    async def found(self, *markers: str) -> Found:
        """What is there that was not. `markers`: texts that only our run uses."""
        marked = [f"--marker={marker}" for marker in markers]
        printed = await _run("after", self._cluster, f"--before={self._before}", *marked)
        return Found.model_validate(json.loads(printed))


def _keep(printed: str, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(printed)


async def _run(moment: str, cluster: Kubectl | None, *arguments: str) -> str:
    reach = [f"--kubeconfig={cluster.kubeconfig}", f"--kubectl={cluster.program}"] if cluster else []
    command = [sys.executable, str(_PROGRAM), moment, *reach, *arguments]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(_SECONDS):
            printed, complaints = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode not in (0, 1):  # 1: it found something.
        raise RuntimeError(f"{' '.join(command)}: {complaints.decode(errors='replace').strip()}")
    return printed.decode()
