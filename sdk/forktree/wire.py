"""The HTTP API's bodies: what a client may send and what it gets back.

Keys are snake_case as existing clients of this protocol expect, and an unset value is left out, never null:
those clients treat a null number as a broken answer. Requests refuse unknown keys, so that a misspelt option
is an error and not a silently different run; answers may grow keys, so clients ignore what they do not know.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from forktree.models.fork import SeedMode
from forktree.models.names import FORK_NAME_MAX, OUR_LABELS, REPLICAS_MAX
from forktree.models.reasons import Level, Mode, Reason, SessionPhase
from forktree.models.texts import (
    DNS_LABEL_PATTERN,
    Argument,
    BranchName,
    EnvName,
    EnvValue,
    LabelValue,
    ObjectName,
    Seed,
    is_dns_label,
)

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


def _base64(value: str) -> str:
    try:
        base64.b64decode(value, validate=True)
    except ValueError:
        raise ValueError("must be base64") from None
    return value


Base64 = Annotated[str, AfterValidator(_base64)]


def _schema(longest: int) -> WithJsonSchema:
    return WithJsonSchema({"type": "string", "pattern": DNS_LABEL_PATTERN, "maxLength": longest})


SessionName = Annotated[str, AfterValidator(_dns_label(63)), _schema(63)]

ForkName = Annotated[str, AfterValidator(_dns_label(FORK_NAME_MAX)), _schema(FORK_NAME_MAX)]
"""Shorter than other names: the names of a fork's children are built from it."""


LABELS_MAX = 16


def _of_users(labels: dict[str, str]) -> dict[str, str]:
    if any(OUR_LABELS in name for name in labels):
        raise ValueError(f"must not have names of {OUR_LABELS.rstrip('/')}, which are not yours to give")
    return labels


LabelName = Annotated[
    str,
    StringConstraints(
        pattern=r"^([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$"
    ),
]
"""Like `team` or `example.org/team`."""
Labels = Annotated[dict[LabelName, LabelValue], Field(max_length=LABELS_MAX), AfterValidator(_of_users)]


def _without_nul(env: dict[str, str]) -> dict[str, str]:
    if any("\0" in text for text in env.values()):
        raise ValueError("must not contain a NUL character")
    return env


Env = Annotated[dict[EnvName, EnvValue], Field(max_length=32), AfterValidator(_without_nul)]
"""Variables by their names, in clear text; whoever wants a Secret in it creates the object by `kubectl`."""


EXEC_ID = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}"
"""What names a command: it stands in paths."""


class Request(BaseModel):
    """A body sent by a client: unknown keys and wrong types are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)


class Answer(BaseModel):
    """A body sent by the server."""

    model_config = ConfigDict(frozen=True, extra="ignore", use_attribute_docstrings=True)


class Query(BaseModel):
    """What stands after the `?` of a path: what is not known is not read, nor passed on."""

    model_config = ConfigDict(frozen=True, extra="ignore", use_attribute_docstrings=True)


class CreateSession(Request):
    """`POST …/sessions`."""

    template_id: ObjectName
    """Name of a SessionTemplate in the same namespace."""
    name: SessionName | None = None
    """Makes the call repeatable: asked again for the same it answers for the same session."""
    labels: Labels = Field(default_factory=dict[str, str])
    """Labels of the Session."""
    seed: Seed | None = None
    """What its programs are to seed their random generators from: `FORKTREE_SEED` in its environment."""
    env: Env = Field(default_factory=dict[str, str])
    """What it is told beside its template's environment, and all below it are."""


IDEMPOTENCY_KEY = "Idempotency-Key"
"""Header of `POST …/sessions` and `POST …/sessions/{id}/fork` that makes the call repeatable, like a `name`
that is the caller's alone: as long as what it made exists, the same request has the same answer, and another
one is a conflict. Only one of the two may be given."""


