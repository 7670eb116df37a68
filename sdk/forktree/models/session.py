"""Session: one live environment, a node of a tree."""

from __future__ import annotations

from datetime import datetime
from typing import ClassVar, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from forktree.models.base import ApiModel, ApiObject, Uid
from forktree.models.conditions import Condition
from forktree.models.names import NAME_RULES, REPLICAS_MAX
from forktree.models.reasons import Level, Mode, Reason, SessionPhase, SessionState
from forktree.models.schema import Column, Resource, cel, map_list
from forktree.models.session_template import EnvVar
from forktree.models.texts import ObjectName, ObjectUid, Seed


class TemplateRef(ApiModel):
    """The template that a root starts from, in the same namespace."""

    name: ObjectName
    """Name of the SessionTemplate."""


class ForkRef(ApiModel):
    """The Fork that made a child. Written by the node agent alone."""

    name: ObjectName
    """Name of the Fork."""
    uid: ObjectUid
    """Uid of the Fork, so that another of the same name is never taken for it."""
    index: int = Field(ge=0, le=REPLICAS_MAX - 1)
    """Which of the Fork's children this is, from 0."""


class SessionSpec(ApiModel):
    """Where a session comes from, what it is told, and what it is asked to be.

    A user may change `state`, `score` and `rewards` at any time, and nothing else.
    """

    model_config = ConfigDict(
        json_schema_extra=cel(
            (
                "has(self.templateRef) != has(self.forkRef)",
                "spec must have exactly one of templateRef and forkRef: set templateRef to start a session",
            ),
            (
                "has(self.templateRef) == has(oldSelf.templateRef)"
                " && (!has(self.templateRef) || self.templateRef == oldSelf.templateRef)",
                "spec.templateRef cannot be changed: create another Session",
            ),
            (
                "has(self.forkRef) == has(oldSelf.forkRef)"
                " && (!has(self.forkRef) || self.forkRef == oldSelf.forkRef)",
                "spec.forkRef cannot be changed: create another Fork",
            ),
            (
                "!has(oldSelf.nodeName) || (has(self.nodeName) && self.nodeName == oldSelf.nodeName)",
                "spec.nodeName cannot be changed once set: a session never moves, create another Session",
            ),
            (
                "has(self.seed) == has(oldSelf.seed) && (!has(self.seed) || self.seed == oldSelf.seed)",
                "spec.seed cannot be changed: its machine was told already, create another Session",
            ),
            (
                "(has(self.env) ? self.env : []) == (has(oldSelf.env) ? oldSelf.env : [])",
                "spec.env cannot be changed: its machine was told already, create another Session",
            ),
            (
                "oldSelf.state != 'Released' || self.state == 'Released'",
                "spec.state Released is final, as the machine is gone: create another Session, or a Fork"
                " from an instant of this one",
            ),
        )
    )

    template_ref: TemplateRef | None = None
    """Set by a user: the template of a root session. Exactly one of this and `forkRef`."""
    fork_ref: ForkRef | None = None
    """Set by the node agent: the Fork that made this child. To fork a session, create a Fork."""
    node_name: ObjectName | None = None
    """The node it runs on. Set once: by the operator for a root, by the node's agent for a child."""
    seed: Seed | None = None
    """What its programs are to seed their random generators from: `FORKTREE_SEED` in its environment."""
    env: tuple[EnvVar, ...] = Field(default=(), max_length=64, json_schema_extra=map_list("name"))
    """What this session is told beside its template's environment. All below it are told the same, unless
    their branch says otherwise."""
    state: SessionState = SessionState.RUNNING
    """What it is asked to be. `Paused`: its machine stands still, keeps its memory, and can be forked.
    `Released`: its machine is ended, its place in the tree and its instants stay; final."""
    score: float | None = None
    """The user's number for it, higher is better. Set, it counts in place of a scorer's."""
    rewards: dict[str, float] = Field(
        default_factory=dict[str, float],
        max_length=64,
        json_schema_extra=cel(
            (
                "self.all(name, size(name) >= 1 && size(name) <= 63)",
                "rewards must have names of 1 to 63 characters: rename them",
            )
        ),
    )
    """The user's further numbers by name, for instance one for each step. Kept and shown, not interpreted."""

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if (self.template_ref is None) == (self.fork_ref is None):
            raise ValueError("a session has exactly one of templateRef and forkRef")
        return self

    @property
    def is_root(self) -> bool:
        return self.template_ref is not None


