"""Running a command in a session of this node, and asking for the end of one that another call began."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, replace

from aiohttp import web

from forktree.models import Session, SessionPhase, SessionState
from forktree.wire import Exec, ExecFinished
from forktree_agent.control.facade import Facade
from forktree_agent.control.objects import ObjectGone
from forktree_agent.engine.contract import Command, DeadlineExceeded, ExecResult, Room
from forktree_agent.http import outputs
from forktree_agent.http.errors import Code, Refusal
from forktree_agent.http.holding import Held

START_SECONDS = 30.0
"""How long a command waits for a session that is still on its way."""

MARGIN_SECONDS = 30.0
"""Beyond the command's own time: a loaded node is slow to start it, and to carry 16 MiB of output out."""


OUTPUT_BYTES = 16 << 20
"""Of a command, both streams together, in one answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """How a command ended."""

    id: str
    result: ExecResult
    exec_time_ms: float

    @property
    def output_bytes(self) -> int:
        return len(self.result.stdout) + len(self.result.stderr)

    def encoded(self) -> Iterator[bytes]:
        """As `ExecFinished`."""
        body = ExecFinished(
            id=self.id,
            stdout="",
            stderr="",
            exit_code=self.result.exit_code,
            timed_out=self.result.timed_out,
            truncated=self.result.truncated,
            exec_time_ms=self.exec_time_ms,
        )
        return outputs.encoded(body, {"stdout": (self.result.stdout,), "stderr": (self.result.stderr,)})

    async def answer(self, request: web.Request) -> web.StreamResponse:
        return await outputs.answer(request, self.encoded(), about_bytes=self.output_bytes)


async def execute(
    facade: Facade,
    session: Session,
    request: Exec,
    *,
    start_by: float,
    request_id: str,
    room: Room,
    limit_bytes: int = OUTPUT_BYTES,
) -> Finished:
    """How the command ended. If the caller goes away first, it is killed in the guest.

    `session` is this node's, perhaps still on its way; it must run by `start_by` (loop time). Its output is
    kept up to the limit, as far as there is room. Raises `Refusal`, and what the engine raises.
    """
    session = await running(facade, session, start_by)
    command = command_of(facade, session, request, request_id)
    command = replace(command, room=room, output_limit_bytes=limit_bytes)
    began = asyncio.get_running_loop().time()
    result = await facade.exec(session, command, deadline=began + command.timeout_seconds + MARGIN_SECONDS)
    return _finished(command.id or "", result, began)


def command_of(facade: Facade, session: Session, request: Exec, request_id: str) -> Command:
    """What is to be run. Raises `Refusal` for a time-out that the session's template does not allow."""
    return Command(
        argv=request.arguments(),
        id=request.id or request_id,
        env=request.env,
        cwd=request.cwd,
        stdin=request.input(),
        stdin_open=request.stdin_open,
        timeout_seconds=allowed_seconds(request, facade.exec_seconds(session)),
    )


async def attach(
    facade: Facade, session: Session, exec_id: str, *, start_by: float, wait_seconds: float, held: Held
) -> Finished:
    """How a command ended that another call began, or that ran at the session's fork.

    `session` as for `execute`; `held` counts the output too. Raises `Refusal`, `not_ready` while the command
    runs after `wait_seconds`, and what the engine raises.
    """
    loop = asyncio.get_running_loop()
    session = await running(facade, session, start_by)
    began = loop.time()
    try:
        result = await facade.attach(session, exec_id, deadline=began + wait_seconds)
    except DeadlineExceeded as err:
        sentence = f"command {exec_id} of session {session.metadata.name} still runs"
        raise Refusal(Code.NOT_READY, sentence) from err
    held.hold(len(result.stdout) + len(result.stderr), f"the output of command {exec_id}")
    return _finished(exec_id, result, began)


def _finished(exec_id: str, result: ExecResult, began: float) -> Finished:
    took_ms = round((asyncio.get_running_loop().time() - began) * 1000, 3)
    return Finished(id=exec_id, result=result, exec_time_ms=took_ms)


def allowed_seconds(request: Exec, limit: int | None) -> float:
    """The command's time-out where a template allows at most `limit`. Raises `Refusal` for a longer one."""
    asked = request.timeout_seconds
    if limit is None or asked <= limit:
        return asked
    if "timeout_seconds" not in request.model_fields_set:
        return float(limit)  # Nobody asked for more.
    sentence = (
        f"`timeout_seconds` is {asked:g}, but the session's template allows commands {limit} seconds"
        " (treeLimits.execSeconds)"
    )
    raise Refusal(Code.BAD_REQUEST, sentence)


async def running(facade: Facade, session: Session, deadline: float) -> Session:
    """The session, once it runs on this node and has its own identity.

    Raises `Refusal`, `not_ready` for one that is paused, and what `Facade.heard` raises.
    """
    session_id = session.metadata.name
    if not _settled(session) and not _newborn(facade, session):
        try:
            session = await facade.session_when(session.metadata.uid, _settled, deadline=deadline)
        except ObjectGone as err:
            raise Refusal(Code.SESSION_GONE, f"session {session_id} was deleted as it started") from err
        except TimeoutError as err:
            sentence = f"session {session_id} does not run yet after {START_SECONDS:g} seconds of waiting"
            raise Refusal(Code.NOT_READY, sentence) from err
    status = session.status
    if session.metadata.deleting:
        raise Refusal(Code.SESSION_GONE, f"session {session_id} is being deleted")
    if status.phase.terminal:
        raise Refusal(Code.SESSION_GONE, status.message or f"session {session_id} is {status.phase}")
    if _is_paused(session):
        sentence = f"session {session_id} is paused: set its spec.state to Running to use it"
        raise Refusal(Code.NOT_READY, sentence)
    await facade.heard(session, deadline=deadline)
    return session


def _newborn(facade: Facade, session: Session) -> bool:
    """A child whose machine runs, and whose object only does not say so yet."""
    to_run = session.spec.state is SessionState.RUNNING and session.spec.fork_ref is not None
    return to_run and facade.machine(session) is not None


def _settled(session: Session) -> bool:
    phase = session.status.phase
    is_over = session.metadata.deleting or phase.terminal
    return is_over or phase is SessionPhase.RUNNING or _is_paused(session)


def _is_paused(session: Session) -> bool:
    """It stands still and is to. One that is just asked to go on is worth waiting for."""
    return session.status.phase is SessionPhase.PAUSED and session.spec.state is not SessionState.RUNNING
