"""What is said over the guest channel: one JSON object a line, in both directions, bytes as base64.

The guest's side is `node-agent/native/init/src/frames.rs`; `tests/golden/guest_frames.jsonl` has one of each.
A newline cannot occur inside JSON, so a line that a fork cut is a line of its own: no valid frame, so
dropped.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated

import msgspec

PROTOCOL = 3
MAX_REQUEST_BYTES = 24 << 20
"""The guest drops longer lines: 16 MiB of input in base64, and room for arguments."""
MAX_REPORT_BYTES = 1 << 20
"""The guest's frames stay far below; a longer one was not made by our init."""

_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
_ExitCode = Annotated[int, msgspec.Meta(ge=-1, le=255)]
_Name = Annotated[str, msgspec.Meta(max_length=128)]
"""Ours are ids of commands, UUIDs and the like: a guest that makes up longer ones has them dropped."""
_Names = Annotated[tuple[_Name, ...], msgspec.Meta(max_length=1024)]
"""Our init knows of at most 192 commands."""


class Frame(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """One line."""


class Start(Frame, frozen=True, tag="start"):
    """Once, before any identity. Without `argv` only the environment and the folder are set."""

    argv: tuple[str, ...]
    env: dict[str, str]
    cwd: str
    """Where it is run, and every command to come that does not say where."""


class TakeIdentity(Frame, frozen=True, tag="identity"):
    """Become another machine."""

    generation: str
    hostname: str
    unix_ns: int
    entropy: bytes
    env: dict[str, str]


class TerminalSize(msgspec.Struct, frozen=True, kw_only=True):
    """In characters."""

    rows: int
    cols: int


class Flow(msgspec.Struct, frozen=True, kw_only=True):
    """How a command's output is told to us, who do not take everything at once."""

    granted: int
    """How much output of both streams may be told, counted from the command's begin; from the machine's birth
    and from each `ListExecs` it is counted anew."""
    waits: bool
    """What is beyond: the command waits with it, or else it is read and not told."""
    tail_bytes: int
    """How much of each stream's end the guest keeps, to be asked for again."""


class Exec(Frame, frozen=True, tag="exec"):
    """Run a command. With `flow` its output is not limited, and it is told of by `Begun`."""

    id: str
    generation: str
    argv: tuple[str, ...]
    env: dict[str, str]
    cwd: str | None
    stdin: bytes | None
    timeout_ms: int
    output_limit: int
    stdin_open: bool = False
    terminal: TerminalSize | None = None
    flow: Flow | None = None


class Cancel(Frame, frozen=True, tag="cancel"):
    """Kill a command's process group."""

    id: str


class Stdin(Frame, frozen=True, tag="stdin"):
    """Further input of a command whose input is open. `end`: there is none after it."""

    id: str
    data: bytes
    end: bool


class Resize(Frame, frozen=True, tag="resize"):
    """A terminal's size has changed."""

    id: str
    rows: int
    cols: int


class Grant(Frame, frozen=True, tag="grant"):
    """How much of a command's output may be told from now on, as in `Flow`."""

    id: str
    granted: int
    waits: bool


class Replay(Frame, frozen=True, tag="replay"):
    """Have the guest tell what it keeps of a command's output, and then `Replayed`."""

    id: str


class Ping(Frame, frozen=True, tag="ping"):
    """Answered at once."""

    nonce: str


class ListExecs(Frame, frozen=True, tag="list"):
    """Answered by `Running`."""


class SetClock(Frame, frozen=True, tag="clock"):
    """For a machine that stood still."""

    unix_ns: int


class Freeze(Frame, frozen=True, tag="freeze"):
    """Stop all programs, for a stop of the machine; answered by `Frozen`."""

    nonce: str


class Thaw(Frame, frozen=True, tag="thaw"):
    """Let them go on, also if they were not stopped; answered by `Thawed`."""

    nonce: str


class HttpGet(Frame, frozen=True, tag="http_get"):
    """Ask a server of the workload over loopback; answered by `HttpStatus`."""

    nonce: str
    port: int
    path: str
    timeout_ms: int


class Stream(StrEnum):
    STDOUT = "stdout"
    STDERR = "stderr"


class RefusalCode(StrEnum):
    """Why a command was not started."""

    INVALID = "invalid"
    WRONG_GENERATION = "wrong_generation"
    TOO_MANY = "too_many"
    BAD_CWD = "bad_cwd"
    NOT_FOUND = "not_found"
    NOT_EXECUTABLE = "not_executable"
    INTERNAL = "internal"


class Booted(Frame, frozen=True, tag="booted"):
    """The guest's first frame."""

    protocol: int


class Started(Frame, frozen=True, tag="started"):
    """`pid` is None if there was no command to start."""

    pid: int | None


class StartFailed(Frame, frozen=True, tag="start_failed"):
    message: str


class Identified(Frame, frozen=True, tag="identified"):
    generation: _Name


class IdentityFailed(Frame, frozen=True, tag="identity_failed"):
    generation: _Name
    message: str


class Begun(Frame, frozen=True, tag="begun"):
    """A command with a `flow` has become its program."""

    generation: _Name
    id: _Name


class Output(Frame, frozen=True, tag="output"):
    """`offset`: what its stream had before it."""

    generation: _Name
    id: _Name
    stream: Stream
    offset: _Count
    data: bytes


class StdinTaken(Frame, frozen=True, tag="stdin_taken"):
    """So much of what `Stdin` brought is with the command. Not `open`: it takes no more."""

    generation: _Name
    id: _Name
    bytes: _Count
    open: bool


class Replayed(Frame, frozen=True, tag="replayed"):
    """What was kept of a command is told. `stdin_bytes`: what `Stdin` frames have brought it so far."""

    generation: _Name
    id: _Name
    stdin_bytes: _Count
    stdin_open: bool


class Exited(Frame, frozen=True, tag="exit"):
    """`code` is 128 + signal where one killed the process, -1 after a time-out."""

    generation: _Name
    id: _Name
    code: _ExitCode
    timed_out: bool
    signal: int | None
    truncated: bool


class ExecFailed(Frame, frozen=True, tag="exec_failed"):
    generation: _Name
    id: _Name
    code: RefusalCode
    message: str


class WorkloadExit(Frame, frozen=True, tag="workload_exit"):
    """The template's own command ended."""

    generation: _Name
    code: _ExitCode
    signal: int | None


class Pong(Frame, frozen=True, tag="pong"):
    nonce: _Name


class Running(Frame, frozen=True, tag="running"):
    """The commands that run: said before each `Identified`, and when asked. When asked also those of this
    machine that have ended and are remembered; the `Exited` of each follows."""

    generation: _Name
    ids: _Names


class HttpStatus(Frame, frozen=True, tag="http_status"):
    """Exactly one of `status` and `message`: the server's status code, or why there is none."""

    nonce: _Name
    status: int | None
    message: str | None


class Frozen(Frame, frozen=True, tag="frozen"):
    """With a `message`, which says why, programs were not stopped and run on."""

    nonce: _Name
    message: str | None


class Thawed(Frame, frozen=True, tag="thawed"):
    """With a `message`, which says why, they may not go on."""

    nonce: _Name
    message: str | None


Request = (
    Start
    | TakeIdentity
    | Exec
    | Cancel
    | Stdin
    | Resize
    | Grant
    | Replay
    | Ping
    | ListExecs
    | SetClock
    | Freeze
    | Thaw
    | HttpGet
)
Report = (
    Booted
    | Started
    | StartFailed
    | Identified
    | IdentityFailed
    | Begun
    | Output
    | StdinTaken
    | Replayed
    | Exited
    | ExecFailed
    | WorkloadExit
    | Pong
    | Running
    | HttpStatus
    | Frozen
    | Thawed
)

_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[Report] = msgspec.json.Decoder(Report)


def encode(request: Request) -> bytes:
    """The frame with its newline. Raises `UnicodeEncodeError` for text that is not Unicode."""
    return _encoder.encode(request) + b"\n"


def decode(line: bytes) -> Report | None:
    """None for anything that is no report: the rest of a line that a fork cut, or a lie."""
    try:
        return _decoder.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


class LineTooLong(Exception):
    """More than `MAX_REPORT_BYTES` without a newline."""


class LineCutter:
    """Cuts a stream of bytes into lines and holds at most one that is not complete."""

    def __init__(self) -> None:
        self._partial = bytearray()

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """The lines that `chunk` completes, without newlines; empty ones too, which also take time to read.

        Raises `LineTooLong`.
        """
        *complete, rest = chunk.split(b"\n")
        for piece in complete:
            line = bytes(self._partial + piece)
            self._partial.clear()
            if len(line) > MAX_REPORT_BYTES:
                raise LineTooLong
            yield line
        self._partial += rest
        if len(self._partial) > MAX_REPORT_BYTES:
            raise LineTooLong
