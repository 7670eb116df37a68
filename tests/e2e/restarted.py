"""Parts of a system that run with other options for a while."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

from forktree_dev.processes import Service
from forktree_dev.system import System


@asynccontextmanager
async def restarted_with(
    system: System, parts: Sequence[Service], *options: str
) -> AsyncGenerator[dict[str, int]]:
    """These parts, started anew with further options, and at the end as they were. Yields how long the log of
    each was before, by its name."""
    before = [part.argv for part in parts]
    began: dict[str, int] = {}
    try:
        for part in parts:
            part.argv = (*part.argv, *options)
            await part.stop()
            began[part.name] = part.log_path.stat().st_size
            part.start()
        yield began
    finally:
        for part, argv in zip(parts, before, strict=True):
            part.argv = argv
            await part.restart()
        await system.ready()
