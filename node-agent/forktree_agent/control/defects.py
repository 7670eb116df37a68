"""Errors that no engine promises: defects of ours. Tried again some times, then said to be the end."""

from __future__ import annotations

import logging
from collections.abc import Awaitable
from typing import TypeVar

from forktree.errors import ForktreeError
from forktree.models import Uid
from forktree_agent.engine.contract import EngineError

log = logging.getLogger(__name__)

TRIES = 5
"""Their back-off takes longer than an agent that has lost its keeper needs to end. Such a one must not call
failed what the next agent will find well."""

Result = TypeVar("Result")


class Defects:
    """Counts how often the engine broke at an object."""

    def __init__(self) -> None:
        self._count: dict[Uid, int] = {}

    async def guarded(self, uid: Uid, call: Awaitable[Result]) -> Result:
        """What `call` gives. The `TRIES`th unexpected error for `uid` is raised as `EngineError`."""
        try:
            result = await call
        except ForktreeError:
            self.over(uid)
            raise
        except Exception as err:
            count = self._count[uid] = self._count.get(uid, 0) + 1
            if count < TRIES:
                raise
            self.over(uid)
            log.exception("engine_broke uid=%s times=%d", uid, count)
            raise EngineError(f"the engine broke: {err!r}") from err
        self.over(uid)
        return result

    def over(self, uid: Uid) -> None:
        """It is done or gone; counting begins anew."""
        self._count.pop(uid, None)
