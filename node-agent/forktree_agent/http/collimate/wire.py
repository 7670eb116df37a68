"""Bodies of the Collimate protocol, as its client `collimate-rl` 0.8.0 sends and reads them.

That client treats a null number as a broken answer, so what is not set is left out. Unknown keys are refused,
as everywhere: an option that nobody obeys would be a silently different run.
"""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import AfterValidator, Field, JsonValue, model_validator

from forktree.models.texts import ObjectName
from forktree.wire import Answer, Request
from forktree.wire_trees import TemplateInfo

FORK_AT_ONCE = 32
"""Children of one call. The client reads its cap from the tier in its key, and takes 32 for a key that names
none, as no token of Kubernetes does."""

WIDTH_MAX = 64
"""As many waiting machines a template may have on each node. What asks for more gets this."""

LABEL_LONGEST = 1024


def _no_nul(value: str) -> str:
    if "\0" in value:
        raise ValueError("must not contain a NUL character")
    return value


Text = Annotated[str, AfterValidator(_no_nul)]
Argv = Annotated[tuple[Text, ...], Field(min_length=1, max_length=1024)]
Label = Annotated[str, Field(max_length=LABEL_LONGEST)]
Egress = dict[str, JsonValue]


class File(Request):
    """Written before the command runs, its folders made. It is text: it ends with a newline."""

    path: Annotated[Text, Field(min_length=1, max_length=4096)]
    content: Text


class SandboxExec(Request):
    """What is to be run. Of several, `command` counts before `commands`, and those before `code`."""

    command: Text | None = None
    """Run by `/bin/sh -c`."""
    commands: Annotated[tuple[Argv, ...], Field(max_length=1024)] | None = None
    """Run one after the other, whatever becomes of each; the last one's exit code is that of all."""
    code: Text | None = None
    """A program for `FORKTREE_INTERPRETER`, which a template may set in its `env`; else for `python3`."""
    files: Annotated[tuple[File, ...], Field(max_length=1024)] = ()
    timeout_seconds: float = Field(default=30.0, gt=0, le=3600)
    seed: str | None = None
    """64 hexadecimal digits."""

    @model_validator(mode="after")
    def _something(self) -> Self:
        if self.command is None and self.code is None and self.commands is None and not self.files:
            raise ValueError("give one of `command`, `commands`, `code` and `files`")
        return self


class OneShot(SandboxExec):
    """`POST …/exec` of the daemon: a session for one command."""

    template_id: ObjectName
    egress: Egress | None = None


class OpenSession(Request):
    """`POST …/sessions` of the daemon."""

    template_id: ObjectName
    egress: Egress | None = None


class OpenSandbox(Request):
    """`POST …/sandboxes`."""

    template: ObjectName
    label: Label | None = None
    labels: dict[Label, Label] = Field(default_factory=dict[str, str], max_length=64)
    egress: Egress | None = None
    secret_refs: tuple[str, ...] = ()


class ForkSandbox(Request):
    """`POST …/sandboxes/{id}/fork`."""

    count: int = Field(default=1, ge=1, le=FORK_AT_ONCE)
    labels: tuple[Label, ...] | None = None
    """One for each child."""

    @model_validator(mode="after")
    def _one_each(self) -> Self:
        if self.labels is not None and len(self.labels) != self.count:
            raise ValueError(f"`labels` has {len(self.labels)} entries for {self.count} children")
        return self


class Connect(Request):
    """`POST …/sandboxes/{id}/connect-url`."""

    port: int = Field(ge=1, le=65535)
    ttl_seconds: int = Field(default=600, ge=1)
    protocol: str = "tcp"


class Pool(Request):
    width: int = Field(default=0, ge=0)
    cold_fraction: int = 0
    """Obeyed by nobody here: a waiting machine takes next to no memory, so there is no colder kind."""


class Ready(Request):
    """When a template counts as ready."""

    cmd: Text = ""
    http: str = Field(default="", max_length=2048)
    http_timeout_s: int = Field(default=0, ge=0, le=10_000)
    ports: tuple[int, ...] = ()
    env: dict[str, str] = Field(default_factory=dict[str, str])
    network: bool = False


class MakeTemplate(Request):
    """`POST …/templates`."""

    name: ObjectName
    image: str = Field(max_length=512)
    pool: Pool = Pool()
    ready: Ready | None = None
    expected_width: int = Field(default=0, ge=0)


class ExpectWidth(Request):
    """`POST …/templates/{id}/expect`."""

    width: int = Field(ge=0)


class ExecAnswer(Answer):
    """How it ended. After a time-out `exit_code` is -1, and the last line of `stdout` says so."""

    id: str
    stdout: str
    """Both streams, as they came."""
    stderr: str = ""
    exit_code: int
    fork_time_ms: float = 0.0
    """Of the session's own fork where this call made it; else nothing was forked."""
    exec_time_ms: float
    total_time_ms: float
    seed: str
    """`FORKTREE_SEED` of the command: the one given, or a random one."""
    seed_ack: str = "off"
    """The kernel's random numbers do not follow it, so nobody can have verified that they do."""
    timed_out: bool
    truncated: bool
    """There was more than 16 MiB."""


class DaemonHealth(Answer):
    status: str
    sessions: int
    running: int
    max_inflight: int
    queued: int = 0
    """Nobody waits in a line here: what cannot be begun is refused."""
    templates: tuple[str, ...]
    version: str


class DaemonSession(Answer):
    session_id: str
    template_id: str
    age_secs: float
    idle_secs: float
    exec_count: int
    """Since the agent was started."""


class DaemonOpened(Answer):
    session_id: str
    template_id: str
    fork_time_ms: float
    create_time_ms: float


class DaemonDeleted(Answer):
    deleted: bool
    session_id: str


class Sandbox(Answer):
    id: str
    template: str
    state: str
    label: str | None = None
    labels: dict[str, str] | None = None
    parent: str | None = None
    """The sandbox that it was forked from."""
    node: str | None = None
    age_secs: float
    message: str | None = None
    """Why it stands so."""


class Sandboxes(Answer):
    sandboxes: tuple[Sandbox, ...]


class SandboxOpened(Answer):
    id: str
    template: str
    fork_time_ms: float
    create_time_ms: float


class SandboxState(Answer):
    id: str
    state: str


class Child(Answer):
    id: str
    label: str | None = None


class Forked(Answer):
    parent: str
    children: tuple[Child, ...]
    fork_time_ms: float | None = None
    total_time_ms: float


class Deleted(Answer):
    deleted: bool
    id: str


class Image(Answer):
    """A template of the namespace, as something to start from."""

    id: str
    name: str
    image: str
    visibility: str = "private"
    """The namespace's own: it may be sized and deleted."""
    tier: str = ""
    """There are none."""
    description: str


class Images(Answer):
    images: tuple[Image, ...]


class TemplateMade(Answer):
    id: str
    name: str
    image: str
    phase: str
    bake_mode: str = "built"


class OnNode(Answer):
    node: str
    warm: int
    frozen: int = 0


class TemplateStatus(TemplateInfo):
    """What the native API answers at the same path, and what clients of this protocol read."""

    id: str
    name: str
    phase: str
    declared: int
    """Waiting machines on each node."""
    warm: int
    """As many as the nodes that have baked it are told to keep."""
    frozen: int = 0
    per_node: tuple[OnNode, ...]
    converge_state: str
    bake_mode: str = "built"
    error: str = ""
    build_fails: int
    """Nodes where it failed."""


class Expected(Answer):
    id: str
    expected_width: int


class Released(Answer):
    id: str
    released: bool
    released_at: str
