"""What the operator can be told at its start."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Read once by the command line, then passed on; nothing else is configurable."""

    kubeconfig: Path | None = None
    """File with the API server's address and credentials. None: the service account of the pod."""

    namespace: str = "forktree-system"
    """Where the Leases live: the agents' and the operator's own."""

    identity: str
    """Name of this process in the leader's Lease. Has to differ between any two that run."""

    metrics_listen: tuple[str, int] | None = None
    """Where `/metrics` is, over plain HTTP and without a token. None: nowhere; port 0: any free one."""

    health_listen: tuple[str, int] | None = None
    """Where `/healthz` and `/readyz` are, likewise."""

    otlp_endpoint: str | None = None
    """Of a collector that is sent traces, without a path. None: there are none."""

    lease_seconds: float = 12.0
    """How long the leader's Lease holds without renewal: the longest gap when a leader dies. Whole seconds,
    as the API has it. Thus a new leader is at work within 15 s, and one that lives may miss the API server
    for 10."""

    sweep_seconds: float = 10.0
    """Longest time between two sweeps, so the longest delay that a lost event can cause."""

    source_exists_seconds: float = 10.0
    """How long a fork waits for its source's object to appear; see `decide.routing.Patience`."""

    requests_in_flight: int = 16
    """API requests that decisions may have under way together. 16 already reach the rate at which one API
    server answers writes; more would only take its share from the agents."""
