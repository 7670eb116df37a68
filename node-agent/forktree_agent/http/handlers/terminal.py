"""A command on a terminal of its own, over a WebSocket."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager, suppress
from http import HTTPStatus
from typing import Final
from urllib.parse import urlencode

import aiohttp
from aiohttp import web
from pydantic import ValidationError

from forktree.errors import ForktreeError
from forktree.models import Session
from forktree.wire import Answer
from forktree.wire_exec import StreamEnd, StreamStarted, TerminalQuery, TerminalResize
from forktree_agent.engine.contract import (
    Command,
    ExecChunk,
    ExecEnd,
    ExecReader,
    TerminalSize,
)
from forktree_agent.http import bodies, executing, locating, sockets, streaming
from forktree_agent.http.allowing import while_allowed
from forktree_agent.http.errors import Code, Refusal
from forktree_agent.http.requests import REQUEST_ID
from forktree_agent.http.table import Asked, Right, Route

LONGEST_SECONDS: Final = 24 * 3600.0
"""A terminal that nobody ever leaves ends after so long, where its template says nothing shorter."""

INPUT_SECONDS: Final = 60.0
"""A command that reads nothing of what is typed is waited for so long."""

SHELL: Final = ("/bin/sh", "-c", "command -v bash >/dev/null && exec bash -l; exec sh -l")


async def _terminal(asked: Asked) -> web.StreamResponse:
    query = asked.query(TerminalQuery)
    if any("\0" in each for each in query.argv):
        raise Refusal(Code.BAD_REQUEST, "`argv` must not contain a NUL character")
    socket = web.WebSocketResponse(
        heartbeat=sockets.HEARTBEAT_SECONDS, max_msg_size=sockets.MAX_MESSAGE_BYTES, compress=False
    )
    if not socket.can_prepare(asked.request).ok:
        raise Refusal(Code.BAD_REQUEST, "a terminal is a WebSocket: ask with `Upgrade: websocket`")
    await socket.prepare(asked.request)
    try:
        await _serve(asked, query, socket)
    except (Refusal, ForktreeError) as err:
        with suppress(ConnectionError):
            await _tell(socket, streaming.error_of(err))
    except ConnectionError:
        pass  # Nobody is there to be told.
    await socket.close()
    return socket


async def _serve(asked: Asked, query: TerminalQuery, socket: web.WebSocketResponse) -> None:
    session, start_by = await asked.placed()
    if node := locating.other_node(asked.facade, session):
        wanted = query.model_dump(exclude_none=True)
        what = f"terminal?{urlencode(wanted, doseq=True)}"
        return await asked.relay_socket(node, what, socket, open_by=start_by)
    session = await executing.running(asked.facade, session, start_by)
    async with await _opened(asked, session, query, start_by) as reader:
        try:
            await _tell(socket, StreamStarted(id=reader.id))
            async with while_allowed(asked.still_may):
                await sockets.first_of(_down(reader, socket), _up(asked, session, reader.id, socket))
        finally:
            if query.id is None:
                await _hang_up(asked, session, reader.id)


async def _opened(
    asked: Asked, session: Session, query: TerminalQuery, start_by: float
) -> AbstractAsyncContextManager[ExecReader]:
    """The running command of this id, or else a new one."""
    facade, size = asked.facade, TerminalSize(rows=query.rows, cols=query.cols)
    begin_by = start_by + executing.MARGIN_SECONDS
    if query.id is not None and await _runs(asked, session, query.id, begin_by):
        await facade.resize(session, query.id, size)
        return facade.reading(session, query.id, stdout_offset=0, stderr_offset=0, deadline=begin_by)
    command = Command(
        argv=query.argv or SHELL,
        id=query.id or asked.request[REQUEST_ID],
        env={"TERM": query.term},
        terminal=size,
        timeout_seconds=facade.exec_seconds(session) or LONGEST_SECONDS,
    )
    return facade.streaming(session, command, deadline=begin_by)


async def _runs(asked: Asked, session: Session, exec_id: str, deadline: float) -> bool:
    there = await asked.facade.execs(session, deadline=deadline)
    return any(each.id == exec_id and not each.ended for each in there)


async def _down(reader: ExecReader, socket: web.WebSocketResponse) -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()
    while True:
        match await reader.next(deadline=loop.time() + LONGEST_SECONDS):
            case ExecChunk(data=data):
                await sockets.send(socket, data)
            case ExecEnd() as end:
                return await _tell(
                    socket,
                    StreamEnd(
                        id=reader.id,
                        exit_code=end.exit_code,
                        timed_out=end.timed_out,
                        truncated=end.truncated,
                        exec_time_ms=round((loop.time() - began) * 1000, 3),
                    ),
                )
            case None:
                return None


async def _up(asked: Asked, session: Session, exec_id: str, socket: web.WebSocketResponse) -> None:
    async for message in socket:
        match message.type:
            case aiohttp.WSMsgType.BINARY:
                deadline = asyncio.get_running_loop().time() + INPUT_SECONDS
                await asked.facade.write(session, exec_id, message.data, end=False, deadline=deadline)
            case aiohttp.WSMsgType.TEXT:
                size = _resize(message.data)
                await asked.facade.resize(session, exec_id, TerminalSize(rows=size.rows, cols=size.cols))
            case _:
                return


def _resize(text: str) -> TerminalResize:
    try:
        return TerminalResize.model_validate_json(text)
    except ValidationError as err:
        refusal = bodies.refusal_of(err)
    raise refusal


async def _hang_up(asked: Asked, session: Session, exec_id: str) -> None:
    """Whoever opened it is gone, and nobody else knows of it."""
    deadline = asyncio.get_running_loop().time() + INPUT_SECONDS
    with suppress(ForktreeError):
        await asked.facade.kill(session, exec_id, deadline=deadline)


async def _tell(socket: web.WebSocketResponse, body: Answer) -> None:
    await sockets.send(socket, bodies.encode(body).decode())


ROUTES: Final = (
    Route(
        method="GET",
        path="/sessions/{session_id}/terminal",
        summary="A command on a terminal, as a WebSocket",
        handler=_terminal,
        rights=(Right("create", "sessions/exec"),),
        query=TerminalQuery,
        answers={HTTPStatus.SWITCHING_PROTOCOLS: ()},
    ),
)
