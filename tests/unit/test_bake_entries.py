"""What a node says of a template after a bake."""

from __future__ import annotations

import pytest

from forktree.models import BakePhase, Reason
from forktree_agent.control.bakes import entry_after
from forktree_agent.engine.contract import AtCapacity, BakeFailed
from forktree_agent.journal import JournalError


@pytest.mark.parametrize(
    ("outcome", "phase", "reason"),
    [
        (AtCapacity("no room"), BakePhase.BAKING, Reason.AT_CAPACITY),
        (JournalError("the journal cannot be written"), BakePhase.BAKING, Reason.INTERNAL),
        (BakeFailed("it did not boot"), BakePhase.FAILED, Reason.BAKE_FAILED),
        (ZeroDivisionError(), BakePhase.FAILED, Reason.INTERNAL),
    ],
    ids=["no-room", "full-journal", "no-boot", "defect"],
)
def test_only_what_will_fail_again_is_called_failed(
    outcome: Exception, phase: BakePhase, reason: Reason
) -> None:
    entry = entry_after(outcome, "node-1")
    assert (entry.phase, entry.reason) == (phase, reason)
