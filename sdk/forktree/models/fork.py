"""Fork: an instant of a session, and the children started from it."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from forktree.models.base import ApiModel, ApiObject, Uid
from forktree.models.conditions import Condition
from forktree.models.names import FORK_NAME_MAX, NAME_RULES, REPLICAS_MAX
from forktree.models.reasons import ForkPhase, Level, Mode, Reason, SessionPhase
from forktree.models.schema import Column, Resource, cel, map_list
from forktree.models.texts import ObjectName, ObjectUid


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


class ForkSpec(ApiModel):
    """What to fork and how often. Written once by a user; nothing in it can be changed."""

    model_config = ConfigDict(
        json_schema_extra=cel(("self == oldSelf", "spec of a Fork cannot be changed: create another Fork"))
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


class ForkChild(ApiModel):
    """One child, as the Fork saw it."""

    index: int = Field(ge=0, le=REPLICAS_MAX - 1)
    """Which child, from 0."""
    name: str
    """Name of its Session."""
    phase: SessionPhase
    """Its phase when this was written. Its Session tells what it is now."""
    mode: Mode | None = None
    """How it really started: `Fork` or `Clean`."""
    level: Level | None = None
    """What was carried on: `Memory`, `Gpu` (and memory), or `None`."""
    reason: Reason | None = None
    """Why it failed, in one word."""


class ForkStatus(ApiModel):
    """How the fork went. Written by the node's agent; `node` by the operator."""

    phase: ForkPhase = ForkPhase.PENDING
    """`Pending`: not begun; `Forking`; `Running`: every child runs; final is `Failed`: see `reason`."""
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
    """Bytes that holding the instant costs, beyond what it shares with its source."""
    replicas: int | None = None
    """Children that were started."""
    ready_replicas: int | None = None
    """Children that answered."""
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
    children: tuple[ForkChild, ...] = Field(
        default=(), max_length=REPLICAS_MAX, json_schema_extra=map_list("index")
    )
    """One entry for each child, in order of their index."""
    observed_generation: int | None = None
    """The generation of the object that this status is about."""
    conditions: tuple[Condition, ...] = Field(default=(), max_length=8, json_schema_extra=map_list("type"))
    """`Forked`: every child runs; `Ready`: every child answered; `PointAvailable`: more can be started."""


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
            Column("Pause ms", ".status.pauseMs", "number", 0, "Source stopped until it ran again"),
            Column("Fork ms", ".status.forkMs", "number", 0, "Source stopped until every child ran"),
            Column("Age", ".metadata.creationTimestamp", "date"),
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
