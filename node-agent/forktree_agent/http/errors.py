"""Every refusal the HTTP API can give: one table from reasons and typed errors to a code and a status.

Clients repeat a create, fork or exec only after `at_capacity`, `session_bringup_failed` and `draining`, so
these are sent only where nothing was left running.
"""

from __future__ import annotations

import traceback
from enum import StrEnum
from http import HTTPStatus

from forktree.errors import ForktreeError
from forktree.kube import errors as kube
from forktree.models.reasons import Reason
from forktree_agent.engine import contract


class Code(StrEnum):
    """`code` and `error_code` of an error body."""

    BAD_REQUEST = "bad_request"
    INVALID_SEED = "invalid_seed"
    TEMPLATE_ID_REQUIRED = "template_id_required"
    UNAUTHORIZED = "unauthorized"
    FORBIDDEN = "forbidden"
    NOT_FOUND = "not_found"
    NO_TEMPLATE = "no_template"
    NO_SUCH_SESSION = "no_such_session"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    CONFLICT = "conflict"
    TEMPLATE_IN_USE = "template_in_use"
    PORT_NOT_EXPOSED = "port_not_exposed"
    NOT_READY = "not_ready"
    SESSION_GONE = "session_gone"
    BODY_TOO_LARGE = "body_too_large"
    WRONG_NODE = "wrong_node"
    TEMPLATE_FAILED = "template_failed"
    LIMIT_REACHED = "limit_reached"
    QUOTA_EXCEEDED = "quota_exceeded"
    INTERNAL = "internal"
    SESSION_BRINGUP_FAILED = "session_bringup_failed"
    UPSTREAM_ERROR = "upstream_error"
    AT_CAPACITY = "at_capacity"
    OVERLOADED = "overloaded"
    DRAINING = "draining"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    NO_SPACE = "no_space"


STATUS: dict[Code, HTTPStatus] = {
    Code.BAD_REQUEST: HTTPStatus.BAD_REQUEST,
    Code.INVALID_SEED: HTTPStatus.BAD_REQUEST,
    Code.TEMPLATE_ID_REQUIRED: HTTPStatus.BAD_REQUEST,
    Code.UNAUTHORIZED: HTTPStatus.UNAUTHORIZED,
    Code.FORBIDDEN: HTTPStatus.FORBIDDEN,
    Code.NOT_FOUND: HTTPStatus.NOT_FOUND,
    Code.NO_TEMPLATE: HTTPStatus.NOT_FOUND,
    Code.NO_SUCH_SESSION: HTTPStatus.NOT_FOUND,
    Code.METHOD_NOT_ALLOWED: HTTPStatus.METHOD_NOT_ALLOWED,
    Code.CONFLICT: HTTPStatus.CONFLICT,
    Code.TEMPLATE_IN_USE: HTTPStatus.CONFLICT,
    Code.PORT_NOT_EXPOSED: HTTPStatus.CONFLICT,
    Code.NOT_READY: HTTPStatus.CONFLICT,
    Code.SESSION_GONE: HTTPStatus.GONE,
    Code.BODY_TOO_LARGE: HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    Code.WRONG_NODE: HTTPStatus.MISDIRECTED_REQUEST,
    Code.TEMPLATE_FAILED: HTTPStatus.UNPROCESSABLE_ENTITY,
    Code.LIMIT_REACHED: HTTPStatus.CONFLICT,
    Code.QUOTA_EXCEEDED: HTTPStatus.TOO_MANY_REQUESTS,
    Code.INTERNAL: HTTPStatus.INTERNAL_SERVER_ERROR,
    Code.SESSION_BRINGUP_FAILED: HTTPStatus.INTERNAL_SERVER_ERROR,
    Code.UPSTREAM_ERROR: HTTPStatus.BAD_GATEWAY,
    Code.AT_CAPACITY: HTTPStatus.SERVICE_UNAVAILABLE,
    Code.OVERLOADED: HTTPStatus.SERVICE_UNAVAILABLE,
    Code.DRAINING: HTTPStatus.SERVICE_UNAVAILABLE,
    Code.DEADLINE_EXCEEDED: HTTPStatus.GATEWAY_TIMEOUT,
    Code.NO_SPACE: HTTPStatus.INSUFFICIENT_STORAGE,
}

