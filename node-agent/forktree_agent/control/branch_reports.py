"""What came of a child's commands, with what they printed: for whoever asks, as long as the Fork exists."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from forktree.models import Fork
from forktree_agent.control.branch_logs import BranchLogs, Printed
from forktree_agent.control.branch_records import CommandRecord, Step
from forktree_agent.control.records import Records


@dataclass(frozen=True, slots=True)
class CommandReport:
    """One command, and what is kept of its output: None while it runs, or where nothing was kept."""

    record: CommandRecord
    printed: Printed | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchReport:
    """One child's commands; None for one that was not begun."""

    exec: CommandReport | None
    score: CommandReport | None
    number: float | None
    """What the scorer printed."""


class BranchReports:
    """Reads what this node keeps of branches."""

    def __init__(self, records: Records, logs: BranchLogs) -> None:
        self._records = records
        self._logs = logs

    def children(self, fork: Fork) -> int | None:
        """How many children of `fork` this node knows; None where it knows nothing of that fork."""
        record = self._records.fork(fork.metadata.uid)
        return None if record is None or record.result is None else len(record.result.children)

    async def of(self, fork: Fork, index: int) -> BranchReport:
        """What came of one child's commands so far. Raises `LogLost`."""
        branch = self._records.branch(fork.metadata.uid, index)
        return BranchReport(
            exec=await self._command(fork, index, Step.EXEC, None if branch is None else branch.exec),
            score=await self._command(fork, index, Step.SCORE, None if branch is None else branch.score),
            number=None if branch is None else branch.number,
        )

    async def _command(
        self, fork: Fork, index: int, step: Step, record: CommandRecord | None
    ) -> CommandReport | None:
        if record is None:
            return None
        # Up to 1 MiB: a millisecond that no fork should wait for.
        printed = await asyncio.to_thread(self._logs.get, fork.metadata.uid, index, step)
        return CommandReport(record, printed)
