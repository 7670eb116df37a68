"""Whether anybody forks now: what is done ahead of a fork, or after it, stands aside for those who do."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextlib import contextmanager


class Calm:
    """Broken by forks. One object for all forks of a node, and for all that yields to them."""

    def __init__(self) -> None:
        self._forks = 0
        self._quiet = asyncio.Event()
        self._quiet.set()

    @contextmanager
    def broken(self) -> Generator[None]:
        """Nothing that waits for calm begins while the body runs."""
        self._forks += 1
        self._quiet.clear()
        try:
            yield
        finally:
            self._forks -= 1
            if self._forks == 0:
                self._quiet.set()

    async def comes(self) -> None:
        """Until nobody forks. Who calls has the moment up to the next await."""
        while self._forks:
            await self._quiet.wait()
