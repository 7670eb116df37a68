"""How long a QEMU may leave a command unanswered until its machine is taken for lost.

A process that stands still (stopped by somebody, stuck in the kernel) answers nothing, and never ends. Who
asks it would wait for ever, and so would all that waits for the same machine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from forktree_agent.engine.contract import MachineGone

PARTS = 10
"""In which a command's time is counted. An agent that stood still itself, for however long, has taken one."""
WORK_BYTES_PER_SECOND = 64 << 20
"""Guest memory that any node copies in this time: 60 us a page, where 0.4 to 10 have been seen."""

Result = TypeVar("Result")


class NotAnswering(MachineGone):
    """QEMU left a command unanswered for all of its time: its machine is to be ended."""


class Answering:
    """Waits for what one QEMU answers, for each command anew: a slow machine may take long for many."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._silence: str | None = None

    async def to(self, command: Coroutine[Any, Any, Result], what: str, *, work_bytes: int = 0) -> Result:
        """The answer. `work_bytes`: guest memory that the command goes through at most, which takes time.

        Raises `NotAnswering` when there is none, and from then on at once: nothing more is asked.
        """
        if self._silence is not None:
            command.close()
            raise NotAnswering(self._silence)
        seconds = self._seconds + work_bytes / WORK_BYTES_PER_SECOND
        try:
            async with asyncio.timeout(None) as limit:
                clock = _Countdown(limit, seconds / PARTS)
                try:
                    return await command
                finally:
                    clock.stop()
        except TimeoutError as err:
            self._silence = f"QEMU did not answer {what} for {seconds:g} s"
            raise NotAnswering(self._silence) from err


class _Countdown:
    """Ends `limit` after `PARTS` parts, each begun when the one before was seen to be over."""

    def __init__(self, limit: asyncio.Timeout, part_seconds: float) -> None:
        self._limit = limit
        self._part_seconds = part_seconds
        self._left = PARTS
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(part_seconds, self._next)

    def stop(self) -> None:
        self._timer.cancel()

    def _next(self) -> None:
        self._left -= 1
        if self._left:
            self._timer = self._loop.call_later(self._part_seconds, self._next)
        else:
            self._limit.reschedule(self._loop.time())
