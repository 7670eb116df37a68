"""Fork: an instant of a session, and the children started from it."""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from forktree.models.base import ApiModel, ApiObject, Uid
from forktree.models.conditions import Condition
from forktree.models.names import FORK_NAME_MAX, NAME_RULES, REPLICAS_MAX
from forktree.models.reasons import ForkPhase, Level, Mode, Reason, SessionPhase
from forktree.models.schema import Column, Resource, atomic_list, cel, map_list
from forktree.models.session_template import EnvVar
from forktree.models.texts import Argv, BranchName, LabelValue, ObjectName, ObjectUid, Seed


class SourceRef(ApiModel):
    """The object to fork, in the same namespace."""

    name: ObjectName
    """Its name."""
    uid: ObjectUid | None = None
    """Its uid. If given, another object of the same name is refused with reason `SourceGone`."""


class ForkSource(ApiModel):
    """What is forked: exactly one of `session` and `fork`."""

    model_config = ConfigDict(
        json_schema_extra=cel(
            (
                "has(self.session) != has(self.fork)",
                "spec.source must have exactly one of session and fork: name the Session to fork now,"
                " or the Fork whose instant to start from",
            )
        )
    )

    session: SourceRef | None = None
    """A running Session: it is stopped for an instant, and goes on."""
    fork: SourceRef | None = None
    """An earlier Fork: the children start from its instant, whatever its source did since."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.session is None) == (self.fork is None):
            raise ValueError("a fork has exactly one source: session or fork")
        return self


class BranchExec(ApiModel):
    """A command that a child runs. A time-out is a result, not an error."""

    argv: Argv = Field(min_length=1, json_schema_extra=atomic_list())
    """Program and arguments, given to execve as they are: no shell, no expansion."""
    timeout_seconds: int = Field(default=60, ge=1, le=3600)
    """Guest seconds until its process group is killed; the exit code is then -1."""


class Branch(ApiModel):
    """What one child is told and does."""

    name: BranchName | None = None
    """What its user calls it: `FORKTREE_BRANCH` in its environment. A DNS label."""
    seed: Seed | None = None
    """Its seed, whatever `seedMode` says."""
    env: tuple[EnvVar, ...] = Field(default=(), max_length=32, json_schema_extra=map_list("name"))
    """What it is told beside its parent's environment."""
    exec: BranchExec | None = None
    """Run in it once, as soon as the whole fork is ready."""
    labels: dict[str, LabelValue] = Field(
        default_factory=dict[str, str],
        max_length=16,
        json_schema_extra=cel(
            (
                "self.all(key, key.matches('^([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?"
                "[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$') && !key.contains('forktree.dev/'))",
                "labels must have names like team or example.org/team, and none of forktree.dev: rename them",
            )
        ),
    )
    """Labels of its Session, beside ours."""


class SeedMode(StrEnum):
    """Where children without a seed of their own have theirs from."""

    FRESH = "Fresh"
    COMMON = "Common"
    DERIVED = "Derived"


class Scorer(ApiModel):
    """How children are judged."""

    exec: BranchExec
    """Run once in each child, after its branch's command. It must exit with 0 and print one finite number,
    and nothing else, on the last line of its standard output. Otherwise the child has no score."""


class Prune(ApiModel):
    """Which children may go on."""

    keep_top: int = Field(ge=1, le=REPLICAS_MAX)
    """So many are kept, the best scores first; without a score is lowest, and of equals the lower index is
    kept. The others are deleted, once, when every command and scorer is done. A child that was forked by then
    is kept in any case."""


class KeepPoint(StrEnum):
    """How long the instant is held."""

    WHILE_CHILDREN = "WhileChildren"
    ALWAYS = "Always"


