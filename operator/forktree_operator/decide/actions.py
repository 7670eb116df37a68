"""What a decision asks for. The caller carries it out, or asks again later."""

from __future__ import annotations

from dataclasses import dataclass

from forktree.models.reasons import Reason


@dataclass(frozen=True, slots=True)
class Place:
    """Write the node's name into the object: the operator's last write to it."""

    node: str


@dataclass(frozen=True, slots=True)
class Reject:
    """Fail the object for good."""

    reason: Reason
    message: str
    """One sentence for the person who made the object."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Not yet. Nothing is written where `reason` is not set."""

    reason: Reason | None = None
    message: str = ""
    again_seconds: float | None = None
    """When to ask again. None: an event or the next sweep is soon enough."""


@dataclass(frozen=True, slots=True)
class Ignore:
    """Nothing to decide: already placed, being deleted, or final."""


Action = Place | Reject | Wait | Ignore
