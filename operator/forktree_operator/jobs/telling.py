"""What all jobs do alike: say a line, and look again until something is so."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

_PAUSE_SECONDS = 0.5
"""Between two looks at the API server, by one process that runs once."""


class NotInTime(Exception):
    """What was waited for did not come; the text says what it was, and what was there instead."""


def say(line: str) -> None:
    print(line, flush=True)


async def until(look: Callable[[], Awaitable[str]], what: str, *, deadline: float) -> None:
    """Wait until `look` finds nothing left to wait for: it returns what is still missing, or nothing.

    Raises `NotInTime`.
    """
    while left := await look():
        if asyncio.get_running_loop().time() > deadline:
            raise NotInTime(f"waited for {what}, but there still is: {left}")
        await asyncio.sleep(_PAUSE_SECONDS)
