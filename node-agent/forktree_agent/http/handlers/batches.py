"""The same for many at once. Each is asked for and refused alone; what may not be done is one that fails."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from http import HTTPStatus
from typing import Final, TypeVar

import msgspec
from aiohttp import web
from pydantic import ValidationError

from forktree.errors import ForktreeError
from forktree.kube.errors import NotFound
from forktree.models import Fork, Session
from forktree.models.texts import is_dns_label
from forktree.wire import Exec, ExecFinished
from forktree.wire_batches import BATCH_MAX, BatchDone, BatchExec, BatchPrune, BatchResult, BatchScore
from forktree.wire_trees import SetScore
from forktree_agent.control.together import each_of
from forktree_agent.engine.contract import ExecResult, Room
from forktree_agent.http import bodies, changing, executing, finding, forking, locating, outputs
from forktree_agent.http.errors import Code, Refusal, refusal_of
from forktree_agent.http.executing import Finished
from forktree_agent.http.locating import no_such_session
from forktree_agent.http.proxying import HOP_SECONDS, Errand
from forktree_agent.http.requests import HELD, REQUEST_ID
from forktree_agent.http.table import Asked, Route

Target = TypeVar("Target")
_Pruned = tuple[type[Session] | type[Fork], str]

WRITES_AT_ONCE = 32
EXECS_AT_ONCE = 32

OUTPUT_BYTES = 64 << 20
"""Of all commands of a call together: it is one answer. Each may have as large a part of it as others."""


async def _score(asked: Asked) -> web.StreamResponse:
    wanted = await asked.body(BatchScore)

    async def one(session_id: str) -> BatchResult:
        await _permit_session(asked, "patch", "sessions", session_id)
        session = await finding.session_object(asked, session_id)
        numbers = SetScore(score=wanted.scores[session_id])
        return BatchResult(
            session_id=session_id, ok=True, session=await changing.score(asked, session, numbers)
        )

    return await _answer(await _each(wanted.scores, one, _of_session, at_once=WRITES_AT_ONCE))


async def _prune(asked: Asked) -> web.StreamResponse:
    wanted = await asked.body(BatchPrune)
    if len(wanted.session_ids) + len(wanted.fork_ids) > BATCH_MAX:
        raise Refusal(Code.BAD_REQUEST, f"a call may name {BATCH_MAX} sessions and forks together")
    targets: list[_Pruned] = [
        *((Session, each) for each in wanted.session_ids),
        *((Fork, each) for each in wanted.fork_ids),
    ]

    async def look(target: _Pruned) -> BatchResult:
        await _permit_deletion(asked, *target)
        return _of_target(target).model_copy(update={"ok": True})

    async def delete(target: _Pruned) -> BatchResult:
        kind, name = target
        with suppress(NotFound):  # It went with another of them meanwhile.
            await asked.client.delete(kind, asked.namespace, name)
        return _of_target(target).model_copy(update={"ok": True, "deleted": True})

    seen = await _each(targets, look, _of_target, at_once=WRITES_AT_ONCE)
    there = [target for target, result in zip(targets, seen, strict=True) if result.ok]
    gone = iter(await _each(there, delete, _of_target, at_once=WRITES_AT_ONCE))
    return await _answer([next(gone) if result.ok else result for result in seen])


async def _permit_deletion(asked: Asked, kind: type[Session] | type[Fork], name: str) -> None:
    """Return if it is there and the caller may delete it. One that was just forked has its object soon."""
    if kind is Session:
        await _permit_session(asked, "delete", "sessions", name)
        await finding.session_object(asked, name)
        return
    _named(name, Refusal(Code.NOT_FOUND, "no fork can have that name"))
    await asked.permit("delete", "forks", name)
    await forking.written(asked.facade, asked.namespace, name, deadline=asked.seen + forking.WAIT_SECONDS)
    await finding.fork_object(asked, name)


async def _exec(asked: Asked) -> web.StreamResponse:
    wanted = (await asked.body(BatchExec)).by_session()
    limit_bytes = min(executing.OUTPUT_BYTES, OUTPUT_BYTES // len(wanted))
    ended: dict[str, Finished] = {}

    async def one(session_id: str) -> BatchResult:
        await _permit_session(asked, "create", "sessions/exec", session_id)
        ended[session_id] = await _executed(asked, session_id, wanted[session_id], limit_bytes)
        return BatchResult(session_id=session_id, ok=True)

    results = await _each(wanted, one, _of_session, at_once=EXECS_AT_ONCE)
    about = sum(each.output_bytes for each in ended.values())
    return await outputs.answer(asked.request, _encoded(results, ended), about_bytes=about)


def _encoded(results: list[BatchResult], ended: Mapping[str, Finished]) -> Iterator[bytes]:
    """As `BatchDone`."""
    between = b'{"results":['
    for result in results:
        yield between
        between = b","
        finished = ended.get(result.session_id or "")
        if finished is None:
            yield bodies.encode(result)
        else:
            yield bodies.encode(result)[:-1] + b',"exec":'
            yield from finished.encoded()
            yield b"}"
    yield b"]}"


async def _executed(asked: Asked, session_id: str, command: Exec, limit_bytes: int) -> Finished:
    start_by = asyncio.get_running_loop().time() + executing.START_SECONDS
    session = await locating.find_placed(
        asked.client, asked.facade, asked.namespace, session_id, deadline=start_by
    )
    if node := locating.other_node(asked.facade, session):
        end_by = start_by + command.timeout_seconds + executing.MARGIN_SECONDS
        finished = await _elsewhere(asked, node, session_id, command, end_by)
        return _cut(finished, limit_bytes, asked.request[HELD].room(session_id))
    request_id = f"{asked.request[REQUEST_ID]}.{session_id[-32:]}"
    return await executing.execute(
        asked.facade,
        session,
        command,
        start_by=start_by,
        request_id=request_id,
        room=asked.request[HELD].room(session_id),
        limit_bytes=limit_bytes,
    )


class _Refused(msgspec.Struct, frozen=True):
    code: str = Code.UPSTREAM_ERROR
    error: str = "the other node's agent gave no reason"


async def _elsewhere(asked: Asked, node: str, session_id: str, command: Exec, end_by: float) -> ExecFinished:
    """How it ended, by the agent of the session's node. Raises `Refusal`, its or ours."""
    errand = Errand(
        node=node,
        path=f"/ns/{asked.namespace}/v1/sessions/{session_id}/exec",
        subject=f"session {session_id}",
        deadline=end_by + HOP_SECONDS,
        body=command.model_dump_json(exclude_unset=True).encode(),
    )
    told = await asked.parts.proxy.ask(asked.request, errand)
    try:
        if told.status == HTTPStatus.OK:
            return ExecFinished.model_validate_json(told.content)
        refused = msgspec.json.decode(told.content, type=_Refused)
        raise Refusal(Code(refused.code), refused.error)
    except (ValidationError, msgspec.MsgspecError, ValueError) as err:
        sentence = f"the agent of node {node}, where session {session_id} is, gave no answer of this API"
        raise Refusal(Code.UPSTREAM_ERROR, sentence) from err
    finally:
        asked.request[HELD].let_go(len(told.content))