class BranchCommand(Request):
    """A command that a child runs by itself, once. Exactly one of `command` and `argv`."""

    command: Argument | None = Field(default=None, min_length=1)
    """Run by `/bin/sh -c` in the child."""
    argv: tuple[Argument, ...] | None = Field(default=None, min_length=1, max_length=256)
    """Given to execve as it is: no shell, no expansion."""
    timeout_seconds: int = Field(default=60, ge=1, le=3600)
    """Guest seconds until it is killed; its exit code is then -1."""

    @model_validator(mode="after")
    def _one_command(self) -> Self:
        if (self.command is None) == (self.argv is None):
            raise ValueError("give exactly one of `command` and `argv`")
        if "\0" in "".join(self.arguments()):
            raise ValueError("must not contain a NUL character")
        return self

    def arguments(self) -> tuple[str, ...]:
        """What is executed."""
        return self.argv if self.argv is not None else ("/bin/sh", "-c", self.command or "")


class ForkBranch(Request):
    """What one child is told and does."""

    name: BranchName | None = None
    """What you call it: `FORKTREE_BRANCH` in its environment."""
    seed: Seed | None = None
    """Its seed, whatever `seed_mode` says."""
    env: Env = Field(default_factory=dict[str, str])
    """What it is told beside its parent's environment."""
    labels: Labels = Field(default_factory=dict[str, str])
    """Labels of its Session, beside those of all children."""
    exec: BranchCommand | None = None
    """Run in it once, as soon as the whole fork is ready. Takes the right to run commands."""


class ForkSession(Request):
    """`POST …/sessions/{id}/fork` and `POST …/forks/{id}/fork`, answered when every child runs.

    With nothing but `replicas`, `name` and `labels` the children come first and their objects follow.
    """

    replicas: int = Field(default=1, ge=0, le=REPLICAS_MAX)
    """0 records the instant alone. With `branches` their number, and may be left out."""
    name: ForkName | None = None
    """Makes the call repeatable: asked again for the same it answers for that fork."""
    labels: Labels = Field(default_factory=dict[str, str])
    """Labels of every child's Session."""
    branches: tuple[ForkBranch, ...] = Field(default=(), max_length=REPLICAS_MAX)
    """What each child is told and does, in order of their index. Empty, or one for each."""
    seed: Seed | None = None
    """What `seed_mode` starts from. Unset: the parent's own seed."""
    seed_mode: SeedMode | None = None
    """`Fresh`: each child has a random seed; `Common`: all have `seed`; `Derived`: each another one that
    follows from `seed` and its index. Unset: `Derived` where `seed` is given, else `Fresh`."""
    score: BranchCommand | None = None
    """Run in each child after its branch's command; the number on its last line is the child's score. Takes
    the right to run commands."""
    keep_top: int | None = Field(default=None, ge=1, le=REPLICAS_MAX)
    """Once all commands are done so many are kept, the best scores first, and the others deleted."""
    keep_point: bool = False
    """Hold the instant until the Fork is deleted, and not only while children of it are left."""
    timeout_seconds: int | None = Field(default=None, ge=1, le=86_400)
    """Seconds until the fork has failed unless every child is ready. Unset: 300."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.branches and "replicas" in self.model_fields_set and self.replicas != len(self.branches):
            raise ValueError(f"`replicas` is {self.replicas}, but there are {len(self.branches)} `branches`")
        names = [each.name for each in self.branches if each.name is not None]
        if len(names) != len(set(names)):
            raise ValueError("`branches` must have names of their own")
        if any(len(self.labels | each.labels) > LABELS_MAX for each in self.branches):
            raise ValueError(f"a child may have {LABELS_MAX} labels, those of all children among them")
        if self.seed is not None and self.seed_mode is SeedMode.FRESH:
            raise ValueError("`seed` is not used by `seed_mode` Fresh: give one of the two")
        return self

    @property
    def count(self) -> int:
        """How many children."""
        return len(self.branches) or self.replicas

    @property
    def plain(self) -> bool:
        """Nothing is asked for but children, a name and labels."""
        asked = (self.branches, self.seed, self.seed_mode, self.score, self.keep_top, self.timeout_seconds)
        return not any(asked) and not self.keep_point and self.seed is None

    @property
    def runs_commands(self) -> bool:
        return self.score is not None or any(each.exec is not None for each in self.branches)


class ForkQuery(Query):
    record: Literal["wait"] | None = None
    """`wait`: answer only when all objects are there."""
    wait: Literal["complete"] | None = None
    """`complete`: answer only when all commands are done, scored and pruned."""


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
    stdin_base64: Base64 = ""
    """The same for bytes that are no text. Only one of the two."""
    stdin_open: bool = False
    """More input follows by `POST …/execs/{id}/stdin` until that closes it. For `detach` and `stream`."""
    timeout_seconds: float = Field(default=30.0, gt=0, le=3600)
    """Seconds in the guest until the command is killed; the answer then says `timed_out`."""
    detach: bool = False
    """Answer as soon as the command runs, with its id. It is tied to nobody, and runs to its end."""
    stream: bool = False
    """The same, but answer with what it writes as it comes: one JSON object a line, see `wire_exec`."""

    @model_validator(mode="after")
    def _one_of_each(self) -> Self:
        if (self.command is None) == (self.argv is None):
            raise ValueError("give exactly one of `command` and `argv`")
        if self.stdin and self.stdin_base64:
            raise ValueError("give at most one of `stdin` and `stdin_base64`")
        if self.detach and self.stream:
            raise ValueError("give at most one of `detach` and `stream`")
        if self.stdin_open and not (self.detach or self.stream):
            raise ValueError("`stdin_open` needs `detach` or `stream`")
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

    def input(self) -> bytes:
        """What is sent with it."""
        return base64.b64decode(self.stdin_base64) if self.stdin_base64 else self.stdin.encode()

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
    root: str | None = None
    """The session at the top of its tree; a root's is itself."""
    fork_id: str | None = None
    """The Fork that made it. Unset for a root."""
    score: float | None = None
    """The number that counts: its user's, else what the scorer of its fork printed."""
    rewards: dict[str, float] | None = None
    """Its user's further numbers."""
    labels: dict[str, str] | None = None
    """Its user's; those of forktree are left out."""
    fork_ms: float | None = None
    """Parent stopped to every child of the same fork running."""
    endpoints: dict[str, str] | None = None
    """Where each of its template's ports is reached, by name. Only where one session was asked for, and while
    it has a machine."""
    vm_generation_id: str | None = None
    """UUID, new in every machine and seen by its guest."""
    baseline_id: str | None = None
    """The frozen machine that its tree started from: two sessions with one id are comparable."""
    seed: str | None = None
    """What its machine was told as `FORKTREE_SEED`."""


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
    branch: str | None = None
    """Name of its branch."""
    seed: str | None = None
    exit_code: int | None = None
    """Of its branch's command; -1 after a time-out. Set once the fork is complete."""
    score: float | None = None
    reason: Reason | None = None
    """Why it has no score or was pruned, in one word."""


