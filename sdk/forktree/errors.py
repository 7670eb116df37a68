"""The root of every error that forktree raises on purpose.

A class is one thing that a caller would do differently; `reason` is the word that reaches `status.reason`
and the HTTP answer, and the message is one sentence for a person.
"""

from __future__ import annotations

from collections.abc import Mapping
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


class ClientError(ForktreeError):
    """Every error that a `forktree.Client` raises."""


class BadSettings(ClientError):
    """What the client was told, or found in its environment, cannot be used."""

    reason = Reason.INVALID


class Unreachable(ClientError):
    """Nobody was reached, so nothing was begun."""

    retryable = True


class NoAgent(Unreachable):
    """It is not known where an agent is: nothing says so, or no node of the cluster has one that is ready."""

    retryable = False


class Untrusted(ClientError):
    """What answered at the agent's address is not shown to be the agent."""


class AnswerLost(ClientError):
    """The request was sent and no whole answer came. What it asked for may have been done.

    `idempotency_key`, where it is set, finds it again: the same call with this key has the same result.
    """

    reason = Reason.DEADLINE_EXCEEDED

    def __init__(self, message: str, idempotency_key: str | None = None) -> None:
        super().__init__(message)
        self.idempotency_key = idempotency_key


class UnexpectedAnswer(ClientError):
    """What was answered is nothing that this version of the client can read."""


class CommandFailed(ClientError):
    """A command ended with another exit code than 0, or ran out of time, and its caller had asked for 0."""

    reason = Reason.EXEC_FAILED


class Refused(ClientError):
    """The server's answer is an error. `code` is its word for it, `status` the HTTP status."""

    code: ClassVar[str] = ""
    """What the server calls this class of errors. Empty: any that this version does not know."""
    begun: ClassVar[bool] = True
    """Whether something may be left of what was asked for. False: the same request may always be repeated."""

    def __init__(
        self, message: str, *, code: str, status: int, retry_after_seconds: float | None = None
    ) -> None:
        super().__init__(message)
        self.given_code = code
        self.status = status
        self.retry_after_seconds = retry_after_seconds


class BadRequest(Refused):
    """The request itself is wrong."""

    code, reason = "bad_request", Reason.INVALID


class InvalidSeed(BadRequest):
    """The seed is none of the form that the call takes."""

    code = "invalid_seed"


class TemplateRequired(BadRequest):
    """No template was named."""

    code = "template_id_required"


class Unauthorized(Refused):
    """The token is not accepted: it has expired, is meant for another audience, or is no token at all."""

    code = "unauthorized"


class Forbidden(Refused):
    """The token's account may not do this."""

    code = "forbidden"


class NotFound(Refused):
    """There is no such thing."""

    code = "not_found"


class NoSuchTemplate(NotFound):
    """There is no template of that name."""

    code, reason = "no_template", Reason.TEMPLATE_NOT_FOUND


class NoSuchSession(NotFound):
    """There is no session of that name."""

    code, reason = "no_such_session", Reason.SOURCE_NOT_FOUND


class MethodNotAllowed(Refused):
    """The server knows the path, but not this use of it: it is of another version."""

    code = "method_not_allowed"


class Conflict(Refused):
    """Something of that name is there already and is not the same."""

    code = "conflict"


class TemplateInUse(Conflict):
    """There are sessions of the template."""

    code = "template_in_use"


class PortNotExposed(Conflict):
    """The session's template does not expose that port."""

    code = "port_not_exposed"


class NotReady(Refused):
    """It does not run yet, or is paused."""

    code, reason, retryable = "not_ready", Reason.SOURCE_NOT_READY, True


class SessionGone(Refused):
    """The session was there and runs no longer."""

    code, reason = "session_gone", Reason.SOURCE_GONE


class BodyTooLarge(Refused):
    """The request is larger than the server takes."""

    code = "body_too_large"


class WrongNode(Refused):
    """The agent that has it could not be found."""

    code = "wrong_node"


class TemplateFailed(Refused):
    """The template does not come up."""

    code, reason = "template_failed", Reason.BAKE_FAILED


class LimitReached(Refused):
    """The tree has as much as its template allows."""

    code, reason = "limit_reached", Reason.LIVE_LIMIT


class QuotaExceeded(Refused):
    """The namespace has as much as its quota allows."""

    code = "quota_exceeded"


class ServerBroken(Refused):
    """Something in the server is broken."""

    code = "internal"


class BringUpFailed(Refused):
    """It was started and did not come up. Nothing is left of it."""

    code, reason, retryable, begun = "session_bringup_failed", Reason.FORK_FAILED, True, False


class UpstreamFailed(Refused):
    """What the agent stands on, the API server or another agent, did not answer."""

    code, retryable = "upstream_error", True


class AtCapacity(Refused):
    """There is no room. Nothing was started."""

    code, reason, retryable, begun = "at_capacity", Reason.AT_CAPACITY, True, False


class Overloaded(Refused):
    """The agent has too much to do. Nothing was begun."""

    code, retryable, begun = "overloaded", True, False


class Draining(Refused):
    """The node takes nothing new. Nothing was begun."""

    code, retryable, begun = "draining", True, False


class NoSpace(Refused):
    """The session has no room for what is written to its files."""

    code = "no_space"


class DeadlineExceeded(Refused):
    """It was not done in the time that the server gives it."""

    code, reason, retryable = "deadline_exceeded", Reason.DEADLINE_EXCEEDED, True


class BatchFailed(ClientError):
    """Some of many failed; the others were done. `failures` has the error of each by the session's id."""

    def __init__(self, failures: Mapping[str, Refused], of: int) -> None:
        session, first = next(iter(failures.items()))
        super().__init__(f"{len(failures)} of {of} failed; {session}: {first.message}")
        self.failures = dict(failures)


def refused(message: str, *, code: str, status: int, retry_after_seconds: float | None = None) -> Refused:
    """The error of the class that `code` stands for."""
    kind = _by_code(Refused).get(code, Refused)
    return kind(message, code=code, status=status, retry_after_seconds=retry_after_seconds)


def _by_code(kind: type[Refused]) -> dict[str, type[Refused]]:
    found = {kind.code: kind}
    for each in kind.__subclasses__():
        found |= _by_code(each)
    return found
