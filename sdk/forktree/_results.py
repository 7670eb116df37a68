"""What the client hands out that is plain data, and the bodies it sends."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal, Self, TypeAlias, TypedDict
from urllib.parse import quote

from pydantic import BeforeValidator

from forktree.errors import CommandFailed
from forktree.wire import ExecFinished

_SHOWN = 500
"""Characters of a failed command's output, where a sentence repeats them."""


Command: TypeAlias = str | Sequence[str]
"""A line for `/bin/sh -c`, or a list of arguments that no shell sees."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecResult:
    """How a command ended. A time-out is a result: `exit_code` is -1 then, and `timed_out` is set."""

    stdout: str
    stderr: str
    exit_code: int
    """128 + signal where a signal ended it."""
    timed_out: bool
    truncated: bool
    """Output went beyond what is kept, and part of it is missing."""
    id: str
    ms: float
    """From the command's start to its end, by the agent's clock."""

    @property
    def ok(self) -> bool:
        return self.exit_code == 0

    def check(self) -> Self:
        """Itself. Raises `CommandFailed` unless it ended with 0."""
        if self.ok:
            return self
        how = "ran out of time" if self.timed_out else f"ended with {self.exit_code}"
        said = (self.stderr.strip() or self.stdout.strip())[-_SHOWN:]
        raise CommandFailed(f"command {self.id} {how}" + (f": {said}" if said else ""))

    @classmethod
    def of(cls, body: ExecFinished) -> Self:
        return cls(
            stdout=body.stdout,
            stderr=body.stderr,
            exit_code=body.exit_code,
            timed_out=body.timed_out,
            truncated=body.truncated,
            id=body.id,
            ms=body.exec_time_ms,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """A piece of what a command wrote, as it came. A character may be cut in two by its end."""

    stream: Literal["stdout", "stderr"]
    data: bytes
    offset: int
    """Bytes of its stream before it."""
    missing: int = 0
    """Bytes just before it that are not kept any more: its reader was away for too long."""

    @property
    def text(self) -> str:
        return self.data.decode(errors="replace")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a command ended. All that it wrote came before."""

    exit_code: int
    """As in `ExecResult`."""
    timed_out: bool
    truncated: bool


ExecEvent = Output | Ended


def _octal(mode: object) -> object:
    return int(mode, 8) if isinstance(mode, str) else mode


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """What a folder of a session has under one name."""

    name: str
    type: str
    """`file`, `directory`, `symlink`, or what else there is."""
    bytes: int
    mode: Annotated[int, BeforeValidator(_octal)]
    """Permissions."""
    mtime: float
    """Seconds since 1970, by the session's clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """What one child of a fork is told, and does by itself."""

    name: str | None = None
    """`FORKTREE_BRANCH` in its environment."""
    command: Command | None = None
    """Run in it once, as soon as the whole fork is ready."""
    timeout: float = 60.0
    """Seconds in the guest until the command is killed."""
    seed: str | int | None = None
    """`FORKTREE_SEED` in its environment."""
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    labels: Mapping[str, str] = field(default_factory=dict[str, str])

    def body(self) -> dict[str, object]:
        return some(
            {
                "name": self.name,
                "seed": None if self.seed is None else str(self.seed),
                "env": dict(self.env) or None,
                "labels": dict(self.labels) or None,
                "exec": None if self.command is None else branch_command(self.command, self.timeout),
            }
        )


class ForkOptions(TypedDict, total=False):
    """What a fork is to be like beyond the number of its children."""

    name: str
    """Makes the call repeatable: it answers for the fork of that name."""
    branches: Sequence[Branch]
    """One for each child, which then need not be counted."""
    labels: Mapping[str, str]
    """Of every child."""
    seed: str | int
    seed_mode: Literal["Fresh", "Common", "Derived"]
    score: Command
    """Run in each child after its branch's command; the number on its last line is the child's score."""
    score_timeout: float
    keep_top: int
    """Once all commands are done, delete all children but so many, the best."""
    keep_point: bool
    """Hold the instant also when none of its children is left."""
    complete: bool
    """Come back only when all commands are done, scored and pruned."""
    idempotency_key: str | None
    """Of an `AnswerLost`: finds its fork again."""
    timeout: float
    """Seconds until this call ends, whatever becomes of the fork."""


def fork_body(n: int | None, options: ForkOptions) -> dict[str, object]:
    branches, score, seed = options.get("branches"), options.get("score"), options.get("seed")
    labels = options.get("labels")
    return some(
        {
            "replicas": 1 if n is None and branches is None else n,
            "name": options.get("name"),
            "branches": None if branches is None else [each.body() for each in branches],
            "labels": None if labels is None else dict(labels),
            "seed": None if seed is None else str(seed),
            "seed_mode": options.get("seed_mode"),
            "score": None if score is None else branch_command(score, options.get("score_timeout", 60.0)),
            "keep_top": options.get("keep_top"),
            "keep_point": options.get("keep_point"),
        }
    )


def branch_command(command: Command, timeout: float) -> dict[str, object]:
    return exec_body(command, timeout=max(1, round(timeout)))


def exec_body(
    command: Command,
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
    stdin: str | bytes | None = None,
    timeout: float | None = None,
    exec_id: str | None = None,
    **further: object,
) -> dict[str, object]:
    """The body of an exec: what is None is left out."""
    body: dict[str, object | None] = {
        "command": command if isinstance(command, str) else None,
        "argv": None if isinstance(command, str) else list(command),
        "env": dict(env) if env else None,
        "cwd": cwd,
        "stdin": stdin if isinstance(stdin, str) else None,
        "stdin_base64": base64.b64encode(stdin).decode() if isinstance(stdin, bytes) else None,
        "timeout_seconds": timeout,
        "id": exec_id,
        **further,
    }
    return some(body)


def some(body: Mapping[str, object | None]) -> dict[str, object]:
    """`body` without what is None: the server takes a value or nothing."""
    return {key: value for key, value in body.items() if value is not None}


def part(name: str) -> str:
    """A name as one part of a path, whatever it holds."""
    return quote(name, safe="") if name not in {".", ".."} else name.replace(".", "%2E")
