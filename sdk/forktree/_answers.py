"""What came back, in words: a refusal as its class of error, and why nothing came at all."""

from __future__ import annotations

import ssl

import httpx2
import pydantic

from forktree.errors import AnswerLost, ClientError, Refused, Unreachable, Untrusted, refused
from forktree.wire import ErrorBody

_SHOWN = 200
"""Characters of an answer that is none of ours, where a sentence repeats it."""


def refusal(response: httpx2.Response, body: bytes) -> Refused:
    """The error that this answer is."""
    retry_after = response.headers.get("Retry-After", "")
    seconds = float(retry_after) if retry_after.isdecimal() else None
    try:
        said = ErrorBody.model_validate_json(body)
    except pydantic.ValidationError:
        # A proxy on the way, or something else altogether.
        shown = " ".join(body[:_SHOWN].decode(errors="replace").split())
        sentence = (
            f"{response.url.host} answered with status {response.status_code} and no error of ours: {shown}"
        )
        return refused(sentence, code="", status=response.status_code, retry_after_seconds=seconds)
    return refused(said.message, code=said.code, status=response.status_code, retry_after_seconds=seconds)


def explained(error: httpx2.TransportError, url: str, method: str, path: str) -> ClientError:
    """Why there is no answer, and whether the request may have been begun."""
    cause = _certificate_error(error)
    if cause is not None:
        return Untrusted(
            f"what answers at {url} is not shown to be the agent ({cause.verify_message}): FORKTREE_CA must "
            "name the certificates of this very agent, as `kubectl get forknodes` has them in "
            ".status.caBundle"
        )
    if isinstance(error, (httpx2.ConnectError, httpx2.ConnectTimeout)):
        why = str(error) or "it does not answer"
        return Unreachable(f"no agent can be reached at {url}: {why}")
    if isinstance(error, httpx2.PoolTimeout):
        return Unreachable(f"all connections to {url} were busy until the deadline")
    what = "no answer in time" if isinstance(error, httpx2.TimeoutException) else "the connection broke"
    return AnswerLost(f"{url} gave no whole answer to {method} {path}: {what} ({type(error).__name__})")


def _certificate_error(error: BaseException | None) -> ssl.SSLCertVerificationError | None:
    while error is not None:
        if isinstance(error, ssl.SSLCertVerificationError):
            return error
        error = error.__cause__ or error.__context__
    return None
