"""The HTTP API's bodies about objects: lists, forks, trees, numbers, checkpoints, templates and nodes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, FiniteFloat, WithJsonSchema

from forktree.models.names import REPLICAS_MAX
from forktree.models.reasons import BakePhase, ForkPhase, Reason, SessionPhase
from forktree.models.texts import BranchName, ObjectName
from forktree.wire import Answer, Query, Request, SessionInfo

LIST_MAX = 1000

CONTINUE = "Forktree-Continue"
"""Header of a list that was cut by `limit`: what to send as `continue` to have the rest."""


class SessionsQuery(Query):
    template_id: ObjectName | None = None
    """Only those of this template."""
    root: ObjectName | None = None
    """Only the tree below the root session of this name, itself included."""
    label: tuple[Annotated[str, WithJsonSchema({"type": "string", "pattern": "^[^=]+="})], ...] = ()
    """`name=value`: only those with this label. May be given several times; then all must hold."""
    limit: int | None = Field(default=None, ge=1, le=LIST_MAX)
    """So many at most, in order of their names; the header `Forktree-Continue` says how to go on."""
    continue_: ObjectName | None = Field(default=None, alias="continue")
    """What the header of the part before said."""


class ForksQuery(Query):
    session_id: ObjectName | None = None
    """Only those of this session."""


class TreeQuery(Query):
    below: bool = False
    """From the session down, and not the whole tree that it is in."""
    memory: bool = False
    """Say what memory each takes that runs on the node which answers."""
    watch: bool = False
    """Say what there is, and then every change, line by line."""


class ForkChildInfo(Answer):
    session_id: str
    index: int
    branch: str | None = None
    phase: SessionPhase
    argv: tuple[str, ...] | None = None
    """Its branch's command."""
    exit_code: int | None = None
    """Of its branch's command; -1 after a time-out."""
    score: float | None = None
    seed: str | None = None
    reason: Reason | None = None
    """Why it failed, has no score, or was pruned."""


class ForkInfo(Answer):
    """One fork: an instant of a session, and the children started from it."""

    fork_id: str
    parent_session_id: str | None = None
    """Whose instant it is. Unset where that cannot be told any more."""
    source_fork_id: str | None = None
    """The earlier fork from whose instant it started, where it did."""
    phase: ForkPhase
    ready: bool
    """Every child has answered that it has its own identity."""
    complete: bool
    """Commands are done, scored and pruned."""
    reason: Reason | None = None
    message: str | None = None
    node: str | None = None
    age_secs: float
    replicas: int
    """How many children were asked for."""
    recorded: int
    """How many of them have their objects."""
    best_session_id: str | None = None
    best_score: float | None = None
    checkpoint: str | None = None
    """What its session's user calls it, where it is a checkpoint."""
    point_available: bool
    """More children can be started from it."""
    point_bytes: int | None = None
    """What holding the instant costs."""
    pause_time_ms: float | None = None
    """Parent stopped to parent running."""
    fork_time_ms: float | None = None
    """Parent stopped to every child running."""
    ready_time_ms: float | None = None
    """Parent stopped to every child's identity answered."""
    children: tuple[ForkChildInfo, ...] = ()


class ForkDeleted(Answer):
    deleted: bool
    fork_id: str


class TreeSession(SessionInfo):
    """A session, and what memory it takes where that was asked for and it runs on the node which answers."""

    unique_bytes: int | None = None
    """Goes when the session does."""
    shared_bytes: int | None = None
    """What it has in common with others."""


class TreeTotals(Answer):
    sessions: int
    live: int
    """Of them, those with a machine."""
    depth: int
    """The deepest generation there is."""
    point_bytes: int
    """What all instants cost that are held."""


class TreeInfo(Answer):
    """A tree, or a part of one: each session before those below it."""

    root_session_id: str
    """The session at the top of what is shown."""
    sessions: tuple[TreeSession, ...]
    forks: tuple[ForkInfo, ...]
    totals: TreeTotals


class SessionSeen(Answer):
    """A session came or changed."""

    type: Literal["session"] = "session"
    session: SessionInfo


class ForkSeen(Answer):
    """A fork came or changed."""

    type: Literal["fork"] = "fork"
    fork: ForkInfo


class Gone(Answer):
    """An object was deleted."""

    type: Literal["gone"] = "gone"
    kind: Literal["session", "fork"]
    id: str


class Synced(Answer):
    """All that was there has been told; what follows are changes."""

    type: Literal["synced"] = "synced"


class Alive(Answer):
    """Nothing else happened for a while."""

    type: Literal["alive"] = "alive"


class Broken(Answer):
    """The last line of what ends early, and why."""

    type: Literal["error"] = "error"
    error: str
    code: str


class SetScore(Request):
    """`POST …/sessions/{id}/score`: what is left out stays as it is."""

    score: FiniteFloat | None = None
    """Your number, higher is better; it counts in place of a scorer's. null takes it back."""
    rewards: dict[str, FiniteFloat] = Field(default_factory=dict[str, float], max_length=64)
    """Further numbers by name. Others that are there stay."""


class Nothing(Request):
    """An empty object."""


class Checkpoint(Request):
    """`POST …/sessions/{id}/checkpoints`."""

    name: BranchName
    """What you call it. A session has one of a name: asked again it answers for that."""
    keep_last: int | None = Field(default=None, ge=1, le=REPLICAS_MAX)
    """Delete the oldest beyond so many, but for those that something was forked from."""


class CheckpointInfo(Answer):
    checkpoint: str
    fork_id: str
    """The Fork that holds the instant."""
    created_secs_ago: float
    point_bytes: int | None = None
    """What holding it costs."""
    available: bool
    """It can be rolled back to."""


class CheckpointDeleted(Answer):
    deleted: bool
    checkpoint: str
    fork_id: str


class Rollback(Request):
    """`POST …/sessions/{id}/rollback`: children that start from a checkpoint of the session."""

    checkpoint: BranchName
    replicas: int = Field(default=1, ge=1, le=REPLICAS_MAX)
    release: bool = False
    """End the session's own machine afterwards. Its place in the tree and its checkpoints stay."""


class Heartbeat(Request):
    """`POST …/sessions/{id}/heartbeat`: the tree lives as long as this is said again in time."""

    ttl_seconds: int = Field(ge=5, le=86_400)
    """Seconds without another heartbeat after which the tree is deleted."""


class HeartbeatHeard(Answer):
    root_session_id: str
    """The session at the top of the tree that is kept alive."""
    renew_within_secs: float


class TemplateNode(Answer):
    node: str
    phase: BakePhase
    reason: Reason | None = None
    message: str | None = None
    baseline_id: str | None = None
    boot_ms: float | None = None


class TemplateInfo(Answer):
    template_id: str
    image: str
    ready_nodes: int
    """On how many nodes a session of it starts in milliseconds."""
    nodes: tuple[TemplateNode, ...]
    standby: int
    """Waiting machines that each node keeps for it."""


class CanaryInfo(Answer):
    passed: bool
    reason: str
    message: str
    boot_ms: float | None = None
    fork_ms: float | None = None


class NodeInfo(Answer):
    """What the node can do whose agent answers, and why not more."""

    node: str
    ready: bool
    engine: str | None = None
    accelerator: str | None = None
    canary: CanaryInfo | None = None
    capacity_bytes: int | None = None
    """Memory that sessions may take together."""
    reserved_bytes: int | None = None
    """Memory promised to those that run, each counted at its worst."""
    agent_version: str | None = None
    endpoint: str | None = None
