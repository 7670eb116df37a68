"""Whether a node's agent is heard from."""

from __future__ import annotations

from enum import StrEnum


class AgentState(StrEnum):
    """How long ago a node's agent renewed its Lease, in terms of what follows from it."""

    FRESH = "Fresh"
    """Within the Lease's duration: new work may go there."""
    STALE = "Stale"
    """Not within it, or not seen long enough to say: no new work, no verdict either."""
    LOST = "Lost"
    """Not for twice the duration: what the agent last wrote about its sessions may no longer hold."""


def agent_state(silent_seconds: float, duration_seconds: float, *, held: bool) -> AgentState:
    """The state of an agent that has been silent for `silent_seconds`.

    `held` is false when the Lease does not exist or its holder gave it up: then nothing is fresh.
    """
    if silent_seconds > 2 * duration_seconds:
        return AgentState.LOST
    if silent_seconds > duration_seconds or not held:
        return AgentState.STALE
    return AgentState.FRESH
