"""SessionTemplate: how a root session starts, and when it counts as ready."""

from __future__ import annotations

from typing import ClassVar, Final, Literal

from pydantic import ConfigDict, Field

from forktree.models.base import ApiModel, ApiObject
from forktree.models.names import NAME_RULES
from forktree.models.quantities import MemoryQuantity, memory_between, parse_bytes
from forktree.models.reasons import BakePhase, Reason
from forktree.models.schema import Column, Resource, atomic_list, cel, map_list
from forktree.models.texts import Argv, EnvName, EnvValue

MEMORY_MIN: Final = "128Mi"
MEMORY_MAX: Final = "64Gi"


class EnvVar(ApiModel):
    """One variable of the environment, given as it is: nothing in it is expanded."""

    name: EnvName
    """Letters, digits and underscores, not starting with a digit."""
    value: EnvValue = ""
    """Up to 4096 characters."""


class Machine(ApiModel):
    """The virtual machine that every session of the template has, and every fork of it."""

    vcpus: int = Field(
        default=1,
        json_schema_extra=cel(
            ("self == 1", "vcpus must be 1: machines with more cannot be forked yet; leave it out")
        ),
    )
    """Virtual processors. Only 1 for now."""
    memory: MemoryQuantity = Field(
        default="256Mi",
        json_schema_extra=memory_between(MEMORY_MIN, MEMORY_MAX),
    )
    """Guest memory, 128Mi to 64Gi. All state of a session lives in it; a fork shares what neither changes."""
    overlay: MemoryQuantity = "64Mi"
    """Writable space on top of the read-only image. It is part of `memory`, taken as files are written."""

    @property
    def memory_bytes(self) -> int:
        return parse_bytes(self.memory)

    @property
    def overlay_bytes(self) -> int:
        return parse_bytes(self.overlay)


class ExecAction(ApiModel):
    """A command in the guest."""

    command: Argv = Field(min_length=1, json_schema_extra=atomic_list())
    """Program and arguments, given to execve as they are: no shell, no expansion. Exit code 0 is success."""


class Pin(ApiModel):
    """A version that must hold before a session of this template may count as ready."""

    name: str = Field(min_length=1, max_length=63)
    """What is pinned, for example `python` or `model`."""
    command: Argv = Field(min_length=1, json_schema_extra=atomic_list())
    """Program and arguments that print the version in the guest."""
    expect: str = Field(max_length=4096)
    """What it must print, exactly, apart from white space at both ends."""


class ReadinessProbe(ApiModel):
    """When a freshly booted machine counts as ready, so that it may be frozen as the baseline."""

    exec: ExecAction | None = None
    """Ready once this succeeds. Unset: as soon as the machine is up and `command` has started."""
    initial_delay_seconds: int = Field(default=0, ge=0, le=3600)
    """Seconds from boot to the first try."""
    period_seconds: int = Field(default=1, ge=1, le=3600)
    """Seconds between tries."""
    timeout_seconds: int = Field(default=5, ge=1, le=3600)
    """Seconds after which one try is ended and counts as failed."""
    failure_threshold: int = Field(default=30, ge=1, le=10000)
    """Failures in a row after which the template fails on the node with reason `NeverReady`."""
    pins: tuple[Pin, ...] = Field(default=(), max_length=32, json_schema_extra=map_list("name"))
    """Versions that must hold, checked once the probe succeeded. Their output is part of the baseline id."""


class TreeLimits(ApiModel):
    """What one tree, a root session and all below it, may take."""

    depth: int = Field(default=64, ge=0, le=1024)
    """The deepest generation; a root has depth 0. A deeper fork fails with reason `DepthLimit`."""
    memory: MemoryQuantity | None = None
    """Memory of all its machines and instants in the worst case. Unset: only the node's own limit counts."""

    @property
    def memory_bytes(self) -> int | None:
        return None if self.memory is None else parse_bytes(self.memory)


class SessionTemplateSpec(ApiModel):
    """How a root session starts. Written once by a user; to change it, create another template."""

    model_config = ConfigDict(
        json_schema_extra=cel(
            (
                "self == oldSelf",
                "spec of a SessionTemplate cannot be changed: create another under a new name",
            )
        )
    )

    image: str = Field(
        max_length=253,
        json_schema_extra=cel(
            (
                "self.matches('^builtin:[a-z0-9]([-a-z0-9]*[a-z0-9])?$')",
                "image must be builtin:NAME, like builtin:python: name an image that the nodes have",
            )
        ),
    )
    """The root file system: `builtin:NAME`, an image shipped with the node agent. It is never written to."""
    machine: Machine = Field(
        default=Machine(),
        json_schema_extra=cel(
            (
                # A quantity that cannot be read has its own sentence.
                "!isQuantity(self.memory) || !isQuantity(self.overlay)"
                " || quantity(self.overlay).compareTo(quantity(self.memory)) < 0",
                "machine.overlay must be smaller than machine.memory, which it is part of:"
                " lower the one or raise the other",
            )
        ),
    )
    """Size of the machine."""
    command: Argv = Field(default=(), json_schema_extra=atomic_list())
    """The environment's own long-lived process: program and arguments. Empty: none, only commands run."""
    env: tuple[EnvVar, ...] = Field(default=(), max_length=128, json_schema_extra=map_list("name"))
    """Environment of `command` and of every command run in a session."""
    readiness_probe: ReadinessProbe | None = None
    """When the machine counts as ready. Unset: as soon as it is up and `command` has started."""
    tree_limits: TreeLimits = TreeLimits()
    """What one tree may take."""


class BakedNode(ApiModel):
    """How the template stands on one node. Written by that node's agent alone."""

    node: str = Field(max_length=253)
    """The node's name."""
    phase: BakePhase
    """`Baking`: being started; `Ready`: sessions start from the frozen machine; `Failed`: see `reason`."""
    baseline_id: str | None = None
    """SHA-256 over all that makes two starts comparable. Every session carries it. Set once `Ready`."""
    boot_ms: float | None = None
    """Milliseconds from start of the machine until every check held. Agent's clock. Set once `Ready`."""
    reason: Reason | None = None
    """Why it failed, in one word."""
    message: str | None = None
    """Why it failed, in one sentence."""


class SessionTemplateStatus(ApiModel):
    """Where the template is ready. Written by the node agents, each its own entry."""

    nodes: tuple[BakedNode, ...] = Field(default=(), json_schema_extra=map_list("node"))
    """One entry for each node that a session of this template was placed on."""

    def on(self, node: str) -> BakedNode | None:
        return next((each for each in self.nodes if each.node == node), None)


class SessionTemplate(ApiObject):
    """How a root session starts, and when it counts as ready.

    A node boots a template once, checks it, and freezes it; every root session is a fork of that instant.
    """

    resource: ClassVar[Resource] = Resource(
        kind="SessionTemplate",
        plural="sessiontemplates",
        short_names=("stpl",),
        namespaced=True,
        columns=(
            Column("Image", ".spec.image"),
            Column("Memory", ".spec.machine.memory"),
            Column("Depth limit", ".spec.treeLimits.depth", "integer", 1, "Deepest generation allowed"),
            Column("Age", ".metadata.creationTimestamp", "date"),
        ),
        name_rules=NAME_RULES,
    )

    kind: Literal["SessionTemplate"] = "SessionTemplate"
    spec: SessionTemplateSpec
    status: SessionTemplateStatus = SessionTemplateStatus()
