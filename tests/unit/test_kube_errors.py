"""Every answer of 400 and more becomes one of a few errors, and its text is the server's own."""

from __future__ import annotations

import json

import pytest

from forktree.kube import errors
from forktree.kube.errors import KubeError, from_answer


def status(code: int, reason: str, message: str = "no") -> bytes:
    return json.dumps({"kind": "Status", "code": code, "reason": reason, "message": message}).encode()


@pytest.mark.parametrize(
    ("code", "reason", "kind"),
    [
        (400, "BadRequest", errors.Invalid),
        (401, "Unauthorized", errors.Unauthorized),
        (403, "Forbidden", errors.Forbidden),
        (404, "NotFound", errors.NotFound),
        (408, "Timeout", errors.Unavailable),
        (409, "AlreadyExists", errors.AlreadyExists),
        (409, "Conflict", errors.Conflict),
        (410, "Expired", errors.Expired),
        (422, "Invalid", errors.Invalid),
        (429, "TooManyRequests", errors.Unavailable),
        (500, "InternalError", errors.Unavailable),
        (503, "ServiceUnavailable", errors.Unavailable),
        (504, "Timeout", errors.Unavailable),
    ],
)
def test_answer_becomes_the_error_that_callers_tell_apart(
    code: int, reason: str, kind: type[KubeError]
) -> None:
    error = from_answer(code, status(code, reason))
    assert type(error) is kind
    assert (error.message, error.code) == ("no", code)
    assert error.retryable == (kind is errors.Unavailable)


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        (
            'forks.forktree.dev is forbidden: User "system:serviceaccount:s:agent" cannot create resource '
            '"forks" in API group "forktree.dev" in the namespace "a"',
            errors.NoRight,
        ),
        (
            'forks.forktree.dev "x" is forbidden: User "u" cannot get resource "forks" in API group "f"',
            errors.NoRight,
        ),
        ('forks.forktree.dev "x" is forbidden: exceeded quota: small, requested: 1', errors.Forbidden),
        (
            'sessions.forktree.dev "x" is forbidden: ValidatingAdmissionPolicy "p" with binding "p" denied '
            'request: it is forbidden: User "u"',
            errors.Forbidden,
        ),
    ],
)
def test_what_the_authorizer_says_is_told_apart_from_what_admission_says(
    message: str, kind: type[KubeError]
) -> None:
    """A server that has just started knows of no rights yet: nobody may lose a machine by that."""
    assert type(from_answer(403, status(403, "Forbidden", message))) is kind


def test_body_that_is_no_status_is_quoted_in_part() -> None:
    error = from_answer(502, b"<html>" + b"x" * 10_000)
    assert isinstance(error, errors.Unavailable)
    assert error.message.startswith("<html>")
    assert len(error.message) <= 500


def test_empty_body_still_gives_a_sentence() -> None:
    assert from_answer(503, b"").message == "the API server answered 503 without a word"


def test_server_may_say_how_long_to_wait() -> None:
    assert from_answer(429, b"", "3").retry_after_seconds == 3.0
    assert from_answer(429, b"", "Wed, 21 Oct 2026 07:28:00 GMT").retry_after_seconds is None