def _cut(finished: ExecFinished, limit_bytes: int, room: Room) -> Finished:
    """What another agent told, as far as there is room for its output here."""
    stdout, stderr = finished.stdout.encode(), finished.stderr.encode()
    given = room.claim(min(len(stdout) + len(stderr), limit_bytes))
    result = ExecResult(
        stdout=stdout[:given],
        stderr=stderr[: max(0, given - len(stdout))],
        exit_code=finished.exit_code,
        timed_out=finished.timed_out,
        truncated=finished.truncated or given < len(stdout) + len(stderr),
    )
    return Finished(id=finished.id, result=result, exec_time_ms=finished.exec_time_ms)


async def _permit_session(asked: Asked, verb: str, resource: str, session_id: str) -> None:
    _named(session_id, no_such_session("of that name", asked.namespace))
    await asked.permit(verb, resource, session_id)


def _named(name: str, refusal: Refusal) -> None:
    """What no object can be called becomes part of no path."""
    if not is_dns_label(name):
        raise refusal


async def _each(
    targets: Iterable[Target],
    work: Callable[[Target], Awaitable[BatchResult]],
    of: Callable[[Target], BatchResult],
    *,
    at_once: int,
) -> list[BatchResult]:
    async def one(target: Target) -> BatchResult:
        try:
            return await work(target)
        except (Refusal, ForktreeError) as err:
            refusal = refusal_of(err)
            return of(target).model_copy(update={"error": refusal.sentence, "code": refusal.code})

    return await each_of(targets, one, at_once=at_once)


async def _answer(results: list[BatchResult]) -> web.StreamResponse:
    return await bodies.answer(BatchDone(results=tuple(results)))


def _of_session(session_id: str) -> BatchResult:
    return BatchResult(session_id=session_id, ok=False)


def _of_target(target: _Pruned) -> BatchResult:
    kind, name = target
    if kind is Session:
        return BatchResult(session_id=name, ok=False)
    return BatchResult(fork_id=name, ok=False)


_ANSWERS: Final = {HTTPStatus.OK: (BatchDone,)}

ROUTES: Final = (
    Route(
        method="POST",
        path="/batch/score",
        summary="Score many sessions",
        handler=_score,
        rights=(),
        body=BatchScore,
        answers=_ANSWERS,
    ),
    Route(
        method="POST",
        path="/batch/prune",
        summary="Delete many sessions and forks, and all below them",
        handler=_prune,
        rights=(),
        body=BatchPrune,
        answers=_ANSWERS,
    ),
    Route(
        method="POST",
        path="/batch/exec",
        summary="Run a command in many sessions, or one of its own in each",
        handler=_exec,
        rights=(),
        body=BatchExec,
        answers=_ANSWERS,
    ),
)
