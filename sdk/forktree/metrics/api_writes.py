"""Counts a client's writes to the API server."""

from __future__ import annotations

from forktree.kube.client import Observer
from forktree.kube.errors import AlreadyExists, Conflict, KubeError, NotFound, Unavailable
from forktree.metrics.instruments import Instruments
from forktree.metrics.table import API_WRITES, Verb, WriteOutcome

_VERBS = {"POST": Verb.CREATE, "PUT": Verb.UPDATE, "PATCH": Verb.PATCH, "DELETE": Verb.DELETE}
_QUESTIONS = ("/apis/authentication.k8s.io/", "/apis/authorization.k8s.io/")
"""Reviews are sent like writes, and leave nothing behind."""


def counting_writes(instruments: Instruments) -> Observer:
    """What to hand to `KubeClient.connected`."""
    counter = instruments.counter(API_WRITES)

    def observe(method: str, path: str, error: KubeError | None) -> None:
        verb = _VERBS.get(method)
        if verb is not None and not path.startswith(_QUESTIONS):
            counter.labels(verb, _outcome(error)).inc()

    return observe


def _outcome(error: KubeError | None) -> WriteOutcome:
    match error:
        case None:
            return WriteOutcome.OK
        case Conflict() | AlreadyExists():
            return WriteOutcome.CONFLICT
        case NotFound():
            return WriteOutcome.NOT_FOUND
        case Unavailable():
            return WriteOutcome.UNAVAILABLE
        case _:
            return WriteOutcome.REFUSED
