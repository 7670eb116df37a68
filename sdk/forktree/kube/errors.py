"""What an API server can refuse or fail at, one class per thing that a caller does differently.

KubeError
├── NotFound        the object, its namespace or its kind is not there
├── AlreadyExists   another object has the name
├── Conflict        the object changed meanwhile, or has another uid
├── Forbidden       a policy or a quota says no; NoRight: RBAC does, for now
├── Unauthorized    the credentials are not accepted
├── Invalid         the request or the object is wrong
├── Expired         the resource version is too old: list again
├── Unreadable      the answer is not what this version of forktree can read
└── Unavailable     no answer, or "later": the only one that is worth repeating as it is
"""

from __future__ import annotations

import re
from typing import ClassVar

import msgspec

from forktree.errors import ForktreeError
from forktree.models.reasons import Reason

_LONGEST_QUOTE = 500


class KubeError(ForktreeError):
    """A call to the API server did not succeed. `message` is the server's own sentence where it gave one."""

    def __init__(
        self, message: str, *, code: int | None = None, retry_after_seconds: float | None = None
    ) -> None:
        super().__init__(message)
        self.code = code
        """HTTP status; None where there was no answer."""
        self.retry_after_seconds = retry_after_seconds
        """How long the server asks to wait; None where it did not say."""


class NotFound(KubeError):
    """The object is not there, nor perhaps its namespace or kind: a 404 alone does not tell which."""


class AlreadyExists(KubeError):
    """Another object has this name."""


class Conflict(KubeError):
    """The object changed since it was read, or has another uid than the one asked for."""


class Forbidden(KubeError):
    """RBAC, a quota or an admission policy says no."""


class NoRight(Forbidden):
    """Whoever asked has no right to, as far as the server knows: one that has just started knows of no rights
    for a moment, so this decides nothing for good."""


class Unauthorized(KubeError):
    """The credentials are not accepted, also not after reading them anew."""


class Invalid(KubeError):
    """The API server refuses the object or the request as it is."""

    reason: ClassVar[Reason] = Reason.INVALID


class Expired(KubeError):
    """The resource version is older than what the server remembers. List again."""


class Unreadable(KubeError):
    """The server answered with something that this version of forktree cannot read."""


class Unavailable(KubeError):
    """No answer in time, or the server is away or asks to come back later. The call may have taken effect."""

    retryable: ClassVar[bool] = True


_NO_RIGHT = re.compile(r'\S+( "[^"]*")? is forbidden: User "')
"""How the server begins what its authorizer refuses. Admission names a policy, a quota or a plugin there."""


class _Status(msgspec.Struct):
    """The part of `meta/v1 Status` that tells errors apart."""

    message: str = ""
    reason: str = ""
    code: int = 0


def from_answer(code: int, body: bytes, retry_after: str | None = None) -> KubeError:
    """The error that an HTTP answer of 400 and more means. The body is quoted in part only."""
    try:
        status = msgspec.json.decode(body, type=_Status)
    except msgspec.MsgspecError:
        status = _Status(message=body[:_LONGEST_QUOTE].decode(errors="replace"))
    message = status.message or f"the API server answered {code} without a word"
    seconds = float(retry_after) if retry_after is not None and retry_after.isdecimal() else None
    kind = _class_of(code, status.reason)
    if kind is Forbidden and _NO_RIGHT.match(message):
        kind = NoRight
    return kind(message, code=code, retry_after_seconds=seconds)


def _class_of(code: int, reason: str) -> type[KubeError]:
    match code:
        case 401:
            return Unauthorized
        case 403:
            return Forbidden
        case 404:
            return NotFound
        case 409:
            return AlreadyExists if reason == "AlreadyExists" else Conflict
        case 410:
            return Expired
        case 408 | 429:
            return Unavailable
        case _:
            return Unavailable if code >= 500 else Invalid
