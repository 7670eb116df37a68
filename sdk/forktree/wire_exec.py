"""Bodies around commands that outlive their callers: what a stream's lines say, input, the end by force.

A stream is `application/x-ndjson`: one of the events here a line. Clients ignore types that they do not know.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from forktree.wire import EXEC_ID, Answer, Base64, ErrorBody, Query, Request


class ExecDetached(Answer):
    """Answer to `POST …/exec` with `detach`: the command runs."""

    id: str
    detached: Literal[True] = True


class ExecInput(Request):
    """`POST …/execs/{id}/stdin`: more input, and whether that is all."""

    data_base64: Base64 = ""
    close: bool = False


class ExecInputTaken(Answer):
    """The session has all of it, and its command reads it as it likes."""

    id: str
    bytes: int
    closed: bool


class ExecKilled(Answer):
    """Answer to `DELETE …/execs/{id}`, once the command has ended."""

    id: str
    killed: bool
    """False: it had ended before."""


class StreamStarted(Answer):
    """The first line: the command runs."""

    type: Literal["started"] = "started"
    id: str


class StreamOutput(Answer):
    """What the command wrote. Of each stream the lines follow one another; an `offset` beyond the end of the
    line before says that what lies between is not kept any more."""

    type: Literal["output"] = "output"
    stream: Literal["stdout", "stderr"]
    offset: int
    """Bytes of its stream before these. Where to go on: the last one, and the length of its data."""
    data_base64: str


class StreamAlive(Answer):
    """Nothing was written for some seconds. Sent at least every ten: silence means a dead connection."""

    type: Literal["alive"] = "alive"


class StreamEnd(Answer):
    """The last line: how the command ended, as in `ExecFinished`. All of its output came before."""

    type: Literal["end"] = "end"
    id: str
    exit_code: int
    timed_out: bool
    truncated: bool
    """Output went beyond a limit of the command itself and was dropped. Gaps are told by offsets."""
    exec_time_ms: float
    """Since this request began."""


class StreamError(ErrorBody):
    """The last line where there is no end to tell, as of a session that is gone. Codes are as in other
    errors."""

    type: Literal["error"] = "error"


class TerminalQuery(Query):
    """`GET …/sessions/{id}/terminal`, a WebSocket: binary messages are bytes, both ways. Text messages are
    JSON: up `TerminalResize`, down `StreamStarted`, and `StreamEnd` or `StreamError` as the last."""

    argv: tuple[str, ...] = Field(default=(), max_length=1024)
    """Given to execve as it is, once for each word. Unset: a shell."""
    rows: int = Field(default=24, ge=1, le=1000)
    """Height of the terminal, in characters."""
    cols: int = Field(default=80, ge=1, le=1000)
    """Width of the terminal, in characters."""
    term: str = Field(default="xterm-256color", pattern="^[A-Za-z0-9][A-Za-z0-9._+-]{0,63}$")
    """Kind of terminal, for programs: `TERM` in their environment."""
    id: str | None = Field(default=None, pattern=rf"^{EXEC_ID}$")
    """Given, the command outlives this connection, and whoever comes with the same id while it runs is
    attached to it. Else it ends with this connection."""


class TerminalResize(Request):
    """The caller's window has another size now."""

    type: Literal["resize"]
    rows: int = Field(ge=1, le=1000)
    cols: int = Field(ge=1, le=1000)