# What a reason in an object's status means to the caller who asked for that object.
REASONS: dict[Reason, Code] = {
    Reason.UNSCHEDULED: Code.NOT_READY,
    Reason.BAKING: Code.NOT_READY,
    Reason.STARTING: Code.NOT_READY,
    Reason.AT_CAPACITY: Code.AT_CAPACITY,
    Reason.DEPTH_LIMIT: Code.LIMIT_REACHED,
    Reason.MEMORY_LIMIT: Code.LIMIT_REACHED,
    Reason.LIVE_LIMIT: Code.LIMIT_REACHED,
    Reason.PULLING_IMAGE: Code.NOT_READY,
    Reason.IMAGE_NOT_FOUND: Code.TEMPLATE_FAILED,
    Reason.IMAGE_PULL_FAILED: Code.TEMPLATE_FAILED,
    Reason.IMAGE_INVALID: Code.TEMPLATE_FAILED,
    Reason.IMAGE_TOO_LARGE: Code.TEMPLATE_FAILED,
    Reason.TEMPLATE_NOT_FOUND: Code.NO_TEMPLATE,
    Reason.EGRESS_FORBIDDEN: Code.TEMPLATE_FAILED,
    Reason.NEVER_READY: Code.TEMPLATE_FAILED,
    Reason.PIN_MISMATCH: Code.TEMPLATE_FAILED,
    Reason.BAKE_FAILED: Code.TEMPLATE_FAILED,
    Reason.SECRET_UNREADABLE: Code.BAD_REQUEST,
    Reason.HOOK_FAILED: Code.TEMPLATE_FAILED,
    Reason.PAUSED: Code.NOT_READY,
    Reason.SOURCE_NOT_FOUND: Code.NO_SUCH_SESSION,
    Reason.SOURCE_NOT_READY: Code.NOT_READY,
    Reason.SOURCE_FAILED: Code.SESSION_GONE,
    Reason.SOURCE_GONE: Code.SESSION_GONE,
    Reason.FOREIGN_OWNER: Code.CONFLICT,
    Reason.FORK_FAILED: Code.SESSION_BRINGUP_FAILED,
    Reason.PAUSE_BUDGET: Code.AT_CAPACITY,  # It may be forked when it writes less: nothing was done.
    Reason.TOO_FRAGMENTED: Code.LIMIT_REACHED,
    Reason.DEADLINE_EXCEEDED: Code.DEADLINE_EXCEEDED,
    Reason.MACHINE_LOST: Code.SESSION_GONE,
    Reason.NETWORK_LOST: Code.NOT_READY,
    Reason.NODE_LOST: Code.SESSION_GONE,
    Reason.PARENT_LOST: Code.SESSION_GONE,
    Reason.POINT_LOST: Code.SESSION_GONE,
    Reason.EXPIRED: Code.SESSION_GONE,
    Reason.EXEC_FAILED: Code.INTERNAL,
    Reason.EXEC_TIMED_OUT: Code.INTERNAL,
    Reason.EXEC_NOT_STARTED: Code.INTERNAL,
    Reason.INTERRUPTED: Code.INTERNAL,
    Reason.NO_SCORE: Code.INTERNAL,
    Reason.PRUNED: Code.SESSION_GONE,
    Reason.AGENT_LOST: Code.NOT_READY,
    Reason.INVALID: Code.BAD_REQUEST,
    Reason.INTERNAL: Code.INTERNAL,
}

# Classes that say more to a caller than their reason does. The most derived class with a row decides.
ERRORS: dict[type[ForktreeError], Code] = {
    contract.MachineGone: Code.SESSION_GONE,
    contract.CommandRefused: Code.BAD_REQUEST,
    contract.ExecNotFound: Code.NOT_FOUND,
    kube.KubeError: Code.UPSTREAM_ERROR,
    kube.NotFound: Code.NOT_FOUND,
    kube.Conflict: Code.CONFLICT,
    kube.AlreadyExists: Code.CONFLICT,
    kube.Forbidden: Code.FORBIDDEN,
    kube.NoRight: Code.FORBIDDEN,
    kube.Invalid: Code.BAD_REQUEST,
    # Ours, not the caller's: the agent's own account is not accepted.
    kube.Unauthorized: Code.UPSTREAM_ERROR,
    kube.Expired: Code.UPSTREAM_ERROR,
    kube.Unreadable: Code.UPSTREAM_ERROR,
    kube.Unavailable: Code.UPSTREAM_ERROR,
}


_QUOTA = "exceeded quota"
"""A full quota is a 403 like any other; the API server tells it apart by these words alone (1.36)."""


SHOWN_CHARACTERS = 80
"""Of what a caller has sent, where a sentence repeats any of it."""


class Refusal(Exception):
    """The answer to a request is this error. `sentence` is shown to the caller as it is."""

    def __init__(self, code: Code, sentence: str) -> None:
        super().__init__(sentence)
        self.code = code
        self.sentence = sentence

    @property
    def status(self) -> HTTPStatus:
        return STATUS[self.code]


def refusal_of(error: Refusal | ForktreeError) -> Refusal:
    """What a caller is told about a typed error of the layers below; a refusal says that itself."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, kube.Forbidden) and _QUOTA in error.message:
        return Refusal(Code.QUOTA_EXCEEDED, error.message)
    return Refusal(code_of(type(error)), error.message)


def code_of(kind: type[ForktreeError]) -> Code:
    """The code of an error of this class."""
    for cls in kind.__mro__:
        if code := ERRORS.get(cls):
            return code
    return REASONS[kind.reason]


def refusal_for(reason: Reason | None, message: str | None, subject: str) -> Refusal:
    """What a caller is told about an object that says `reason` in its status."""
    code = REASONS[reason] if reason is not None else Code.INTERNAL
    return Refusal(code, message or f"{subject} failed and gave no reason")


def shown(sent: str) -> str:
    """A caller's own word as a sentence can hold it: in one line, and not as long as anybody likes."""
    short = sent if len(sent) <= SHOWN_CHARACTERS else f"{sent[:SHOWN_CHARACTERS]}…"
    return "".join(each if each.isprintable() else "?" for each in short)


def place_of(error: BaseException | None) -> str:
    """Where an error comes from that nobody foresaw. Its message is left out: it may quote what was sent."""
    return "" if error is None else "".join(traceback.format_tb(error.__traceback__))
