"""What people are told of a fork, as an Event says it."""

from __future__ import annotations

from forktree.models import ForkStatus, SessionPhase
from forktree_agent.control.records import ForkMade


def forked(made: ForkMade, source_kind: str, source_name: str) -> str:
    """Its children run."""
    paused = "" if made.pause_ms is None else f", which stood still for {made.pause_ms:.1f} ms"
    return f"{len(made.children)} started from {source_kind.lower()} {source_name}{paused}"


def complete(status: ForkStatus) -> str:
    """All that it was to do is done."""
    running = sum(child.phase is SessionPhase.RUNNING for child in status.children)
    best = "" if status.best is None else f", the best is {status.best} with {status.best_score:g}"
    return f"{running} of {len(status.children)} children run on{best}"
