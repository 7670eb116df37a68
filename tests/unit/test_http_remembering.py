"""Answers about callers are kept for a time and in a number that are both bounded."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from forktree_agent.http.remembering import Remembered


class Clock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def test_an_answer_is_forgotten_at_its_time() -> None:
    clock = Clock()
    answers: Remembered[str, int] = Remembered(8, clock)
    answers.keep("a", 1, 10)
    clock.seconds = 9.99
    assert answers.get("a") == 1
    clock.seconds = 10
    assert answers.get("a") is None
    assert len(answers) == 0


def test_an_answer_whose_time_is_over_is_not_kept() -> None:
    answers: Remembered[str, int] = Remembered(8, Clock())
    answers.keep("expired", 1, -0.5)
    assert answers.get("expired") is None


def test_the_least_recently_used_answer_goes_first() -> None:
    answers: Remembered[str, int] = Remembered(2, Clock())
    answers.keep("a", 1, 10)
    answers.keep("b", 2, 10)
    assert answers.get("a") == 1
    answers.keep("c", 3, 10)
    assert answers.get("b") is None
    assert answers.get("a") == 1


@given(st.lists(st.tuples(st.integers(0, 30), st.floats(0, 20)), max_size=100))
def test_it_never_holds_more_than_its_limit(kept: list[tuple[int, float]]) -> None:
    clock = Clock()
    answers: Remembered[int, float] = Remembered(5, clock)
    for key, seconds in kept:
        answers.keep(key, seconds, seconds)
        clock.seconds += 0.5
        assert len(answers) <= 5
