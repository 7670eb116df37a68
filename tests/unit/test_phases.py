"""Which phase may follow which: every pair of every table, against what the design says in words."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from itertools import product
from typing import TypeVar

import pytest

from forktree.models.reasons import (
    BakePhase,
    ForkPhase,
    SessionPhase,
    WrongStep,
    bake_step,
    fork_step,
    session_step,
)

Phase = TypeVar("Phase", bound=StrEnum)

SESSION_ALLOWED = {
    "Pending": {"Starting", "Running", "Paused", "Failed", "Released"},
    "Starting": {"Running", "Paused", "Failed", "Released"},
    "Running": {"Paused", "Failed", "Released"},
    "Paused": {"Running", "Failed", "Released"},
}
FORK_ALLOWED = {
    "Pending": {"Forking", "Running", "Complete", "Failed"},
    "Forking": {"Running", "Complete", "Failed"},
    "Running": {"Complete", "Failed"},
}
BAKE_ALLOWED = {"Baking": {"Ready", "Failed"}, "Ready": {"Baking"}, "Failed": {"Baking"}}


@pytest.mark.parametrize(("seen", "wanted"), list(product(SessionPhase, repeat=2)))
def test_session_goes_only_forward(seen: SessionPhase, wanted: SessionPhase) -> None:
    check_step(session_step, SESSION_ALLOWED, seen, wanted)


@pytest.mark.parametrize(("seen", "wanted"), list(product(ForkPhase, repeat=2)))
def test_fork_goes_only_forward(seen: ForkPhase, wanted: ForkPhase) -> None:
    check_step(fork_step, FORK_ALLOWED, seen, wanted)


@pytest.mark.parametrize(("seen", "wanted"), list(product(BakePhase, repeat=2)))
def test_bake_ends_and_may_begin_again(seen: BakePhase, wanted: BakePhase) -> None:
    check_step(bake_step, BAKE_ALLOWED, seen, wanted)


def check_step(
    step: Callable[[Phase, Phase], Phase], allowed: dict[str, set[str]], seen: Phase, wanted: Phase
) -> None:
    if wanted == seen or wanted in allowed.get(seen, set()):
        assert step(seen, wanted) is wanted
        return
    with pytest.raises(WrongStep) as caught:
        step(seen, wanted)
    assert (caught.value.seen, caught.value.wanted) == (seen, wanted)
    assert caught.value.allowed == allowed.get(seen, set())
    assert str(seen) in str(caught.value)


def test_terminal_phases_are_those_that_nothing_follows() -> None:
    assert [phase for phase in SessionPhase if phase.terminal] == [SessionPhase.FAILED, SessionPhase.RELEASED]
    assert [phase for phase in ForkPhase if phase.terminal] == [ForkPhase.COMPLETE, ForkPhase.FAILED]
