"""When a request is sent again, and after how long."""

from __future__ import annotations

import random
from dataclasses import dataclass

from forktree.errors import AnswerLost, ClientError, Refused, Unreachable

_WORTH_REPEATING = frozenset({429, 502, 503, 504})
"""Statuses after which the same request may well succeed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retries:
    """How often a request is sent again, always within its own deadline."""

    most: int = 7
    """Beyond the first attempt. 0: never. By itself that is some 5 s, in which an agent is replaced."""
    first_seconds: float = 0.1
    """The longest wait before the second attempt; doubled for each further one."""
    longest_seconds: float = 5.0

    def wait_seconds(self, attempt: int, error: ClientError, *, repeatable: bool) -> float | None:
        """How long to wait after attempt number `attempt` (from 0) ended so. None: do not try again.

        `repeatable`: done twice, the request has the same result as done once. Others are sent again only
        where nothing was begun. The waits are random up to their bound, so that many who were refused at once
        do not come back at once.
        """
        if attempt >= self.most or not _may_repeat(error, repeatable=repeatable):
            return None
        asked = error.retry_after_seconds if isinstance(error, Refused) else None
        return max(self.pause_seconds(attempt), asked or 0.0)

    def pause_seconds(self, attempt: int) -> float:
        """How long to wait after attempt number `attempt` (from 0)."""
        return random.uniform(0, min(self.longest_seconds, self.first_seconds * 2.0 ** min(attempt, 32)))


def _may_repeat(error: ClientError, *, repeatable: bool) -> bool:
    match error:
        case Unreachable():
            return error.retryable
        case AnswerLost():
            return repeatable
        case Refused():
            return not error.begun or (repeatable and error.status in _WORTH_REPEATING)
        case _:
            return False
