# Generated from sdk/forktree/_async/batches.py by `make generate`; change that file.
"""Many sessions at once, in one request for up to 256 of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TypeVar

from forktree._flavours import each
from forktree._results import Command, ExecResult, exec_body
from forktree._sync.session import Session
from forktree._sync.transport import Call, Transport
from forktree.errors import BatchFailed, NoSuchSession, Refused, SessionGone, refused
from forktree.wire_batches import BATCH_MAX, BatchDone, BatchResult

MARGIN_SECONDS = 90.0
EXECS_AT_ONCE = 32
"""As many of a batch an agent runs at the same time."""
BATCHES_AT_ONCE = 4

T = TypeVar("T")


def score_many(transport: Transport, scores: Mapping[Session, float]) -> None:
    numbers = {session.id: float(number) for session, number in scores.items()}
    calls = [
        Call(method="POST", path="/batch/score", body={"scores": dict(some)}, repeatable=True, seconds=120.0)
        for some in _in_batches(numbers.items())
    ]
    _raise_failures(_results(transport, calls))


def prune_many(transport: Transport, sessions: Iterable[Session]) -> None:
    ids = list(dict.fromkeys(session.id for session in sessions))
    calls = [
        Call(method="POST", path="/batch/prune", body={"session_ids": some}, repeatable=True, seconds=240.0)
        for some in _in_batches(ids)
    ]
    results = _results(transport, calls)
    # What is gone is what was wanted.
    _raise_failures([each for each in results if each.code not in {NoSuchSession.code, SessionGone.code}])


def exec_many(
    transport: Transport,
    commands: Sequence[tuple[Session, Command]],
    *,
    timeout: float,
    check: bool,
) -> list[ExecResult]:
    bodies = [(session.id, exec_body(command, timeout=timeout)) for session, command in commands]
    calls = [
        Call(
            method="POST",
            path="/batch/exec",
            body={"execs": dict(some)},
            seconds=seconds,
            attempt_seconds=seconds,
            silence_seconds=seconds,
        )
        for some in _in_batches(bodies)
        for seconds in [timeout * -(-len(some) // EXECS_AT_ONCE) + MARGIN_SECONDS]
    ]
    results = _results(transport, calls)
    _raise_failures(results)
    found = [ExecResult.of(each.exec) for each in results if each.exec is not None]
    if check:
        for result in found:
            result.check()
    return found


def _results(transport: Transport, calls: Sequence[Call]) -> list[BatchResult]:
    def one(call: Call) -> tuple[BatchResult, ...]:
        return (transport.ask(call, BatchDone)).results

    done = each([partial(one, call) for call in calls], at_once=BATCHES_AT_ONCE)
    return list(itertools.chain.from_iterable(done))


def _raise_failures(results: Sequence[BatchResult]) -> None:
    failures: dict[str, Refused] = {
        str(each.session_id): refused(each.error or "no reason was given", code=each.code or "", status=0)
        for each in results
        if not each.ok
    }
    if failures:
        raise BatchFailed(failures, of=len(results))


def _in_batches(items: Iterable[T]) -> Iterator[list[T]]:
    rest = iter(items)
    while batch := list(itertools.islice(rest, BATCH_MAX)):
        yield batch
