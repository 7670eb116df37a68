"""What a node promises, and what gives way when something else needs the room."""

from __future__ import annotations

import pytest

from forktree_agent.engine.contract import AtCapacity, MemoryLimit, TreeId, TreeLimits
from forktree_agent.engine.microvm.admission import Ledger

TREE = TreeLimits(tree=TreeId("tree"), memory_bytes=60)
OTHER = TreeLimits(tree=TreeId("other"))


class Waiting:
    """Spare reservations of a ledger, and which of them were told to go."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.gone: list[str] = []

    def add(self, name: str, size: int, limits: TreeLimits) -> None:
        self._ledger.spare(name, size, limits, give_up=lambda: self.gone.append(name))


def test_what_is_spare_goes_oldest_first_and_no_more_than_is_needed() -> None:
    ledger = Ledger(100)
    waiting = Waiting(ledger)
    ledger.reserve("machine", 40, OTHER)
    for name in ("a", "b", "c"):
        waiting.add(name, 20, OTHER)
    assert ledger.usage().reserved_bytes == 40
    ledger.reserve("another", 30, OTHER)
    assert waiting.gone == ["a", "b"]
    ledger.free("b")  # As whoever ends it does, once more.
    with pytest.raises(AtCapacity, match="only 0 MiB"):
        waiting.add("d", 20, OTHER)
    assert ledger.usage().reserved_bytes == 70


def test_nothing_goes_for_what_does_not_fit_all_the_same() -> None:
    ledger = Ledger(100)
    waiting = Waiting(ledger)
    ledger.reserve("machine", 60, OTHER)
    waiting.add("a", 20, OTHER)
    with pytest.raises(AtCapacity):
        ledger.reserve("large", 50, OTHER)
    with pytest.raises(AtCapacity):
        ledger.admit(50, None, "it")
    assert waiting.gone == []


def test_a_tree_at_its_limit_takes_what_waits_for_itself() -> None:
    ledger = Ledger(1000)
    waiting = Waiting(ledger)
    ledger.reserve("machine", 20, TREE)
    waiting.add("other", 20, OTHER)
    waiting.add("own", 30, TREE)
    with pytest.raises(MemoryLimit):
        waiting.add("too much", 20, TREE)
    ledger.reserve("child", 30, TREE)
    assert waiting.gone == ["own"]
    with pytest.raises(MemoryLimit):
        ledger.reserve("one more", 20, TREE)
    assert waiting.gone == ["own"]


def test_what_was_taken_is_asked_for_anew() -> None:
    ledger = Ledger(100)
    waiting = Waiting(ledger)
    waiting.add("a", 60, OTHER)
    ledger.free("a")
    ledger.reserve("a", 60, OTHER)
    with pytest.raises(AtCapacity):
        ledger.reserve("b", 60, OTHER)
    assert waiting.gone == []
