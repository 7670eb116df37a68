"""Commands that are tied to nobody: begun, read, given input and killed, by whoever knows their id."""

from __future__ import annotations

import asyncio
import base64
import math
from contextlib import AbstractAsyncContextManager

from aiohttp import web

from forktree.models import Session
from forktree.wire import Exec, ExecInfo, ExecList
from forktree.wire_exec import (
    ExecDetached,
    ExecInput,
    ExecInputTaken,
    ExecKilled,
    StreamAlive,
    StreamEnd,
    StreamOutput,
    StreamStarted,
)
from forktree_agent.control.facade import Facade
from forktree_agent.engine.contract import ExecChunk, ExecEnd, ExecReader, ExecState
from forktree_agent.http import lines
from forktree_agent.http.executing import MARGIN_SECONDS, command_of, running
from forktree_agent.http.lines import Say, Still, Words
from forktree_agent.http.streaming import error_of

INPUT_SECONDS = 60.0
"""For a command to take its input: one that reads nothing holds up whoever writes to it."""

KILL_SECONDS = 30.0
"""From the signal to the end: milliseconds, unless the machine is very busy."""


async def detach(
    facade: Facade, session: Session, request: Exec, *, start_by: float, request_id: str
) -> ExecDetached:
    """Start a command. `session` is this node's, perhaps still on its way; it must run by `start_by`.

    Raises `Refusal`, and what the engine raises.
    """
    session = await running(facade, session, start_by)
    command = command_of(facade, session, request, request_id)
    return ExecDetached(id=await facade.begin(session, command, deadline=start_by + MARGIN_SECONDS))


async def stream(
    facade: Facade,
    session: Session,
    request: Exec,
    asked: web.Request,
    *,
    start_by: float,
    request_id: str,
    still: Still,
) -> web.StreamResponse:
    """Start a command, and answer with what it writes. Raises like `detach`, before that answer begins."""
    session = await running(facade, session, start_by)
    command = command_of(facade, session, request, request_id)
    return await _told(asked, facade.streaming(session, command, deadline=start_by + MARGIN_SECONDS), still)


async def stream_again(
    facade: Facade,
    session: Session,
    exec_id: str,
    asked: web.Request,
    *,
    stdout_offset: int,
    stderr_offset: int,
    start_by: float,
    still: Still,
) -> web.StreamResponse:
    """Answer with what a command of another call writes. Raises like `detach`, before that answer begins."""
    session = await running(facade, session, start_by)
    found = facade.reading(
        session, exec_id, stdout_offset=stdout_offset, stderr_offset=stderr_offset, deadline=start_by
    )
    return await _told(asked, found, still)


_WORDS = Words(StreamAlive(), error_of)


async def _told(
    asked: web.Request, reading: AbstractAsyncContextManager[ExecReader], still: Still
) -> web.StreamResponse:
    began = asyncio.get_running_loop().time()

    async def tell(say: Say) -> None:
        await say(StreamStarted(id=reader.id))
        while True:
            match await reader.next(deadline=math.inf):
                case ExecChunk(stream=which, offset=offset, data=data):
                    data_base64 = base64.b64encode(data).decode()
                    await say(StreamOutput(stream=which.value, offset=offset, data_base64=data_base64))
                case ExecEnd() as end:
                    took_ms = (asyncio.get_running_loop().time() - began) * 1000
                    return await say(_end(reader.id, end, took_ms))
                case None:
                    pass  # There is no deadline.

    async with reading as reader:
        return await lines.answer(asked, tell, _WORDS, still=still)


def _end(exec_id: str, end: ExecEnd, took_ms: float) -> StreamEnd:
    return StreamEnd(
        id=exec_id,
        exit_code=end.exit_code,
        timed_out=end.timed_out,
        truncated=end.truncated,
        exec_time_ms=round(took_ms, 3),
    )


async def write(
    facade: Facade, session: Session, exec_id: str, request: ExecInput, *, start_by: float
) -> ExecInputTaken:
    """Give a command input. Raises `Refusal`, and what the engine raises."""
    session = await running(facade, session, start_by)
    data = base64.b64decode(request.data_base64)
    end_by = asyncio.get_running_loop().time() + INPUT_SECONDS
    await facade.write(session, exec_id, data, end=request.close, deadline=end_by)
    return ExecInputTaken(id=exec_id, bytes=len(data), closed=request.close)


async def kill(facade: Facade, session: Session, exec_id: str, *, start_by: float) -> ExecKilled:
    """End a command. Raises `Refusal`, and what the engine raises."""
    session = await running(facade, session, start_by)
    end_by = asyncio.get_running_loop().time() + KILL_SECONDS
    return ExecKilled(id=exec_id, killed=await facade.kill(session, exec_id, deadline=end_by))


def listed(states: tuple[ExecState, ...]) -> ExecList:
    return ExecList(ids=tuple(each.id for each in states), execs=tuple(_info(each) for each in states))


def _info(state: ExecState) -> ExecInfo:
    end, age = state.end, state.age_seconds
    return ExecInfo(
        id=state.id,
        state="ended" if state.ended else "running",
        exit_code=None if end is None else end.exit_code,
        timed_out=None if end is None else end.timed_out,
        started_secs_ago=None if age is None else round(age, 3),
        stdout_bytes=state.stdout_bytes,
        stderr_bytes=state.stderr_bytes,
    )
