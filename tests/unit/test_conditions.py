"""Conditions keep the time since when they hold."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from forktree.models.conditions import Condition, ConditionStatus, ConditionType, find, holds, replaced

THEN = datetime(2026, 1, 1, tzinfo=UTC)
NOW = THEN + timedelta(minutes=5)


def condition(
    kind: ConditionType, status: ConditionStatus, at: datetime, reason: str = "Because"
) -> Condition:
    return Condition(type=kind, status=status, reason=reason, last_transition_time=at)


READY_THEN = condition(ConditionType.READY, ConditionStatus.TRUE, THEN)
FORKED_THEN = condition(ConditionType.FORKED, ConditionStatus.TRUE, THEN)


def test_same_status_again_keeps_its_time_and_takes_the_new_reason() -> None:
    again = condition(ConditionType.READY, ConditionStatus.TRUE, NOW, reason="Still")
    (kept,) = replaced([READY_THEN], again)
    assert (kept.last_transition_time, kept.reason) == (THEN, "Still")


def test_other_status_takes_the_new_time_and_the_old_place() -> None:
    lost = condition(ConditionType.READY, ConditionStatus.UNKNOWN, NOW)
    assert replaced([READY_THEN, FORKED_THEN], lost) == (lost, FORKED_THEN)


def test_new_type_goes_to_the_end() -> None:
    assert replaced([READY_THEN], FORKED_THEN) == (READY_THEN, FORKED_THEN)


def test_unknown_and_absent_do_not_hold() -> None:
    lost = condition(ConditionType.READY, ConditionStatus.UNKNOWN, NOW)
    assert holds([READY_THEN], ConditionType.READY)
    assert not holds([lost], ConditionType.READY)
    assert not holds([], ConditionType.READY)
    assert find([READY_THEN], ConditionType.FORKED) is None
