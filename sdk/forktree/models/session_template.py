"""SessionTemplate: how a root session starts, and when it counts as ready."""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar, Final, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from forktree.models.base import ApiModel, ApiObject
from forktree.models.names import NAME_RULES
from forktree.models.quantities import MemoryQuantity, memory_between, parse_bytes
from forktree.models.reasons import BakePhase, Reason
from forktree.models.schema import Column, Resource, atomic_list, cel, map_list
from forktree.models.texts import Argv, EnvName, EnvValue, ObjectName, PortName

_BUILTIN = "builtin:[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_PART = "[a-z0-9]+(([.]|_|__|-+)[a-z0-9]+)*"
_OCI = (
    f"oci:[A-Za-z0-9]([-.A-Za-z0-9]*[A-Za-z0-9])?(:[0-9]{{1,5}})?/{_PART}(/{_PART})*"
    "(:[A-Za-z0-9_][-.A-Za-z0-9_]{0,127})?(@sha256:[0-9a-f]{64})?"
)
IMAGE_PATTERNS: Final = (_BUILTIN, _OCI)
"""As the API server matches them, each from end to end."""

MEMORY_MIN: Final = "128Mi"
MEMORY_MAX: Final = "64Gi"


class SecretKeyRef(ApiModel):
    """One entry of a Secret in the same namespace."""

    name: ObjectName
    """Name of the Secret."""
    key: str = Field(min_length=1, max_length=253)
    """Which of its entries. It must be text."""


class EnvSource(ApiModel):
    """Where the value of a variable is kept."""

    secret_key_ref: SecretKeyRef
    """In a Secret. Its value is in the machine and nowhere else: not in an object, a log or a journal."""


class EnvVar(ApiModel):
    """One variable of the environment, given as it is: nothing in it is expanded."""

    model_config = ConfigDict(
        json_schema_extra=cel(
            (
                "has(self.value) != has(self.valueFrom)",
                "a variable must have exactly one of value and valueFrom: give value, if only an empty one,"
                " or name a Secret in valueFrom.secretKeyRef",
            )
        )
    )

    name: EnvName
    """Letters, digits and underscores, not starting with a digit."""
    value: EnvValue | None = None
    """Up to 4096 characters. Exactly one of this and `valueFrom`."""
    value_from: EnvSource | None = None
    """Where the value is read from when the machine is started. Whoever names a Secret must be allowed to
    read Secrets of the namespace."""

    @model_validator(mode="after")
    def _one_value(self) -> Self:
        if (self.value is None) == (self.value_from is None):
            raise ValueError(f"variable {self.name} has exactly one of value and valueFrom")
        return self


class Machine(ApiModel):
    """The virtual machine that every session of the template has, and every fork of it."""

    vcpus: int = Field(default=1, ge=1, le=8)
    """Virtual processors. A fork of a machine with more than one takes longer: all its programs are stopped
    before the machine is, and that counts to `pauseMs`."""
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


class Egress(StrEnum):
    """Whether machines reach what is outside of them."""

    NONE = "None"
    OPEN = "Open"


class Network(ApiModel):
    """What the machines of a template reach."""

    egress: Egress = Egress.NONE
    """`None`: nothing, the machine has no network device but loopback. `Open`: the internet, by IPv4, TCP and
    UDP, as far as the node's agent lets machines out at all (`--egress`; else the template fails there with
    reason `EgressForbidden`); not the node, private networks or the cluster. Each machine then takes some
    30 MB more. A child's outside connections are closed, and it can make new ones."""


class ExecAction(ApiModel):
    """A command in the guest."""

    command: Argv = Field(min_length=1, json_schema_extra=atomic_list())
    """Program and arguments, given to execve as they are: no shell, no expansion. Exit code 0 is success."""


class Port(ApiModel):
    """A server in the guest that callers may reach through the node's agent."""

    name: PortName
    """What it is called in addresses: lower-case letters, digits and dashes, beginning with a letter."""
    port: int = Field(ge=1, le=65535)
    """Where it listens: on 127.0.0.1, on ::1 or on all addresses of the guest."""