class ForkSpec(ApiModel):
    """What to fork and how often. Written once by a user; nothing in it can be changed."""

    model_config = ConfigDict(
        json_schema_extra=cel(
            ("self == oldSelf", "spec of a Fork cannot be changed: create another Fork"),
            (
                "!has(self.branches) || self.branches.size() == 0 || self.branches.size() == self.replicas",
                "branches must be empty or have exactly one entry for each of the replicas: set replicas to"
                " their number, or leave branches out",
            ),
            (
                "!has(self.seed) || self.seedMode != 'Fresh'",
                "seed is not used by seedMode Fresh: set seedMode to Common or Derived, or leave seed out",
            ),
        )
    )

    source: ForkSource
    """The instant that the children start from."""
    replicas: int = Field(
        default=1,
        ge=0,
        le=REPLICAS_MAX,
        json_schema_extra=cel(
            (
                f"self >= 0 && self <= {REPLICAS_MAX}",
                f"replicas must be from 0 to {REPLICAS_MAX}: for more children create further Forks with"
                " this one as spec.source.fork",
            )
        ),
    )
    """How many children, 0 to 256; 0 only keeps the instant. Each is started at most once: a child that is
    deleted or fails is not replaced."""
    branches: tuple[Branch, ...] = Field(
        default=(),
        max_length=REPLICAS_MAX,
        json_schema_extra=atomic_list()
        | cel(
            (
                # The names once, in a list of one, to be looked through by the server's own code: comparing
                # 256 of them with each other in CEL takes it seconds.
                "[self.map(each, has(each.name), each.name)].all(names,"
                " names.all(name, names.indexOf(name) == names.lastIndexOf(name)))",
                "branches must have names of their own: rename those that are alike, or leave names out",
            )
        ),
    )
    """What each child is told and does, in order of their index. Empty, or one entry for each child."""
    seed: Seed | None = None
    """What `seedMode` starts from. Unset: the parent's own seed."""
    seed_mode: SeedMode = SeedMode.FRESH
    """`Fresh`: each child has a random seed; `Common`: all have `seed`; `Derived`: each has the first 16
    hexadecimal digits of the SHA-256 of `SEED:INDEX`. A child finds its own in `FORKTREE_SEED`."""
    score: Scorer | None = None
    """How children are judged. Unset: a child has a score only if its user sets one in its Session."""
    prune: Prune | None = None
    """Which children may go on. Unset: all."""
    keep_point: KeepPoint = KeepPoint.WHILE_CHILDREN
    """`WhileChildren`: the instant is held until no child of it is left, and none of a Fork that started from
    it; with `replicas: 0`, and with `Always`, until this object is deleted."""
    timeout_seconds: int = Field(default=300, ge=1, le=86_400)
    """Seconds from creation until the fork has failed unless it is ready, with reason `AtCapacity` if there
    was no room, else `DeadlineExceeded`. What branches run afterwards has time-outs of its own."""

    def branch(self, index: int) -> Branch:
        """What was said about one child; an empty one if nothing was."""
        return self.branches[index] if self.branches else Branch()


class ForkChild(ApiModel):
    """One child, as the Fork saw it."""

    index: int = Field(ge=0, le=REPLICAS_MAX - 1)
    """Which child, from 0."""
    name: str
    """Name of its Session."""
    branch: str | None = None
    """Name of its branch."""
    phase: SessionPhase
    """Its phase when this was written. Its Session tells what it is now."""
    endpoint: str | None = None
    """Where the first of its template's `ports` is reached. Set while it has a machine."""
    seed: str | None = None
    """What it was told as `FORKTREE_SEED`."""
    exit_code: int | None = None
    """Of its branch's command: 128 + signal where one killed it, -1 after a time-out. Unset while it runs,
    where it never ended, and where there is none."""
    score: float | None = None
    """The number that counts: its Session's `spec.score` where that was set, else what the scorer printed.
    Stays when the child is gone."""
    mode: Mode | None = None
    """How it really started: `Fork` or `Clean`."""
    level: Level | None = None
    """What was carried on: `Memory`, `Gpu` (and memory), or `None`."""
    reason: Reason | None = None
    """Why it failed, why it has no score, or that it was pruned, in one word."""


