"""Whose clock ran out: of a session's idleness, a tree's life, a trainer's heartbeat. Pure.

Times are seconds of the loop's clock, but for a tree's age, which the API server's and the node's wall clocks
measure together; it is given in days and hours, not in seconds that they may differ by.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TypeAlias

from forktree.models import Uid
from forktree_agent.control.records import Limits

HEARTBEAT_SECONDS = 60.0
"""For a Lease that does not say its duration, and for one that was announced and is not there yet."""
READS_IN_A_DURATION = 3.0


# Idleness -------------------------------------------------------------------------------------------------


def latest(own: Mapping[Uid, float], above: Callable[[Uid], Uid | None]) -> dict[Uid, float]:
    """When something was last done in each object, or in anything below it that `own` names."""
    found = dict(own)
    for uid, at in own.items():
        up = above(uid)
        # Once above is as late as this, so is all that is above it, or becomes it in its own turn.
        while up is not None and found.get(up, float("-inf")) < at:
            found[up] = at
            up = above(up)
    return found


def idle_verdict(limits: Limits, active_at: float, now: float) -> str | None:
    """Why a session that was last active at `active_at` is to lose its machine; None: it is not."""
    allowed = limits.idle_seconds
    if allowed is None or now - active_at < allowed:
        return None
    return f"no command and no fork for {allowed} s, in it or below it: its template allows no more"


# A tree's life --------------------------------------------------------------------------------------------


def age_verdict(limits: Limits, created: datetime | None, now: datetime) -> str | None:
    """Why a tree whose root was `created` then is to go; None: it is not."""
    allowed = limits.tree_ttl_seconds
    if allowed is None or created is None or (now - created).total_seconds() < allowed:
        return None
    return f"the tree is older than the {allowed} s that its template allows"


# Heartbeats -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Renewed:
    """The Lease is there."""

    at: str | None
    """Its `renewTime`, as its trainer wrote it. Only that it changes counts: their clock is not ours."""
    duration_seconds: float | None


@dataclass(frozen=True, slots=True)
class Missing:
    """There is no Lease of that name: not yet, or not any more."""


@dataclass(frozen=True, slots=True)
class Unanswered:
    """The API server could not be asked, so nobody could renew anything either."""


Answer: TypeAlias = Renewed | Missing | Unanswered


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """A Lease as it was followed from here."""

    lease: str
    at: str | None = None
    """`renewTime` of the last renewal that was seen."""
    duration_seconds: float = HEARTBEAT_SECONDS
    silent_since: float
    """When that was first seen; later where the API server could not be asked meanwhile."""
    doubted: bool = False
    """The last question was not answered."""

    def due(self, read_at: float, now: float) -> bool:
        """Whether to ask again, after `read_at`."""
        return now - read_at >= self.duration_seconds / READS_IN_A_DURATION


def heard(lease: str, before: Heartbeat | None, answer: Answer, now: float) -> Heartbeat:
    """What is known of a Lease after one more answer about it."""
    if before is None or before.lease != lease:
        before = Heartbeat(lease=lease, silent_since=now)
    if before.doubted:
        before = replace(before, silent_since=now)  # What was missed while it was away, nobody knows.
    match answer:
        case Unanswered():
            return replace(before, doubted=True)
        case Missing():
            return replace(before, doubted=False)
        case Renewed(at=at, duration_seconds=duration):
            return Heartbeat(
                lease=lease,
                at=at,
                duration_seconds=duration or HEARTBEAT_SECONDS,
                silent_since=before.silent_since if at == before.at else now,
            )


def heartbeat_verdict(heartbeat: Heartbeat, now: float) -> str | None:
    """Why the tree of a silent trainer is to go; None: it is not. To be asked right after `heard`."""
    if heartbeat.doubted or now - heartbeat.silent_since < heartbeat.duration_seconds:
        return None
    return f"its heartbeat, Lease {heartbeat.lease}, was not renewed for {heartbeat.duration_seconds:g} s"
