"""What is noted of each branch's commands, and of how a fork's children were judged in the end.

A command is noted before it is started and again when it has ended. So it is never started twice: what began
and has no end was cut off with the agent that began it.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from forktree.models import Reason, Uid


class Step(StrEnum):
    """The commands of one branch, in their order."""

    EXEC = "exec"
    SCORE = "score"


class CommandRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A command that was begun."""

    ended: bool = False
    exit_code: int | None = None
    """-1 after a time-out. None where it never ended, or was never started."""
    timed_out: bool = False
    truncated: bool = False
    """The beginning of its output is not kept."""
    reason: Reason | None = None
    """Why its child has no score. None while it runs, and if all is well."""
    message: str | None = None
    """The same in a sentence."""


class BranchRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One child's commands."""

    fork: Uid
    index: int
    exec: CommandRecord | None = None
    score: CommandRecord | None = None
    number: float | None = None
    """What the scorer printed."""

    def command(self, step: Step) -> CommandRecord | None:
        match step:
            case Step.EXEC:
                return self.exec
            case Step.SCORE:
                return self.score

    def noting(self, step: Step, command: CommandRecord, number: float | None) -> BranchRecord:
        """This, with `command` as what is known of `step`, and `number` as what it printed."""
        match step:
            case Step.EXEC:
                return msgspec.structs.replace(self, exec=command)
            case Step.SCORE:
                return msgspec.structs.replace(self, score=command, number=number)

    @property
    def unscored(self) -> CommandRecord | None:
        """The command because of which its child has no score, or None."""
        return next((each for each in (self.exec, self.score) if each is not None and each.reason), None)


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What was decided, once, when every command of a fork was done."""

    losers: tuple[int, ...]
    """Children to be deleted, by index; once `pruned`, those that were."""
    lost: tuple[int, ...]
    """Children that did not live any more."""
    pruned: bool = False
    """The deletions were accepted."""