class SessionForked(Answer):
    """A fork whose children all run. The clocks are different ones, never to be compared."""

    session_id: str | None = None
    """The first child; unset where none was asked for."""
    parent_session_id: str | None = None
    """Whose instant it is. Unset where that is gone."""
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
    """All of them, in order of their index; each runs and takes commands, unless it was pruned."""
    best_session_id: str | None = None
    """The child with the best score, once there is one."""
    best_score: float | None = None


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
    stream: bool = False
    """Answer with what the command writes, from the offsets on, as it comes: see `wire_exec`."""
    stdout_offset: int = Field(default=0, ge=0, lt=1 << 62)
    """How many bytes of its standard output the caller has already."""
    stderr_offset: int = Field(default=0, ge=0, lt=1 << 62)
    """The same of its standard error."""


class ExecInfo(Answer):
    """One command, as far as this session's node knows it."""

    id: str
    state: Literal["running", "ended"]
    exit_code: int | None = None
    """As in `ExecFinished`. Unset while it runs, and where it could not be started."""
    timed_out: bool | None = None
    started_secs_ago: float | None = None
    """Unset where it began elsewhere: in the session's parent, or under an agent before this one."""
    stdout_bytes: int
    """What it has written, as far as that is known: of one that began elsewhere, since it was last seen."""
    stderr_bytes: int


class ExecList(Answer):
    """`GET …/sessions/{id}/execs`: commands that run there, those that ran there at its fork, and detached
    and streamed ones that ended in the last ten minutes."""

    ids: tuple[str, ...]
    execs: tuple[ExecInfo, ...] = ()


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
