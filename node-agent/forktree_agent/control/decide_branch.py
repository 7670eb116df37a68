"""Which command a branch runs next, and what the end of one means. Pure."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Final, TypeAlias

from msgspec.structs import replace

from forktree.models import Reason
from forktree.models.fork import Branch, BranchExec, Scorer
from forktree_agent.control.branch_records import BranchRecord, CommandRecord, Step
from forktree_agent.engine.contract import (
    AtCapacity,
    CommandRefused,
    DeadlineExceeded,
    EngineError,
    ExecResult,
    MachinePaused,
)

_NUMBER: Final = re.compile(rb"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_NUMBER_BYTES: Final = 64
"""A longer one is no number that anybody meant."""
_WORDS: Final = {Step.EXEC: "the branch's command", Step.SCORE: "the scorer"}


@dataclass(frozen=True, slots=True)
class Run:
    """This command is to be run now."""

    step: Step
    command: BranchExec


@dataclass(frozen=True, slots=True)
class CutOff:
    """This command was begun by an agent that ended. It is not run again."""

    step: Step


@dataclass(frozen=True, slots=True)
class Done:
    """Nothing is left to be run."""


Next: TypeAlias = Run | CutOff | Done


def next_step(branch: Branch, scorer: Scorer | None, record: BranchRecord | None) -> Next:
    """What to do for one child whose commands nobody runs at this moment.

    A child whose own command failed is not scored: what its scorer would find is not what was asked for.
    """
    wanted = ((Step.EXEC, branch.exec), (Step.SCORE, None if scorer is None else scorer.exec))
    for step, command in wanted:
        if command is None:
            continue
        known = None if record is None else record.command(step)
        if known is None:
            return Run(step, command)
        if not known.ended:
            return CutOff(step)
        if known.reason is not None:
            return Done()
    return Done()


def ended(step: Step, result: ExecResult) -> tuple[CommandRecord, float | None]:
    """What to note of a command that came to its end, and the score that it printed."""
    if result.timed_out:
        return _timed_out(step, truncated=result.truncated), None
    noted = CommandRecord(ended=True, exit_code=result.exit_code, truncated=result.truncated)
    if result.exit_code != 0:
        message = f"{_WORDS[step]} ended with exit code {result.exit_code}"
        return replace(noted, reason=_failed(step, Reason.EXEC_FAILED), message=message), None
    if step is Step.EXEC:
        return noted, None
    if result.end_lost:
        message = "the scorer printed so much that its last line was lost"
        return replace(noted, reason=Reason.NO_SCORE, message=message), None
    number = score_in(result.stdout)
    if number is None:
        message = "the last line that the scorer printed is not one finite number"
        return replace(noted, reason=Reason.NO_SCORE, message=message), None
    return noted, number


def not_ended(step: Step, error: EngineError) -> CommandRecord:
    """What to note of a command that the engine could not bring to its end."""
    match error:
        case DeadlineExceeded():
            return _timed_out(step, truncated=False)
        case CommandRefused() | AtCapacity() | MachinePaused():
            reason = _failed(step, Reason.EXEC_NOT_STARTED)
            message = f"{_WORDS[step]} could not be started: {error.message}"
        case _:
            reason = Reason.INTERRUPTED
            message = f"{_WORDS[step]} did not come to its end: {error.message}"
    return CommandRecord(ended=True, reason=reason, message=message)


def cut_off(step: Step) -> CommandRecord:
    """What to note of a command whose end no agent saw."""
    message = f"the agent of the node ended while {_WORDS[step]} ran, and it is not run twice"
    return CommandRecord(ended=True, reason=Reason.INTERRUPTED, message=message)


def no_machine(step: Step) -> CommandRecord:
    """What to note of a command for which there is no machine any more."""
    message = f"{_WORDS[step]} was not run, as the child's machine is gone"
    return CommandRecord(ended=True, reason=Reason.INTERRUPTED, message=message)


def score_in(stdout: bytes) -> float | None:
    """The number that is all of the last line, or None. White space after it does not count."""
    last = stdout.rstrip().rpartition(b"\n")[2].strip()
    if len(last) > _NUMBER_BYTES or not _NUMBER.fullmatch(last):
        return None  # Also where it says NaN or infinity, or two numbers.
    number = float(last)
    return number if math.isfinite(number) else None


def _timed_out(step: Step, *, truncated: bool) -> CommandRecord:
    return CommandRecord(
        ended=True,
        exit_code=-1,
        timed_out=True,
        truncated=truncated,
        reason=_failed(step, Reason.EXEC_TIMED_OUT),
        message=f"{_WORDS[step]} was not done in time",
    )


def _failed(step: Step, of_exec: Reason) -> Reason:
    """A scorer that fails in whatever way is one word to whoever reads a status; the sentence says which."""
    return of_exec if step is Step.EXEC else Reason.NO_SCORE
