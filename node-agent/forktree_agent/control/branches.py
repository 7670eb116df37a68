"""The commands of branches: each child's own, then its scorer. Runs them, and notes what came of each.

What a command does never fails its fork: it only leaves its child without a score, and says why.
"""

from __future__ import annotations

import logging

import msgspec

from forktree.models import Fork, Uid
from forktree.models.fork import BranchExec
from forktree_agent.control.branch_logs import KEPT_BYTES, LogLost, Printed
from forktree_agent.control.branch_records import BranchRecord, CommandRecord, Step
from forktree_agent.control.decide_branch import (
    CutOff,
    Done,
    Next,
    Run,
    cut_off,
    ended,
    next_step,
    no_machine,
    not_ended,
)
from forktree_agent.control.owners import child_owner
from forktree_agent.control.together import each_of
from forktree_agent.control.world import World, loop_now
from forktree_agent.engine.contract import Command, EngineError, ExecResult

log = logging.getLogger(__name__)

COMMANDS_AT_ONCE = 32
"""Of one fork. Each may hold 1 MiB of output, and a fork can have 256 children."""
MARGIN_SECONDS = 30.0
"""Beyond a command's own time: a loaded node is slow to start it, and to carry its output out."""
TELL_SECONDS = 1.0
"""At least so far apart are two looks at the Fork's status because of commands that ended."""


def unfinished(world: World, fork: Fork, index: int) -> bool:
    """Whether one of a child's commands has not come to its end, or was not begun yet."""
    return not isinstance(_next(world, fork, index), Done)


def _next(world: World, fork: Fork, index: int) -> Next:
    record = world.records.branch(fork.metadata.uid, index)
    return next_step(fork.spec.branch(index), fork.spec.score, record)


def show_score(world: World, fork: Uid, index: int) -> None:
    """Have a child's Session say what its scorer printed."""
    branch, child = world.records.branch(fork, index), world.records.session(child_owner(fork, index))
    if branch is None or branch.number is None or child is None or child.scored == branch.number:
        return
    world.records.put_session(msgspec.structs.replace(child, scored=branch.number))
    if child.uid is not None:
        world.session_work.poke(child.uid)


class Branches:
    """Runs commands of forks that are ready. `round` is one worker's step."""

    def __init__(self, world: World) -> None:
        self._world = world

    async def round(self, uid: Uid) -> float | None:
        """Run all that a fork's branches have not run yet, to the end; see `Workers`."""
        world = self._world
        await world.synced.wait()
        fork, record = world.forks.get(uid), world.records.fork(uid)
        if fork is None or record is None or record.result is None or fork.status.parent_uid is None:
            return None
        told_at = loop_now()

        async def one(index: int) -> None:
            nonlocal told_at
            await self._run_branch(fork, index)
            if loop_now() - told_at >= TELL_SECONDS:
                told_at = loop_now()
                world.fork_work.poke(uid)

        indexes = [index for index in range(len(record.result.children)) if unfinished(world, fork, index)]
        await each_of(indexes, one, at_once=COMMANDS_AT_ONCE)
        world.fork_work.poke(uid)
        return None

    async def _run_branch(self, fork: Fork, index: int) -> None:
        # A fork that is deleted loses its record, and then nothing says any more what was run.
        while self._world.records.fork(fork.metadata.uid) and not self._world.tree.doomed(fork.metadata.uid):
            match _next(self._world, fork, index):
                case Done():
                    return
                case CutOff(step=step):
                    self._note(fork.metadata.uid, index, step, cut_off(step))
                case Run(step=step, command=command):
                    await self._run(fork, index, step, command)

    async def _run(self, fork: Fork, index: int, step: Step, wanted: BranchExec) -> None:
        uid = fork.metadata.uid
        owner = child_owner(uid, index)
        machine, bound = self._world.machine(owner), self._world.records.session(owner)
        child = None if bound is None else bound.uid
        if machine is None or child is None:
            self._note(uid, index, step, no_machine(step))
            return
        command = Command(
            argv=wanted.argv,
            timeout_seconds=wanted.timeout_seconds,
            output_limit_bytes=KEPT_BYTES,
            keep_end=True,
        )
        # Noted first, and without any wait in between: whoever comes after us must know that it was begun.
        self._note(uid, index, step, CommandRecord())
        try:
            with self._world.activity.during(child):
                result = await self._world.engine.exec(
                    machine.id, command, deadline=loop_now() + wanted.timeout_seconds + MARGIN_SECONDS
                )
        except EngineError as err:
            self._note(uid, index, step, not_ended(step, err))
        else:
            self._over(uid, index, step, result)

    def _over(self, fork: Uid, index: int, step: Step, result: ExecResult) -> None:
        """A command came to its end. Its output is kept before its end is noted, without any wait."""
        if self._world.records.fork(fork) is None:
            return
        command, number = ended(step, result)
        try:
            self._world.logs.put(fork, index, step, Printed(result.stdout, result.stderr))
        except LogLost as err:
            log.warning("branch_log_lost fork=%s index=%d step=%s error=%r", fork, index, step, err.message)
        self._note(fork, index, step, command, number)
        show_score(self._world, fork, index)

    def _note(
        self, fork: Uid, index: int, step: Step, command: CommandRecord, number: float | None = None
    ) -> None:
        if self._world.records.fork(fork) is None:
            return  # The Fork was deleted meanwhile, and with it all that is known of it.
        known = self._world.records.branch(fork, index) or BranchRecord(fork=fork, index=index)
        self._world.records.put_branch(known.noting(step, command, number))
        if command.ended:
            log.info(
                "branch_command_ended fork=%s index=%d step=%s exit_code=%s reason=%s",
                fork, index, step, command.exit_code, command.reason,
            )  # fmt: skip
