"""Where the servers in a guest are reached: addresses of this node's agent."""

from __future__ import annotations

from collections.abc import Sequence

from forktree_agent.control.records import PortRecord


def endpoint_of(origin: str, namespace: str, session: str, ports: Sequence[PortRecord]) -> str | None:
    """That of the first port; None where there is none, or nobody knows where this agent is reached."""
    if not ports or not origin:
        return None
    return f"{origin.rstrip('/')}/ns/{namespace}/v1/sessions/{session}/ports/{ports[0].name}/"


def endpoints_of(first: str | None, ports: Sequence[PortRecord]) -> dict[str, str]:
    """Those of all ports by name, as that of the first one says."""
    if first is None:
        return {}
    before = first.rstrip("/").rpartition("/")[0]
    return {each.name: f"{before}/{each.name}/" for each in ports}
