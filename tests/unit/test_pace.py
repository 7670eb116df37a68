"""How long a stop is expected to take, and when that is too long."""

from __future__ import annotations

import pytest

from forktree_agent.engine.microvm.pace import KNOWN_SECONDS, REMEMBERED, Pace, over_budget

MIB = 1 << 20


def test_of_a_machine_of_which_nothing_is_known_only_the_copy_is_expected() -> None:
    assert Pace().stop_seconds(0, now=0.0) == 0.0
    assert Pace().stop_seconds(1 << 30, now=0.0) == pytest.approx(1.0)


def test_what_copies_took_counts_by_their_size_and_small_ones_do_not() -> None:
    pace = Pace()
    pace.copied(4096, 1.0, now=0.0)
    assert pace.stop_seconds(MIB, now=0.0) == pytest.approx(1 / 1024)
    pace.copied(30 * MIB, 0.01, now=0.0)
    pace.copied(10 * MIB, 0.03, now=0.0)
    assert pace.stop_seconds(10 * MIB, now=0.0) == pytest.approx(0.01)


def test_what_a_stop_takes_beside_its_copy_is_that_of_the_shortest() -> None:
    pace = Pace()
    pace.copied(100 * MIB, 0.1, now=0.0)
    for seconds in (0.5, 0.014, 0.3):
        pace.stopped(10 * MIB, seconds, now=0.0)
    assert pace.stop_seconds(0, now=0.0) == pytest.approx(0.004)
    assert pace.stop_seconds(50 * MIB, now=0.0) == pytest.approx(0.054)
    pace.stopped(50 * MIB, 0.001, now=0.0)  # Faster than any copy seen.
    assert pace.stop_seconds(0, now=0.0) == 0.0


def test_what_is_old_or_one_of_many_is_forgotten() -> None:
    pace = Pace()
    pace.copied(100 * MIB, 10.0, now=0.0)
    pace.stopped(0, 10.0, now=0.0)
    assert pace.stop_seconds(0, now=KNOWN_SECONDS) == pytest.approx(10.0)
    assert pace.stop_seconds(1 << 30, now=KNOWN_SECONDS + 0.1) == pytest.approx(1.0)
    for _ in range(REMEMBERED):
        pace.copied(100 * MIB, 0.1, now=1.0)
        pace.stopped(0, 0.2, now=1.0)
    assert pace.stop_seconds(100 * MIB, now=1.0) == pytest.approx(0.3)


def test_more_than_the_budget_is_refused_with_both_numbers_and_what_to_do() -> None:
    assert over_budget("m", Pace(), 1 << 40, None, now=0.0) is None
    assert over_budget("m", Pace(), 10 << 20, 10, now=0.0) is None
    refusal = over_budget("m", Pace(), 20 << 20, 10, now=0.0)
    assert refusal is not None
    assert refusal.retryable
    assert refusal.message == (
        "machine m would stand still for about 19.5 ms, with 20480 KiB that it wrote and that are not copied "
        "yet; treeLimits.pauseBudgetMs allows 10 ms. It runs on: fork it when it writes less, or while it is "
        "paused"
    )
