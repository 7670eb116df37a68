"""The root of every error that forktree raises on purpose.

A class is one thing that a caller would do differently; `reason` is the word that reaches `status.reason`
and the HTTP answer, and the message is one sentence for a person.
"""

from __future__ import annotations

from typing import ClassVar

from forktree.models.reasons import Reason


class ForktreeError(Exception):
    """Something was refused or failed, and `message` says what in one sentence."""

    reason: ClassVar[Reason] = Reason.INTERNAL
    retryable: ClassVar[bool] = False
    """Whether the same request may succeed later with nothing else changed."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message
