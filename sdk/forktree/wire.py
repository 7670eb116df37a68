"""The HTTP API's bodies: what a client may send and what it gets back.

Keys are snake_case as existing clients of this protocol expect, and an unset value is left out, never null:
those clients treat a null number as a broken answer. Requests refuse unknown keys, so that a misspelt option
is an error and not a silently different run; answers may grow keys, so clients ignore what they do not know.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from forktree.models.names import FORK_NAME_MAX, REPLICAS_MAX
from forktree.models.reasons import Level, Mode, Reason, SessionPhase
from forktree.models.texts import ObjectName, is_dns_label

MAX_BODY_BYTES = 1 << 20
"""A longer request body is refused unread."""


def _dns_label(longest: int) -> Callable[[str], str]:
    def check(value: str) -> str:
        if not is_dns_label(value, longest):
            raise ValueError(
                "must be a DNS label: lower-case letters, digits and inner dashes, "
                f"at most {longest} characters"
            )
        return value

    return check


SessionName = Annotated[str, AfterValidator(_dns_label(63))]

ForkName = Annotated[str, AfterValidator(_dns_label(FORK_NAME_MAX))]
"""Shorter than other names: the names of a fork's children are built from it."""


EXEC_ID = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}"
"""What names a command: it stands in paths."""


class Request(BaseModel):
    """A body sent by a client: unknown keys and wrong types are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)


class Answer(BaseModel):
    """A body sent by the server."""

    model_config = ConfigDict(frozen=True, extra="ignore", use_attribute_docstrings=True)


class Query(BaseModel):
    """What stands after the `?` of a path: unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class CreateSession(Request):
    """`POST …/sessions`."""

    template_id: ObjectName
    """Name of a SessionTemplate in the same namespace."""
    name: SessionName | None = None
    """Makes the call repeatable: asked again with the same template it answers for the same session."""


IDEMPOTENCY_KEY = "Idempotency-Key"
"""Header of `POST …/sessions` and `POST …/sessions/{id}/fork` that makes the call repeatable, like a `name`
that is the caller's alone: as long as what it made exists, the same request has the same answer, and another
one is a conflict. Only one of the two may be given."""


class ForkSession(Request):
    """`POST …/sessions/{id}/fork`. With `?record=wait` it is answered once it is `recorded`."""

    replicas: int = Field(default=1, ge=0, le=REPLICAS_MAX)
    """0 records the instant alone."""
    name: ForkName | None = None
    """Makes the call repeatable: asked again with the same source and replicas it answers for that fork."""


class ForkQuery(Query):
    record: Literal["wait"] | None = None
    """`wait`: answer only when all objects are there."""