class ForkStatus(ApiModel):
    """How the fork went. Written by the node's agent; `node` by the operator."""

    phase: ForkPhase = ForkPhase.PENDING
    """`Pending`: not begun; `Forking`; `Running`: every child runs; final are `Complete`: branches are done,
    scored and pruned, and `Failed`: see `reason`."""
    ready: bool = False
    """Every child has answered that it has its own identity, and takes commands."""
    reason: Reason | None = None
    """Why it stands so, in one word. `AtCapacity` while `Pending`: tried again. Unset if all is well."""
    message: str | None = None
    """Why it stands so, in one sentence."""
    node: ObjectName | None = None
    """The node that forks: the source's. Set once, by the operator."""
    parent_uid: Uid | None = None
    """Uid of the object above. Set once this hangs in its tree; if it has no owner then, it was orphaned."""
    root: Uid | None = None
    """Uid of the session at the top of the tree."""
    depth: int | None = None
    """Depth of the children: their forks from the root."""
    baseline_id: str | None = None
    """The frozen machine that the whole tree started from."""
    fork_point_id: str | None = None
    """The instant, as the node names it."""
    point_bytes: int | None = None
    """Bytes that holding the instant costs, beyond what its source had: what was copied for it, also ahead of
    the stop, and its device state."""
    replicas: int | None = None
    """Children that were started."""
    ready_replicas: int | None = None
    """Children that answered and still run."""
    recorded: int | None = None
    """Children whose Session objects are written. They follow the machines, so this may lag."""
    pause_ms: float | None = None
    """Milliseconds from source stopped until it ran again. Unset for a source `fork`: nothing was stopped."""
    fork_ms: float | None = None
    """Milliseconds from source stopped (source `fork`: children released from it) until every child ran."""
    ready_ms: float | None = None
    """Milliseconds from the same start until every child had answered."""
    total_ms: float | None = None
    """Milliseconds from request seen by the agent until its answer was written."""
    mode: Mode | None = None
    """How the children really started: `Fork` or `Clean`."""
    best: str | None = None
    """Name of the child with the best score, of those that were not lost or pruned; of equals the lower
    index. Its user may have deleted or released it since."""
    best_score: float | None = None
    """Its score."""
    children: tuple[ForkChild, ...] = Field(
        default=(), max_length=REPLICAS_MAX, json_schema_extra=map_list("index")
    )
    """One entry for each child, in order of their index."""
    observed_generation: int | None = None
    """The generation of the object that this status is about."""
    conditions: tuple[Condition, ...] = Field(default=(), max_length=8, json_schema_extra=map_list("type"))
    """`Forked`: every child runs; `Ready`: every child answered; `Complete`: branches are done, scored and
    pruned; `PointAvailable`: more children can be started."""


class Fork(ApiObject):
    """An instant of a session, and the children started from it.

    All or nothing: after a failure no child is left, and the source runs on.
    """

    resource: ClassVar[Resource] = Resource(
        kind="Fork",
        plural="forks",
        short_names=("fk",),
        namespaced=True,
        columns=(
            Column("Phase", ".status.phase"),
            Column("Reason", ".status.reason"),
            Column("Want", ".spec.replicas", "integer", 0, "Children asked for"),
            Column("Ready", ".status.readyReplicas", "integer", 0, "Children that answered"),
            Column("Best", ".status.bestScore", "number", 0, "The best child's score"),
            Column("Fork ms", ".status.forkMs", "number", 0, "Source stopped until every child ran"),
            Column("Age", ".metadata.creationTimestamp", "date"),
            Column("Pause ms", ".status.pauseMs", "number", 1, "Source stopped until it ran again"),
            Column("Best child", ".status.best", priority=1),
            Column("Session", ".spec.source.session.name", priority=1),
            Column("From fork", ".spec.source.fork.name", priority=1),
            Column("Depth", ".status.depth", "integer", 1),
            Column("Node", ".status.node", priority=1),
            Column("Message", ".status.message", priority=1),
        ),
        selectable_fields=(".status.node", ".status.phase"),
        name_rules=(
            (
                f"self.metadata.name.size() <= {FORK_NAME_MAX}",
                f"metadata.name must have at most {FORK_NAME_MAX} characters, as the children's names are"
                " longer by up to 10: choose a shorter name",
            ),
            *NAME_RULES[1:],
        ),
    )

    kind: Literal["Fork"] = "Fork"
    spec: ForkSpec
    status: ForkStatus = ForkStatus()