class HttpGetAction(ApiModel):
    """A request that guest init makes over loopback. A status from 200 to 399 is success."""

    port: int = Field(ge=1, le=65535)
    """Port on 127.0.0.1 in the guest."""
    path: str = Field(
        default="/",
        max_length=1024,
        json_schema_extra=cel(
            (
                "self.matches('^/[!-~]*$')",
                "path must begin with / and hold printable ASCII without spaces: percent-encode the rest",
            )
        ),
    )
    """Path and query, as they are sent."""


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

    model_config = ConfigDict(
        json_schema_extra=cel(
            (
                "!has(self.exec) || !has(self.httpGet)",
                "readinessProbe must have at most one of exec and httpGet: remove one",
            )
        )
    )

    exec: ExecAction | None = None
    """Ready once this command succeeds. Without this and `httpGet`: as soon as the machine is up and
    `command` has started."""
    http_get: HttpGetAction | None = None
    """Ready once this request succeeds. It is made inside the guest."""
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


class Hook(ApiModel):
    """A command that takes part in a fork. If it fails, or is not done in time, so does the whole fork."""

    exec: ExecAction
    """What is run."""
    timeout_seconds: int = Field(default=10, ge=1, le=300)
    """Guest seconds until it is ended and counts as failed."""


class Hooks(ApiModel):
    """What is run around a fork."""

    pre_fork: Hook | None = None
    """Run in a session right before it is stopped to be forked, to bring it to a step boundary. Not run when
    children are started from an instant that is held already. A paused session cannot run it, so cannot be
    forked by a template that has it."""
    post_fork: Hook | None = None
    """Run in every machine that goes on from an instant, with its own identity in its environment, before
    anybody hears of it: in each child of a fork, and in a root, which goes on from the template's."""


class TreeLimits(ApiModel):
    """What one tree, a root session and all below it, may take."""

    depth: int = Field(default=64, ge=0, le=1024)
    """The deepest generation; a root has depth 0. A deeper fork fails with reason `DepthLimit`."""
    memory: MemoryQuantity | None = None
    """Memory of all its machines and instants in the worst case. Unset: only the node's own limit counts."""
    pause_budget_ms: int | None = Field(default=None, ge=1, le=60_000)
    """Milliseconds that a fork may stop its session for, as `pauseMs` counts them. One that is expected to
    take longer is first copied ahead, up to four times, while the session runs; if that is not enough, the
    Fork fails with reason `PauseBudget`, and the session was not stopped. An estimate: a stop may take longer
    all the same. Unset: as long as it takes."""
    live: int | None = Field(default=None, ge=1, le=100_000)
    """Sessions with a machine at once, the root among them. A Fork that would make it more fails with reason
    `LiveLimit`, and nothing of it is started. Unset: any number."""
    idle_seconds: int | None = Field(default=None, ge=1, le=31_536_000)
    """Seconds without a command or a fork in a session or in anything below it that has a machine, after
    which its machine is ended: phase `Released`, reason `Expired`. Its place in the tree and its instants
    stay. A restarted agent begins to count anew. Unset: never."""
    tree_ttl_seconds: int | None = Field(default=None, ge=1, le=315_360_000)
    """Seconds from the root's creation after which the root is deleted, and all below it, whatever is done
    there. Unset: never."""
    exec_seconds: int | None = Field(default=None, ge=1, le=3600)
    """Longest time-out that a caller of the HTTP API may give a command; a longer one is refused. Who gives
    none gets 30 seconds, or this if it is shorter. Unset: an hour."""

    @property
    def memory_bytes(self) -> int | None:
        return None if self.memory is None else parse_bytes(self.memory)


def _unchanged(*names: str) -> str:
    """A rule that these fields are as they were."""
    return " && ".join(
        f"has(self.{name}) == has(oldSelf.{name}) && (!has(self.{name}) || self.{name} == oldSelf.{name})"
        for name in names
    )