class SessionStatus(ApiModel):
    """How the session stands. Written by the node's agent; by the operator only where the node is lost."""

    phase: SessionPhase = SessionPhase.PENDING
    """`Pending`: not taken by a node; `Starting`; `Running`; `Paused`: its machine stands still; final are
    `Released` (its machine was ended on purpose, its place in the tree stays) and `Failed` (see `reason`)."""
    ready: bool = False
    """The machine has answered that it has its own identity, and takes commands."""
    reason: Reason | None = None
    """Why it stands so, in one word. Unset while all is well."""
    message: str | None = None
    """Why it stands so, in one sentence."""
    node: str | None = None
    """The node whose agent has taken it."""
    endpoint: str | None = None
    """Where the first of the template's `ports` is reached, over HTTPS and with a token for the agent. Set
    while it has a machine, if the template has ports."""
    root: Uid | None = None
    """Uid of the session at the top of this tree; a root's is its own."""
    parent: Uid | None = None
    """Uid of the session it was forked from. Unset for a root."""
    depth: int | None = None
    """Forks between it and the root; a root has 0."""
    baseline_id: str | None = None
    """The frozen machine that the whole tree started from: two sessions with one id are comparable."""
    template_uid: Uid | None = None
    """Uid of the template that the tree started from."""
    vm_generation_id: str | None = None
    """UUID, new in every machine and seen by its guest in `/run/forktree/identity`."""
    seed: str | None = None
    """What its machine was told as `FORKTREE_SEED`."""
    mode: Mode | None = None
    """How it really started: `Fork` (state was carried on) or `Clean`. A root is a fork of the baseline."""
    level: Level | None = None
    """What was carried on: `Memory`, `Gpu` (and memory), or `None`."""
    fork_ms: float | None = None
    """Milliseconds from parent stopped until every child of the same fork ran. Agent's clock."""
    total_ms: float | None = None
    """Milliseconds from request seen by the agent until its answer was written. Agent's clock."""
    score: float | None = None
    """The number that counts: `spec.score` where that is set, else what the scorer of its Fork printed."""
    started_at: datetime | None = None
    """When its machine answered first. Node's wall clock."""
    observed_generation: int | None = None
    """The generation of the object that this status is about."""
    conditions: tuple[Condition, ...] = Field(default=(), max_length=8, json_schema_extra=map_list("type"))
    """`Ready`: `True` once the machine has its own identity; `Unknown` while its node's agent is lost."""


class Session(ApiObject):
    """One live environment: a machine that runs, takes commands, and can be forked.

    Deleting it ends it and everything that was forked from it.
    """

    resource: ClassVar[Resource] = Resource(
        kind="Session",
        plural="sessions",
        short_names=("sess",),
        namespaced=True,
        columns=(
            Column("Phase", ".status.phase"),
            Column("Reason", ".status.reason"),
            Column("Depth", ".status.depth", "integer"),
            Column("Score", ".status.score", "number"),
            Column("Node", ".status.node"),
            Column("Fork ms", ".status.forkMs", "number", 0, "Parent stopped until every child ran"),
            Column("Age", ".metadata.creationTimestamp", "date"),
            Column("Endpoint", ".status.endpoint", priority=1),
            Column("Mode", ".status.mode", priority=1),
            Column("Level", ".status.level", priority=1),
            Column("Template", ".spec.templateRef.name", priority=1),
            Column("Fork", ".spec.forkRef.name", priority=1),
            Column("Message", ".status.message", priority=1),
        ),
        selectable_fields=(".spec.nodeName", ".spec.templateRef.name", ".status.phase"),
        name_rules=NAME_RULES,
    )

    kind: Literal["Session"] = "Session"
    spec: SessionSpec
    status: SessionStatus = SessionStatus()
