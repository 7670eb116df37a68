"""What branches printed: kept, found again, and forgotten."""

from __future__ import annotations

from pathlib import Path

import pytest

from forktree.models import Uid
from forktree_agent.control.branch_logs import BranchLogs, LogLost, Printed
from forktree_agent.control.branch_records import BranchRecord, CommandRecord, Step
from forktree_agent.control.records import Records
from forktree_agent.journal import Journal
from unit.control_facts import FORK, fork_record

OTHER = Uid("other-uid")


def test_what_was_printed_is_found_again_by_the_next_agent(tmp_path: Path) -> None:
    logs = BranchLogs.opened(tmp_path / "logs", set())
    logs.put(FORK, 0, Step.EXEC, Printed(b"out\n\x00\xff", b"err"))
    logs.put(FORK, 0, Step.SCORE, Printed(b"", b""))
    logs.put(FORK, 11, Step.EXEC, Printed(b"eleven", b""))
    again = BranchLogs.opened(tmp_path / "logs", {FORK})
    assert again.get(FORK, 0, Step.EXEC) == Printed(b"out\n\x00\xff", b"err")
    assert again.get(FORK, 0, Step.SCORE) == Printed(b"", b"")
    assert again.get(FORK, 11, Step.EXEC) == Printed(b"eleven", b"")
    assert again.get(FORK, 1, Step.EXEC) is None
    assert again.get(OTHER, 0, Step.EXEC) is None


def test_what_speaks_of_no_fork_any_more_goes(tmp_path: Path) -> None:
    logs = BranchLogs.opened(tmp_path, set())
    logs.put(FORK, 0, Step.EXEC, Printed(b"out", b""))
    logs.put(OTHER, 0, Step.EXEC, Printed(b"out", b""))
    BranchLogs.opened(tmp_path, {FORK})
    assert [path.name for path in tmp_path.iterdir()] == [FORK]
    logs.remove(FORK)
    logs.remove(FORK)
    assert list(tmp_path.iterdir()) == []


def test_a_log_that_cannot_be_kept_says_so(tmp_path: Path) -> None:
    logs = BranchLogs.opened(tmp_path, set())
    (tmp_path / FORK).write_text("in the way")
    with pytest.raises(LogLost):
        logs.put(FORK, 0, Step.EXEC, Printed(b"out", b""))
    assert logs.get(FORK, 0, Step.EXEC) is None


def test_a_branch_is_remembered_as_long_as_its_fork_and_no_longer(tmp_path: Path) -> None:
    records = Records(Journal.opened(tmp_path, "boot"))
    records.put_fork(fork_record())
    noted = BranchRecord(fork=FORK, index=1).noting(Step.EXEC, CommandRecord(), None)
    records.put_branch(noted)
    assert Records(Journal.opened(tmp_path, "boot")).branch(FORK, 1) == noted
    records.remove_fork(FORK)
    assert records.branch(FORK, 1) is None
    assert Records(Journal.opened(tmp_path, "boot")).branch(FORK, 1) is None
    assert list(tmp_path.glob("*/*")) == []


def test_a_branch_whose_fork_was_forgotten_first_is_forgotten_too(tmp_path: Path) -> None:
    journal = Journal.opened(tmp_path, "boot")
    Records(journal).put_branch(BranchRecord(fork=FORK, index=0))
    assert Records(journal).branch(FORK, 0) is None
    assert list(tmp_path.glob("*/*")) == []
