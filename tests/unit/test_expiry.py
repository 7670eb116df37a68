"""Clocks of trees, with a clock that the test turns: nothing here waits."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forktree.models import Reason, Uid
from forktree_agent.control.activity import Activity
from forktree_agent.control.decide_expiry import (
    HEARTBEAT_SECONDS,
    Answer,
    Heartbeat,
    Missing,
    Renewed,
    Unanswered,
    age_verdict,
    heard,
    heartbeat_verdict,
    idle_verdict,
    latest,
)
from forktree_agent.control.decide_session import Release, View, decide
from forktree_agent.control.records import Limits
from unit.control_facts import machine_of, root, root_record


def limits(*, idle: int | None = None, ttl: int | None = None) -> Limits:
    return Limits(depth=1, memory_bytes=None, idle_seconds=idle, tree_ttl_seconds=ttl)


@dataclass
class Clock:
    """Stands still until it is turned."""

    now: float = 100.0

    def __call__(self) -> float:
        return self.now


# What was done where ----------------------------------------------------------------------------------------

ABOVE = {Uid(below): Uid(up) for up, below in pairwise(("root", "f1", "child", "f2", "grandchild"))}


def test_what_is_done_below_counts_for_all_above_and_not_the_other_way() -> None:
    own = {Uid("root"): 1.0, Uid("child"): 5.0, Uid("grandchild"): 3.0}
    found = latest(own, ABOVE.get)
    assert {uid: found[Uid(uid)] for uid in ("root", "child", "grandchild")} == {
        "root": 5.0,
        "child": 5.0,
        "grandchild": 3.0,
    }


@given(st.dictionaries(st.integers(0, 40), st.integers(0, 50), max_size=30))
def test_the_latest_below_is_the_greatest_of_all_below(own: dict[int, int]) -> None:
    parents = {n: (n - 1) // 2 for n in range(1, 41)}  # Any tree will do.
    ups = {Uid(str(n)): Uid(str(up)) for n, up in parents.items()}

    def is_below(n: int, top: int) -> bool:
        while n > top:
            n = parents[n]
        return n == top

    found = latest({Uid(str(n)): float(at) for n, at in own.items()}, ups.get)
    for top in range(41):
        below = [at for n, at in own.items() if is_below(n, top)]
        assert found.get(Uid(str(top))) == (float(max(below)) if below else None)


def test_owners_in_a_ring_do_not_keep_anybody() -> None:
    ring = {Uid("a"): Uid("b"), Uid("b"): Uid("a")}
    assert latest({Uid("a"): 2.0}, ring.get) == {"a": 2.0, "b": 2.0}


def test_what_is_first_seen_counts_as_active_then() -> None:
    clock = Clock()
    activity = Activity(clock)
    assert activity.of([Uid("s")], lambda _: True) == {"s": 100.0}
    clock.now = 107.0
    assert activity.of([Uid("s")], lambda _: True) == {"s": 100.0}
    activity.touch(Uid("s"))
    assert activity.of([Uid("s")], lambda _: True) == {"s": 107.0}
    assert activity.of([], lambda _: False) == {}
    assert activity.of([Uid("s")], lambda _: True) == {"s": 107.0}


def test_a_long_command_is_activity_for_as_long_as_any_runs() -> None:
    clock = Clock()
    activity = Activity(clock)
    with activity.during(Uid("s")):
        with activity.during(Uid("s")):
            clock.now = 200.0
        clock.now = 300.0
        assert activity.of([Uid("s")], lambda _: True) == {"s": 300.0}
    clock.now = 400.0
    assert activity.of([Uid("s")], lambda _: True) == {"s": 300.0}


def test_how_long_nothing_was_done_and_how_many_commands_there_were() -> None:
    clock, session = Clock(), Uid("s")
    activity = Activity(clock)
    assert (activity.idle_seconds(session), activity.commands(session)) == (None, 0)
    with activity.during(session):
        activity.began_command(session)
        clock.now = 200.0
        assert activity.idle_seconds(session) == 0.0
    clock.now = 203.0
    assert (activity.idle_seconds(session), activity.commands(session)) == (3.0, 1)
    activity.of([], lambda _: False)
    assert (activity.idle_seconds(session), activity.commands(session)) == (None, 0)


# Verdicts ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("idle", "now", "expires"),
    [(None, 1e9, False), (30, 129.9, False), (30, 130.0, True), (30, 90.0, False)],
)
def test_a_session_expires_when_it_was_idle_for_so_long(idle: int | None, now: float, expires: bool) -> None:
    said = idle_verdict(limits(idle=idle), 100.0, now)
    assert (said is not None) is expires
    assert said is None or "30 s" in said


@pytest.mark.parametrize(
    ("ttl", "age_seconds", "ends"),
    [(None, 1e9, False), (60, 59.9, False), (60, 60.0, True), (60, -5.0, False)],
)
def test_a_tree_ends_when_it_is_so_old(ttl: int | None, age_seconds: float, ends: bool) -> None:
    now = datetime.now(UTC)
    said = age_verdict(limits(ttl=ttl), now - timedelta(seconds=age_seconds), now)
    assert (said is not None) is ends
    assert age_verdict(limits(ttl=ttl), None, now) is None


def test_an_expired_session_is_released_and_not_lost_whether_its_machine_runs_still_or_not() -> None:
    record = root_record(expired="idle")
    for machine in (machine_of(root()), None):
        action = decide(View(session=root(), machine=machine, record=record))
        assert action == Release(Reason.EXPIRED, "idle")


# Heartbeats -------------------------------------------------------------------------------------------------

BEAT = Renewed("t1", 15)


def followed(*answers: tuple[float, Answer]) -> tuple[Heartbeat, bool]:
    """What is known after these answers at these times, and whether any of them ended the tree."""
    beat, ended = None, False
    for now, answer in answers:
        beat = heard("lease", beat, answer, now)
        ended = ended or heartbeat_verdict(beat, now) is not None
    assert beat is not None
    return beat, ended


@pytest.mark.parametrize(
    ("answers", "ends"),
    [
        ([(0, BEAT)], False),
        ([(0, BEAT), (14, BEAT)], False),
        ([(0, BEAT), (15, BEAT)], True),
        ([(0, BEAT), (14, Renewed("t2", 15)), (28, Renewed("t2", 15))], False),
        ([(0, BEAT), (14, Renewed("t2", 15)), (29, Renewed("t2", 15))], True),
        # The server was away, so nobody could renew: their time begins anew when it is back.
        ([(0, BEAT), (10, Unanswered()), (100, BEAT)], False),
        ([(0, BEAT), (10, Unanswered()), (100, BEAT), (114, BEAT)], False),
        ([(0, BEAT), (10, Unanswered()), (100, BEAT), (115, BEAT)], True),
        ([(0, BEAT), (100, Unanswered()), (200, Unanswered())], False),
        # A Lease that is not made yet has a minute; one that was deleted its own duration.
        ([(0, Missing()), (HEARTBEAT_SECONDS - 1, Missing())], False),
        ([(0, Missing()), (HEARTBEAT_SECONDS, Missing())], True),
        ([(0, Missing()), (HEARTBEAT_SECONDS - 1, BEAT), (HEARTBEAT_SECONDS + 1, BEAT)], False),
        ([(0, BEAT), (5, Missing()), (14, Missing())], False),
        ([(0, BEAT), (5, Missing()), (15, Missing())], True),
        # Without a duration of its own it has a minute.
        ([(0, Renewed("t1", None)), (59, Renewed("t1", None))], False),
        ([(0, Renewed("t1", None)), (60, Renewed("t1", None))], True),
    ],
)
def test_a_tree_ends_when_its_trainer_is_silent(answers: list[tuple[float, Answer]], ends: bool) -> None:
    assert followed(*answers)[1] is ends


def test_another_lease_begins_anew_and_one_is_asked_for_three_times_in_its_duration() -> None:
    beat, _ = followed((0, BEAT))
    assert heard("other", beat, BEAT, 50.0).silent_since == 50.0
    assert not beat.due(read_at=0, now=4.9)
    assert beat.due(read_at=0, now=5.0)
