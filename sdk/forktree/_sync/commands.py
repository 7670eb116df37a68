# Generated from sdk/forktree/_async/commands.py by `make generate`; change that file.
"""Commands in a session: run to their end, or followed while they run, over whatever connections it takes."""

from __future__ import annotations

import base64
import json
import secrets
import time
from collections.abc import Generator, Mapping
from contextlib import closing
from typing import Any

from forktree._flavours import wait
from forktree._results import Command, Ended, ExecEvent, ExecResult, Output, exec_body, part
from forktree._retrying import Retries
from forktree._sync.handle import Handle
from forktree._sync.lines import lines_of
from forktree._sync.transport import Call, Transport
from forktree.errors import (
    AnswerLost,
    BadRequest,
    ClientError,
    NotFound,
    NotReady,
    UnexpectedAnswer,
    Unreachable,
    refused,
)
from forktree.wire import ExecFinished

MARGIN_SECONDS = 75.0
"""Beyond a command's own time: a session may still be on its way, for 30 s, and a loaded node is slow to
start the command and to carry its output out."""
WAIT_SECONDS = 60.0
"""Of one question after the end of a command, of as many as it takes."""
SILENCE_SECONDS = 30.0
"""An agent says something every 10: a connection that says nothing for longer is dead."""
PATIENCE_SECONDS = 120.0
"""How long a command is looked for whose agent does not answer, as one that is replaced does not."""
STDIN_SECONDS = 75.0
"""For a command to take its input, which an agent gives it 60 for."""
_ATTEMPTS = 5
"""To begin a command whose answers are lost, and that nobody knows then."""


class Commands(Handle):
    """What a session can be told to do."""

    def exec(
        self,
        command: Command,
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        stdin: str | bytes | None = None,
        timeout: float = 30.0,
        check: bool = False,
    ) -> ExecResult:
        """How the command ended. A string is run by a shell, a list as it is.

        `timeout`: seconds in the guest until it is killed, which is a result and no error. `check`: raise
        `CommandFailed` unless it ended with 0. It is killed too when this call is given up, or when its
        connection breaks: then `AnswerLost` is raised, since it may have run, and it is never sent twice. For
        what takes long there is `start`.
        """
        body = exec_body(command, env=env, cwd=cwd, stdin=stdin, timeout=timeout)
        seconds = timeout + MARGIN_SECONDS
        path = f"{self._path}/exec"
        call = Call(
            method="POST",
            path=path,
            body=body,
            seconds=seconds,
            attempt_seconds=seconds,
            silence_seconds=seconds,
        )
        result = ExecResult.of(self._transport.ask(call, ExecFinished))
        return result.check() if check else result

    def start(
        self,
        command: Command,
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        stdin: str | bytes | None = None,
        stdin_open: bool = False,
        timeout: float = 3600.0,
        exec_id: str | None = None,
    ) -> Exec:
        """A command that runs by itself, whatever becomes of this program, until its own `timeout`.

        `stdin_open`: more input follows by `AsyncExec.write`. `exec_id` names it; by itself it has a name
        that nobody else has, so it is found again when the answer is lost, and begun once.
        """
        command_id = exec_id or new_id()
        body = exec_body(
            command,
            env=env,
            cwd=cwd,
            stdin=stdin,
            timeout=timeout,
            exec_id=command_id,
            detach=True,
            stdin_open=stdin_open or None,
        )
        call = Call(method="POST", path=f"{self._path}/exec", body=body, seconds=MARGIN_SECONDS)
        begun = Exec(self._transport, self._path, command_id, timeout)
        begun.begin(call)
        return begun

    def stream(
        self,
        command: Command,
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        stdin: str | bytes | None = None,
        timeout: float = 3600.0,
    ) -> Generator[ExecEvent]:
        """What the command writes, as it writes it, and at last how it ended.

        It is not tied to its connection: one that breaks is replaced, and what was written meanwhile follows.
        Leaving the loop early leaves the command alone. Raises `ClientError` once the command cannot be found
        again: after two minutes without an agent, or because its session is gone.
        """
        command_id = new_id()
        body = exec_body(
            command, env=env, cwd=cwd, stdin=stdin, timeout=timeout, exec_id=command_id, stream=True
        )
        call = Call(method="POST", path=f"{self._path}/exec", body=body, seconds=timeout + MARGIN_SECONDS)
        running = Exec(self._transport, self._path, command_id, timeout)
        with closing(running.follow(first=call)) as events:
            for event in events:
                yield event

    def attach(self, exec_id: str) -> Exec:
        """A command of that id, whoever began it: also one that ran when this session was forked."""
        return Exec(self._transport, self._path, exec_id, PATIENCE_SECONDS)

    def execs(self) -> list[str]:
        """Ids of the commands that can be attached to."""
        raw = self._transport.raw(Call(method="GET", path=f"{self._path}/execs"))
        try:
            return [str(each) for each in json.loads(raw)["ids"]]
        except (ValueError, KeyError, TypeError) as err:
            raise UnexpectedAnswer(f"the list of commands of {self.id} cannot be read: {err}") from err


