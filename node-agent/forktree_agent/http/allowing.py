"""Long answers end when their caller may no longer have them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

from forktree.errors import ForktreeError

log = logging.getLogger(__name__)

ASKED_SECONDS = 10.0
"""Between two questions whether the caller still may. Answers are remembered about as long."""


@asynccontextmanager
async def while_allowed(
    still: Callable[[], Awaitable[None]], *, seconds: float = ASKED_SECONDS
) -> AsyncGenerator[None]:
    """Inside the block `still` is asked every so often. What it refuses ends the block and is raised.

    That it cannot be asked, as without an API server, refuses nothing.
    """
    asking = asyncio.create_task(_until_refused(still, seconds), name="ask-whether-allowed")
    lasting = asyncio.timeout(None)

    def end(asked: asyncio.Task[None]) -> None:
        if not asked.cancelled():
            lasting.reschedule(asyncio.get_running_loop().time())

    try:
        async with lasting:
            asking.add_done_callback(end)
            try:
                yield
            finally:
                asking.remove_done_callback(end)
    except TimeoutError:
        if lasting.expired():
            asking.result()
        raise
    finally:
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)


async def _until_refused(still: Callable[[], Awaitable[None]], seconds: float) -> None:
    while True:
        await asyncio.sleep(seconds)
        try:
            await still()
        except ForktreeError as err:
            log.info("right_not_asked error=%s", type(err).__name__)
