"""What many take from: never more than there is, and something for whoever comes next."""

from __future__ import annotations

import random

from forktree_agent.commons import Commons

WHOLE = 1 << 20


def one(holder: str) -> dict[str, float]:
    return {holder: 1.0}


def test_who_is_alone_gets_half_and_the_next_a_share_of_the_rest() -> None:
    commons = Commons(WHOLE)
    assert commons.take(WHOLE, one("a")) == WHOLE // 2
    assert commons.take(1, one("a")) == 0
    assert commons.take(WHOLE, one("b")) == WHOLE // 4
    assert commons.held == WHOLE * 3 // 4


def test_what_is_given_back_is_there_for_all() -> None:
    commons = Commons(WHOLE)
    given = commons.take(WHOLE, one("a"))
    commons.give_back(given, ["a"])
    assert (commons.held, commons.held_by("a")) == (0, 0)
    assert commons.take(WHOLE, one("b")) == WHOLE // 2


def test_one_session_leaves_something_to_others_of_its_namespace() -> None:
    commons = Commons(WHOLE)
    assert commons.take(WHOLE, {"ns": 1.0, "ns/loud": 0.5}) == WHOLE // 3
    assert commons.take(WHOLE, {"ns": 1.0, "ns/other": 0.5}) > WHOLE // 8
    assert commons.take(WHOLE, {"next": 1.0, "next/any": 0.5}) > WHOLE // 8


def test_whatever_is_asked_the_whole_is_not_exceeded_and_nothing_is_lost() -> None:
    chance = random.Random(7)
    commons, held = Commons(WHOLE), dict[tuple[str, ...], int]()
    for _ in range(20_000):
        namespace = chance.choice("abcd")
        weights = {namespace: chance.choice([0.5, 1.0, 2.0]), f"{namespace}/{chance.choice('xyz')}": 0.5}
        key = tuple(weights)
        if chance.random() < 0.6:
            given = commons.take(chance.randrange(WHOLE // 4), weights)
            assert given >= 0
            held[key] = held.get(key, 0) + given
        elif key in held:
            commons.give_back(held.pop(key), key)
        assert commons.held == sum(held.values()) <= WHOLE
    for key, count in held.items():
        commons.give_back(count, key)
    assert commons.held == 0
