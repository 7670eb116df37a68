"""Conditions: what programs wait for. Each has one meaning and changes only when that changes."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from enum import StrEnum

from forktree.models.base import ApiModel


class ConditionStatus(StrEnum):
    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


class ConditionType(StrEnum):
    READY = "Ready"
    """Session: its machine answered its identity message. Fork: every child's did. ForkNode: takes work."""
    FORKED = "Forked"
    """Fork: every child runs."""
    COMPLETE = "Complete"
    """Fork: every branch's command and scorer is done, and so is pruning."""
    POINT_AVAILABLE = "PointAvailable"
    """Fork: the instant is held, so more children can start from it."""


class Condition(ApiModel):
    """One thing that holds, does not hold, or is not known."""

    type: ConditionType
    """What it is about."""
    status: ConditionStatus
    """`True`, `False`, or `Unknown` while nobody who knows can be asked."""
    reason: str
    """Why, in one CamelCase word."""
    message: str = ""
    """Why, in one sentence."""
    last_transition_time: datetime
    """When `status` became what it is, by the writer's clock."""
    observed_generation: int | None = None
    """The object's generation that this was found for."""


def find(conditions: Iterable[Condition], kind: ConditionType) -> Condition | None:
    return next((each for each in conditions if each.type == kind), None)


def holds(conditions: Iterable[Condition], kind: ConditionType) -> bool:
    found = find(conditions, kind)
    return found is not None and found.status is ConditionStatus.TRUE


def replaced(conditions: Iterable[Condition], new: Condition) -> tuple[Condition, ...]:
    """`conditions` with `new` in the place of the one of its type, or at the end.

    The time of transition stays where the status does not change: it tells since when, not when last written.
    """
    known = tuple(conditions)
    old = find(known, new.type)
    if old is None:
        return (*known, new)
    if old.status == new.status:
        new = new.model_copy(update={"last_transition_time": old.last_transition_time})
    return tuple(new if each is old else each for each in known)
