"""ForkNode: what a node can do, and why."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import ClassVar, Literal

from pydantic import Field

from forktree.models.base import ApiModel, ApiObject
from forktree.models.conditions import Condition
from forktree.models.schema import Column, Resource, map_list


class Accelerator(StrEnum):
    """What runs a guest's instructions: the processor, or QEMU's translator, slower but everywhere."""

    KVM = "kvm"
    TCG = "tcg"


class Canary(ApiModel):
    """What trying on a throw-away machine showed: booted, forked, memory compared, command run."""

    passed: bool
    """The node can fork. False: no session is placed here."""
    reason: str
    """`CanaryPassed`; `Emulated` where it passed, but without KVM; else why it failed, in one word."""
    message: str = ""
    """Why this accelerator and not the better one, in one sentence."""
    at: datetime
    """When it was tried. Node's wall clock."""
    boot_ms: float | None = None
    """Milliseconds the canary took to boot. Agent's clock."""
    fork_ms: float | None = None
    """Milliseconds from canary stopped until its fork ran. Agent's clock."""


class ForkNodeStatus(ApiModel):
    """What the node can do. Written by its agent when something changes, not on a timer."""

    ready: bool = False
    """The agent runs and the canary passed: sessions may be placed here."""
    engine: str | None = None
    """How machines are branched here, for example `microvm`."""
    accelerator: Accelerator | None = None
    """`kvm` or `tcg`, whichever the canary proved."""
    canary: Canary | None = None
    """The proof."""
    egress: bool | None = None
    """Sessions whose template has `network.egress: Open` reach the internet from here. False: their template
    fails here with reason `EgressForbidden`, which says why."""
    capacity_bytes: int | None = None
    """Memory, in bytes, that sessions may take together."""
    reserved_bytes: int | None = None
    """Memory, in bytes, promised to those that run, each counted at its worst."""
    boot_id: str | None = None
    """The kernel's boot id. Another one means that every machine of before is gone."""
    agent_version: str | None = None
    """Version of forktree that the agent runs."""
    endpoint: str | None = None
    """URL of the agent's API, with scheme https."""
    ca_bundle: str | None = Field(default=None, max_length=65536)
    """Certificates in PEM to verify `endpoint` by; the other agents hand requests on under these alone."""
    conditions: tuple[Condition, ...] = Field(default=(), max_length=8, json_schema_extra=map_list("type"))
    """`Ready`: sessions may be placed here."""


class ForkNode(ApiObject):
    """What a node can do, and how that is known. Has the name of its Node and is written by its agent."""

    resource: ClassVar[Resource] = Resource(
        kind="ForkNode",
        plural="forknodes",
        short_names=("fnode",),
        namespaced=False,
        columns=(
            Column("Ready", ".status.ready", "boolean"),
            Column("Engine", ".status.engine"),
            Column("Accelerator", ".status.accelerator"),
            Column("Canary", ".status.canary.reason"),
            Column("Age", ".metadata.creationTimestamp", "date"),
            Column("Capacity", ".status.capacityBytes", "integer", 1, "Bytes"),
            Column("Reserved", ".status.reservedBytes", "integer", 1, "Bytes"),
            Column("Endpoint", ".status.endpoint", priority=1),
            Column("Version", ".status.agentVersion", priority=1),
            Column("Why", ".status.canary.message", priority=1),
        ),
    )

    kind: Literal["ForkNode"] = "ForkNode"
    status: ForkNodeStatus = ForkNodeStatus()