class Exec(Request):
    """`POST …/sessions/{id}/exec`. Exactly one of `command` and `argv`."""

    command: str | None = Field(default=None, min_length=1)
    """Run by `/bin/sh -c` in the session."""
    argv: tuple[str, ...] | None = Field(default=None, min_length=1, max_length=1024)
    """Given to execve as it is: no shell, no expansion."""
    env: dict[str, str] = Field(default_factory=dict[str, str], max_length=1024)
    """Added to the session's own environment."""
    id: str | None = Field(default=None, pattern=rf"^{EXEC_ID}$")
    """Names the command: by it, it can be asked for in a child that was forked while it ran. Unset: any."""
    cwd: str | None = Field(default=None, min_length=1, max_length=4096)
    stdin: str = ""
    """Sent as UTF-8."""
    timeout_seconds: float = Field(default=30.0, gt=0, le=3600)
    """Seconds in the guest until the command is killed; the answer then says `timed_out`."""

    @model_validator(mode="after")
    def _one_command(self) -> Self:
        if (self.command is None) == (self.argv is None):
            raise ValueError("give exactly one of `command` and `argv`")
        return self

    @field_validator("command", "cwd")
    @classmethod
    def _no_nul(cls, value: str | None) -> str | None:
        if value is not None and "\0" in value:
            raise ValueError("must not contain a NUL character")
        return value

    @field_validator("argv")
    @classmethod
    def _no_nul_in_arguments(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if value is not None and any("\0" in argument for argument in value):
            raise ValueError("must not contain a NUL character")
        return value

    @field_validator("env")
    @classmethod
    def _environment_can_hold_it(cls, value: dict[str, str]) -> dict[str, str]:
        for key, text in value.items():
            if not key or "=" in key or "\0" in key + text:
                raise ValueError(
                    "names must be non-empty and without `=`, and nothing may contain a NUL character"
                )
        return value

    def arguments(self) -> tuple[str, ...]:
        """What is executed."""
        return self.argv if self.argv is not None else ("/bin/sh", "-c", self.command or "")


class SessionInfo(Answer):
    """One session. `session_id` is the name of its object."""

    session_id: str
    template_id: str
    """The template's name; its uid where a template of that uid exists no longer."""
    phase: SessionPhase
    ready: bool
    age_secs: float
    parent_session_id: str | None = None
    """Unset for a root, and for a child whose parent is gone."""
    depth: int | None = None
    node: str | None = None
    mode: Mode | None = None
    level: Level | None = None
    reason: Reason | None = None
    message: str | None = None


class SessionCreated(Answer):
    """A session that runs."""

    session_id: str
    template_id: str
    create_time_ms: float
    """Request seen to answer written."""
    fork_time_ms: float | None = None
    """Released from the baseline to running."""
    node: str | None = None
    mode: Mode | None = None
    level: Level | None = None


class SessionDeleted(Answer):
    deleted: bool
    session_id: str


class ForkedChild(Answer):
    session_id: str
    index: int
    mode: Mode | None = None
    level: Level | None = None


class SessionForked(Answer):
    """A fork whose children all run. The clocks are different ones, never to be compared."""

    session_id: str | None = None
    """The first child; unset where none was asked for."""
    parent_session_id: str
    template_id: str
    fork_id: str
    """Name of the Fork object."""
    recorded: bool
    """Every child has answered its identity, and the Fork and each child have their objects. Else that is on
    its way: what is sent to a child waits for what it needs, and is told `session_gone` if it never comes."""
    total_time_ms: float
    """This request seen to its answer written, by the node that forked. The Fork's own `totalMs` is another:
    it knows nothing of who may, nor of a wait for the children's objects."""
    fork_time_ms: float | None = None
    """Parent stopped to every child running."""
    pause_time_ms: float | None = None
    """Parent stopped to parent running."""
    ready_time_ms: float | None = None
    """Parent stopped to every child's identity answered; unset where that is still to come."""
    children: tuple[ForkedChild, ...] = ()
    """All of them, in order of their index; each runs and takes commands."""


class ExecFinished(Answer):
    """How a command ended. A time-out is a result: `exit_code` -1 and `timed_out`."""

    id: str
    """The id given; where none was, one that also names the request in the agent's log."""
    stdout: str
    """Decoded as UTF-8; bytes that are not are replaced."""
    stderr: str
    exit_code: int
    """128 + signal where a signal ended it."""
    timed_out: bool
    truncated: bool
    """Output went beyond the limit and its rest was dropped."""
    exec_time_ms: float


WAIT_SECONDS_MAX = 110.0
"""Existing clients give up on any answer after 120 s."""


class AttachQuery(Query):
    wait_seconds: float = Field(default=0.0, ge=0, le=WAIT_SECONDS_MAX)
    """How long to wait for the end of a command; by custom not at all."""


class ExecList(Answer):
    """`GET …/sessions/{id}/execs`: the commands that run there, and those that ran there at its fork."""

    ids: tuple[str, ...]


class SessionMemory(Answer):
    """`GET …/sessions/{id}/memory`: what memory a session takes now, as its node's kernel counts it."""

    session_id: str
    unique_bytes: int
    """Goes when the session does: what it changed since its birth, its QEMU's own memory, and what was copied
    of it for forks of which nothing is left."""
    shared_bytes: int
    """What it has in common with others, however many: its template, ancestors, its forks' instants and
    children."""


class CommandLog(Answer):
    """One command of a branch, and the last 512 KiB of each of its streams."""

    ended: bool
    """Until it has, nothing of its output is shown."""
    exit_code: int | None = None
    """-1 after a time-out. Unset while it runs, where it could not be started, and where its end was not
    seen."""
    timed_out: bool
    truncated: bool
    """The beginning of its output is not kept."""
    reason: Reason | None = None
    """Why its child has no score because of it, in one word."""
    message: str | None = None
    """The same in a sentence."""
    stdout: str
    stderr: str


class ChildLog(Answer):
    """`GET …/forks/{name}/children/{index}/log`: what came of one child's commands, also when it is gone."""

    fork_id: str
    index: int
    branch: str | None = None
    """Name of its branch."""
    exec: CommandLog | None = None
    """Its branch's command; unset while that was not begun."""
    score: CommandLog | None = None
    """The scorer."""
    printed_score: float | None = None
    """What the scorer found. What counts may be another number, that its user has set."""


class Health(Answer):
    status: str
    version: str


class ErrorBody(Answer):
    """One refusal or failure. Both pairs say the same: two families of clients each read one of them."""

    error: str
    error_code: str
    code: str
    message: str
