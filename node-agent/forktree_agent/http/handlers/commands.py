"""Commands in sessions: run, listed, asked for again; and what those of branches printed."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Final

from aiohttp import web

from forktree.wire import AttachQuery, ChildLog, Exec, ExecFinished, ExecList
from forktree.wire_exec import (
    ExecDetached,
    ExecInput,
    ExecInputTaken,
    ExecKilled,
    StreamAlive,
    StreamEnd,
    StreamError,
    StreamOutput,
    StreamStarted,
)
from forktree_agent.control.branch_logs import KEPT_BYTES
from forktree_agent.http import bodies, branch_log, detaching, executing, locating
from forktree_agent.http.requests import HELD, REQUEST_ID
from forktree_agent.http.table import Asked, Lines, Right, Route

EVENTS: Final = Lines((StreamStarted, StreamOutput, StreamAlive, StreamEnd, StreamError))

LOG_SECONDS = 15.0
"""For another agent to read a log: milliseconds, and as many to send its 2 MiB."""


async def _exec(asked: Asked) -> web.StreamResponse:
    wanted = await asked.body(Exec)
    session, start_by = await asked.placed()
    request_id = asked.request[REQUEST_ID]
    if wanted.stream:
        if node := locating.other_node(asked.facade, session):
            return await asked.relay(node, "exec", begin_by=start_by + executing.MARGIN_SECONDS)
        return await detaching.stream(
            asked.facade,
            session,
            wanted,
            asked.request,
            start_by=start_by,
            request_id=request_id,
            still=asked.still_may,
        )
    if wanted.detach:
        if node := locating.other_node(asked.facade, session):
            return await asked.session_elsewhere(node, "exec", end_by=start_by + executing.MARGIN_SECONDS)
        begun = await detaching.detach(
            asked.facade, session, wanted, start_by=start_by, request_id=request_id
        )
        return await bodies.answer(begun, HTTPStatus.ACCEPTED)
    if node := locating.other_node(asked.facade, session):
        end_by = start_by + wanted.timeout_seconds + executing.MARGIN_SECONDS
        return await asked.session_elsewhere(node, "exec", end_by=end_by)
    finished = await executing.execute(
        asked.facade,
        session,
        wanted,
        start_by=start_by,
        request_id=request_id,
        room=asked.request[HELD].room(asked.session_id),
    )
    return await finished.answer(asked.request)


async def _execs(asked: Asked) -> web.StreamResponse:
    session, start_by = await asked.placed()
    if node := locating.other_node(asked.facade, session):
        return await asked.session_elsewhere(node, "execs", end_by=start_by)
    session = await executing.running(asked.facade, session, start_by)
    return await bodies.answer(detaching.listed(await asked.facade.execs(session, deadline=start_by)))


async def _attach(asked: Asked) -> web.StreamResponse:
    exec_id, query = asked.named("exec_id"), asked.query(AttachQuery)
    wait_seconds, stdout, stderr = query.wait_seconds, query.stdout_offset, query.stderr_offset
    session, start_by = await asked.placed()
    if query.stream:
        if node := locating.other_node(asked.facade, session):
            what = f"execs/{exec_id}?stream=1&stdout_offset={stdout}&stderr_offset={stderr}"
            return await asked.relay(node, what, begin_by=start_by)
        return await detaching.stream_again(
            asked.facade,
            session,
            exec_id,
            asked.request,
            stdout_offset=stdout,
            stderr_offset=stderr,
            start_by=start_by,
            still=asked.still_may,
        )
    if node := locating.other_node(asked.facade, session):
        what = f"execs/{exec_id}?wait_seconds={wait_seconds}"
        return await asked.session_elsewhere(node, what, end_by=start_by + wait_seconds)
    finished = await executing.attach(
        asked.facade,
        session,
        exec_id,
        start_by=start_by,
        wait_seconds=wait_seconds,
        held=asked.request[HELD],
    )
    return await finished.answer(asked.request)


async def _write(asked: Asked) -> web.StreamResponse:
    exec_id, wanted = asked.named("exec_id"), await asked.body(ExecInput)
    session, start_by = await asked.placed()
    if node := locating.other_node(asked.facade, session):
        end_by = start_by + detaching.INPUT_SECONDS
        return await asked.session_elsewhere(node, f"execs/{exec_id}/stdin", end_by=end_by)
    return await bodies.answer(
        await detaching.write(asked.facade, session, exec_id, wanted, start_by=start_by)
    )


async def _kill(asked: Asked) -> web.StreamResponse:
    exec_id = asked.named("exec_id")
    session, start_by = await asked.placed()
    if node := locating.other_node(asked.facade, session):
        end_by = start_by + detaching.KILL_SECONDS
        return await asked.session_elsewhere(node, f"execs/{exec_id}", end_by=end_by)
    return await bodies.answer(await detaching.kill(asked.facade, session, exec_id, start_by=start_by))


async def _child_log(asked: Asked) -> web.StreamResponse:
    fork_id, index = asked.named("fork_id"), int(asked.named("index"))
    fork = await branch_log.find(asked.client, asked.namespace, fork_id)
    if fork.status.node not in {None, asked.facade.node_name}:
        end_by = asyncio.get_running_loop().time() + LOG_SECONDS
        path = f"forks/{fork_id}/children/{index}/log"
        return await asked.hand_on(str(fork.status.node), path, f"fork {fork_id}", end_by=end_by)
    body = await branch_log.read(asked.facade.branches, fork, index)
    return await bodies.answer(body, about_bytes=2 * KEPT_BYTES)


ROUTES: Final = (
    Route(
        method="POST",
        path="/sessions/{session_id}/exec",
        summary="Run a command: to its end, or with `detach` or `stream` beyond this call",
        handler=_exec,
        rights=(Right("create", "sessions/exec"),),
        body=Exec,
        answers={HTTPStatus.OK: (ExecFinished, EVENTS), HTTPStatus.ACCEPTED: (ExecDetached,)},
    ),
    Route(
        method="GET",
        path="/sessions/{session_id}/execs",
        summary="The commands that can be asked for by their id",
        handler=_execs,
        rights=(Right("get", "sessions/exec"),),
        answers={HTTPStatus.OK: (ExecList,)},
    ),
    Route(
        method="GET",
        path="/sessions/{session_id}/execs/{exec_id}",
        summary="How a command ended that another call began, or that ran at the session's fork",
        handler=_attach,
        rights=(Right("get", "sessions/exec"),),
        query=AttachQuery,
        answers={HTTPStatus.OK: (ExecFinished, EVENTS)},
    ),
    Route(
        method="POST",
        path="/sessions/{session_id}/execs/{exec_id}/stdin",
        summary="Give a command input that was begun with `stdin_open`",
        handler=_write,
        rights=(Right("create", "sessions/exec"),),
        body=ExecInput,
        answers={HTTPStatus.OK: (ExecInputTaken,)},
    ),
    Route(
        method="DELETE",
        path="/sessions/{session_id}/execs/{exec_id}",
        summary="Kill a command, whoever began it",
        handler=_kill,
        rights=(Right("create", "sessions/exec"),),
        answers={HTTPStatus.OK: (ExecKilled,)},
    ),
    Route(
        method="GET",
        path="/forks/{fork_id}/children/{index}/log",
        summary="What one child's commands printed, also when it is gone",
        handler=_child_log,
        rights=(Right("get", "forks/log"),),
        answers={HTTPStatus.OK: (ChildLog,)},
    ),
)