class Exec:
    """A command that runs, or has ended lately."""

    def __init__(self, transport: Transport, session_path: str, exec_id: str, timeout: float) -> None:
        self._transport = transport
        self._begin_path = f"{session_path}/exec"
        self._path = f"{session_path}/execs/{part(exec_id)}"
        self._timeout = timeout
        self.id = exec_id

    def __repr__(self) -> str:
        return f"<command {self.id}>"

    def begin(self, call: Call) -> None:
        """Send `call`, which starts it detached; where the answer is lost, see first whether it has begun."""
        for attempt in range(_ATTEMPTS):
            try:
                self._transport.raw(call)
            except (AnswerLost, BadRequest) as err:
                # One whose answer was lost may have begun as it was asked for again, and is refused then.
                if isinstance(err, BadRequest) and attempt == 0:
                    raise
                if not self._is_known():
                    if attempt == _ATTEMPTS - 1:
                        raise
                    continue
            return

    def wait(self, timeout: float | None = None) -> ExecResult:
        """How it ended, with what is kept of its output. `timeout`: seconds from now; None: as long as it may
        run.

        Raises `NotReady` when it still runs then, `NotFound` when nobody knows it (any more).
        """
        deadline = time.monotonic() + (self._timeout + MARGIN_SECONDS if timeout is None else timeout)
        while True:
            left = max(0.0, deadline - time.monotonic())
            query = {"wait_seconds": f"{min(WAIT_SECONDS, left):.3f}"}
            call = Call(
                method="GET",
                path=self._path,
                query=query,
                seconds=left + MARGIN_SECONDS,
                attempt_seconds=min(WAIT_SECONDS, left) + SILENCE_SECONDS,
            )
            try:
                return ExecResult.of(self._transport.ask(call, ExecFinished))
            except NotReady:
                if time.monotonic() >= deadline:
                    raise

    def stream(self, *, stdout_offset: int = 0, stderr_offset: int = 0) -> Generator[ExecEvent]:
        """As `AsyncCommands.stream`, from these bytes of its output on."""
        with closing(self.follow(stdout_offset=stdout_offset, stderr_offset=stderr_offset)) as events:
            for event in events:
                yield event

    def write(self, data: str | bytes, *, close: bool = False) -> None:
        """Give it input; `close`: the last. Only for one that was started with `stdin_open`.

        Never sent twice: after `AnswerLost` it may have been given.
        """
        raw = data.encode() if isinstance(data, str) else data
        body = {"data_base64": base64.b64encode(raw).decode(), "close": close}
        self._transport.raw(Call(method="POST", path=f"{self._path}/stdin", body=body, seconds=STDIN_SECONDS))

    def kill(self) -> None:
        """End it by force, and return when it has ended. Nothing happens to one that has ended before."""
        self._transport.raw(Call(method="DELETE", path=self._path, seconds=MARGIN_SECONDS))

    def follow(
        self, *, first: Call | None = None, stdout_offset: int = 0, stderr_offset: int = 0
    ) -> Generator[ExecEvent]:
        """The events of a stream, over as many connections as it takes. `first` begins the command."""
        offsets = {"stdout": stdout_offset, "stderr": stderr_offset}
        retries = Retries()
        end_by = time.monotonic() + self._timeout + MARGIN_SECONDS
        heard, attempt = time.monotonic(), 0
        while True:
            try:
                with closing(self._connected(first or self._from(offsets), offsets)) as events:
                    for event in events:
                        heard, attempt, first = time.monotonic(), 0, None
                        if event is not None:
                            yield event
                        if isinstance(event, Ended):
                            return
            except (AnswerLost, Unreachable, BadRequest) as err:
                # A command whose answer was lost may have begun as it was asked for again.
                if isinstance(err, BadRequest) and (first is None or attempt == 0):
                    raise
                if time.monotonic() > min(heard + PATIENCE_SECONDS, end_by):
                    raise
                if first is not None and self._is_known():
                    first = None
            except ClientError as err:
                if retries.wait_seconds(attempt, err, repeatable=first is None) is None:
                    raise
            attempt += 1
            wait(retries.pause_seconds(attempt))

    def _connected(self, call: Call, offsets: dict[str, int]) -> Generator[ExecEvent | None]:
        """The events that come over one connection, None for each line that is none."""
        with closing(lines_of(self._transport, call, silence_seconds=SILENCE_SECONDS)) as lines:
            for line in lines:
                event = _event(line, offsets)
                yield event
                if isinstance(event, Ended):
                    return
        raise AnswerLost(f"the stream of command {self.id} ended before the command did")

    def _from(self, offsets: Mapping[str, int]) -> Call:
        query = {
            "stream": "1",
            "stdout_offset": str(offsets["stdout"]),
            "stderr_offset": str(offsets["stderr"]),
        }
        return Call(method="GET", path=self._path, query=query, seconds=self._timeout + MARGIN_SECONDS)

    def _is_known(self) -> bool:
        """Whether the agent has this command: it has begun, then."""
        try:
            self._transport.raw(Call(method="GET", path=self._path))
        except NotReady:
            pass  # It still runs.
        except NotFound as err:
            if err.code == NotFound.code:
                return False
            raise
        return True


def new_id() -> str:
    return f"sdk-{secrets.token_hex(8)}"


def _event(line: Mapping[str, Any], offsets: dict[str, int]) -> ExecEvent | None:
    """What a line of a stream says; None for one that says nothing to a reader. Raises `ClientError`."""
    try:
        kind = line["type"]
        if kind == "output":
            name, offset = line["stream"], int(line["offset"])
            data = base64.b64decode(line["data_base64"], validate=True)
            before = offsets[name]
            offsets[name] = offset + len(data)
            return Output(stream=name, data=data, offset=offset, missing=max(0, offset - before))
        if kind == "end":
            return Ended(
                exit_code=int(line["exit_code"]),
                timed_out=bool(line["timed_out"]),
                truncated=bool(line.get("truncated")),
            )
        failure = refused(str(line["error"]), code=str(line["code"]), status=0) if kind == "error" else None
    except (KeyError, ValueError, TypeError) as err:
        raise UnexpectedAnswer(f"a line of a command's stream cannot be read: {err}") from err
    if failure is not None:
        raise failure
    return None
