"""All that an agent is told, read once at its start."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from forktree_agent.images.references import NamedRegistry


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Fields without a default are what a node must say; the others fit every node that we know."""

    node_name: str
    """Name of the Node object that this agent serves. It acts on objects of this node alone."""
    state_directory: Path
    """On tmpfs, shared with the keeper: its socket, our lock and our journal. Must not outlive a boot."""
    guest_directory: Path
    """Kernel, initial file system and images, with a manifest."""
    shim_library: Path
    """The fork shim, preloaded into every QEMU."""
    kubeconfig: Path | None = None
    """How to reach the API server; None: as a pod does."""
    listen_host: str = "127.0.0.1"
    listen_port: int = 0
    """0: any free port."""
    namespace_sockets: tuple[tuple[str, Path], ...] = ()
    """Namespaces whose sessions on this node may be used by whoever may open a socket at that path."""
    advertise_url: str = ""
    """Where clients reach this agent's API, with scheme https. Empty: at the address it listens on."""
    metrics_listen: tuple[str, int] | None = None
    """Where `/metrics` is, over plain HTTP and without a token. None: nowhere; port 0: any free one."""
    otlp_endpoint: str | None = None
    """Of a collector that is sent traces, without a path. None: there are none."""
    memory_limit_bytes: int = 4 << 30
    """What all machines and instants may take together at their worst. What the DaemonSet requests."""
    uid_base: int = 200_000
    """First of 4096 user ids that are nobody else's: each QEMU has its own, and what reads images."""
    egress: bool = False
    """Whether machines whose template asks for it reach the internet."""
    egress_allow: tuple[str, ...] = ()
    """Private networks (CIDR) that they reach too."""
    egress_deny: tuple[str, ...] = ()
    """Public addresses (CIDR) that they do not reach."""
    image_directory: Path | None = None
    """On a disk: where images of registries are kept. None: they are not taken."""
    image_space_bytes: int = 20 << 30
    """What they may take there together. The images that were used longest ago go first."""
    registries: tuple[NamedRegistry, ...] = ()
    """Registries that may be at any address. Others are asked over HTTPS at public addresses alone."""
    registry_authorities: Path | None = None
    """In PEM: who may sign certificates of registries, beside the public ones."""
    only_named_registries: bool = False
    """Take images from no others."""
    accelerator: Literal["auto", "kvm", "tcg"] = "auto"
    """`auto` takes KVM where a canary proves it, and emulation elsewhere."""
    write_tracking: Literal["auto", "pagemap"] = "auto"
    """`auto` copies what is new since a machine's fork before, where the kernel can tell (Linux 6.7);
    `pagemap` always copies all that it ever wrote."""
    engine: Literal["microvm", "null"] = "microvm"
    """`null` has no machines and only pretends: for measuring the control plane."""
    tls_certificate: Path | None = None
    """Certificate chain and key in PEM; both or none. None: one that this agent makes and signs itself."""
    tls_key: Path | None = None
    tls_names: tuple[str, ...] = ()
    """Further names in the certificate that this agent makes: a Service's, a load balancer's."""
    system_namespace: str = "forktree-system"
    """Where the agents' Leases are."""

    connect_seconds: float = 30.0
    """For the keeper to answer at start. It starts beside us, so it may come a little later."""
    adopt_seconds: float = 120.0
    """For taking over what an agent before this one left. Grows with the machines: some ms for each."""
    probe_seconds: float = 300.0
    """For the canary. It boots and forks a machine, under emulation on a busy node."""
    pull_seconds: float = 1800.0
    """For an image of a registry to be pulled and unpacked, before it boots. Some are gigabytes."""
    boot_seconds: float = 300.0
    """For a template's machine to boot, beside the time that its readiness probe may take."""
    fork_seconds: float = 60.0
    """For all children of one fork to run and answer: milliseconds, or much more for 256 emulated ones."""
    capacity_wait_seconds: float = 60.0
    """How long a root waits for room before it fails with `AtCapacity`. A Fork says for itself how long."""
    sweep_seconds: float = 30.0
    """Between two sweeps: how long a machine can outlive an object whose deletion nobody told us of."""
    expiry_seconds: float = 5.0
    """Between two looks at the clocks of trees: how late it may be noticed that one ran out."""
    lease_renew_seconds: float = 5.0
    lease_seconds: int = 15
    """Without renewal for so long, the operator says `Ready=Unknown` of this node's objects."""
    usage_report_seconds: float = 1.0
    """At least so far apart are two reports of a changed use of memory."""

    @property
    def field_manager(self) -> str:
        """The name under which this agent owns its entries in objects that others write too."""
        return f"forktree-agent-{self.node_name}"