_FIXED = (
    *("image", "imagePullSecret", "machine", "network", "command", "env", "ports"),
    *("readinessProbe", "hooks", "treeLimits"),
)


class SessionTemplateSpec(ApiModel):
    """How a root session starts. Written once by a user, but for `standby`; to change it, create another
    template."""

    model_config = ConfigDict(
        json_schema_extra=cel(
            (
                _unchanged(*_FIXED),
                "spec of a SessionTemplate cannot be changed: create another under a new name",
            )
        )
    )

    image: str = Field(
        max_length=512,
        json_schema_extra=cel(
            (
                " || ".join(f"self.matches('^{each}$')" for each in IMAGE_PATTERNS),
                "image must be builtin:NAME or oci:HOST[:PORT]/REPOSITORY[:TAG][@sha256:DIGEST]: name an"
                " image that the nodes have, like builtin:python, or one of a registry, like"
                " oci:registry.example.com/team/app:1.2",
            )
        ),
    )
    """The root file system, which is never written to: `builtin:NAME`, an image shipped with the node agent,
    or `oci:HOST[:PORT]/REPOSITORY[:TAG][@sha256:DIGEST]`, one of a registry. Each node looks a tag up for
    itself when it bakes the template: with a digest all have the same."""
    image_pull_secret: ObjectName | None = None
    """A Secret of type `kubernetes.io/dockerconfigjson` in the same namespace, with the login for the image's
    registry. Whoever names one must be allowed to read Secrets of the namespace."""
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
    network: Network = Network()
    """What it reaches."""
    command: Argv = Field(default=(), json_schema_extra=atomic_list())
    """The environment's own long-lived process: program and arguments. Empty: none, only commands run."""
    env: tuple[EnvVar, ...] = Field(default=(), max_length=128, json_schema_extra=map_list("name"))
    """Environment of `command` and of every command run in a session."""
    ports: tuple[Port, ...] = Field(default=(), max_length=16, json_schema_extra=map_list("name"))
    """Servers in the guest that callers with the right `sessions/proxy` may reach, through the node's agent.
    Nobody reaches any other port."""
    readiness_probe: ReadinessProbe | None = None
    """When the machine counts as ready. Unset: as soon as it is up and `command` has started."""
    hooks: Hooks = Hooks()
    """What is run around a fork."""
    tree_limits: TreeLimits = TreeLimits()
    """What one tree may take."""
    standby: int = Field(default=0, ge=0, le=64)
    """Waiting machines that each node keeps for new roots, as far as it has room: a root then starts in
    milliseconds, and the node bakes the template before anybody asks. Each takes some 25 MB. Roots with
    `treeLimits.memory` do not use them. May be changed."""


class BakedNode(ApiModel):
    """How the template stands on one node. Written by that node's agent alone."""

    node: str = Field(max_length=253)
    """The node's name."""
    phase: BakePhase
    """`Baking`: being started; `Ready`: sessions start from the frozen machine; `Failed`: see `reason`."""
    baseline_id: str | None = None
    """SHA-256 over all that makes two starts comparable. Every session carries it. Set once `Ready`."""
    image_digest: str | None = None
    """Of the manifest that an image of a registry turned out to be, `sha256:` and 64 hex digits."""
    boot_ms: float | None = None
    """Milliseconds from start of the machine until every check held. Agent's clock. Set once `Ready`."""
    reason: Reason | None = None
    """Why it failed, or what it waits for, in one word."""
    message: str | None = None
    """The same in one sentence."""


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
            Column("Ready on", '.status.nodes[?(@.phase=="Ready")].node', description="One of its nodes"),
            Column("Failed on", '.status.nodes[?(@.phase=="Failed")].node', description="One of its nodes"),
            Column("Depth limit", ".spec.treeLimits.depth", "integer", 1, "Deepest generation allowed"),
            Column("Age", ".metadata.creationTimestamp", "date"),
        ),
        name_rules=NAME_RULES,
    )

    kind: Literal["SessionTemplate"] = "SessionTemplate"
    spec: SessionTemplateSpec
    status: SessionTemplateStatus = SessionTemplateStatus()
