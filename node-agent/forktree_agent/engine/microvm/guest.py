"""The agent's end of the guest channel: commands in, their output out, and the identity after a fork.

What comes from the guest is a stranger's word. Every frame is checked against what was asked, frames of
another generation or of commands that nobody can ask for are dropped, and all that is kept has a bound. A
request that had reached the guest before a fork is answered by the parent and by every child; in a child it
is a carried command.
"""

from __future__ import annotations

import asyncio
import math
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, assert_never

from forktree_agent.commons import Commons
from forktree_agent.engine.contract import (
    AtCapacity,
    Command,
    CommandRefused,
    DeadlineExceeded,
    ExecOutcome,
    ExecResult,
    ExecState,
    MachineGone,
)
from forktree_agent.engine.microvm import guest_frames as frames
from forktree_agent.engine.microvm.guest_asking import Asking
from forktree_agent.engine.microvm.guest_execs import (
    READ_FOR_END_BYTES,
    Ending,
    ExecTally,
    GuestExec,
    outcome_of,
)
from forktree_agent.engine.microvm.guest_line import GuestError, GuestLine, fail, quoted, settle
from forktree_agent.engine.microvm.kept_execs import KeptExecs
from forktree_agent.engine.microvm.kept_output import NODE_BYTES, Allowance
from forktree_agent.engine.microvm.kept_reading import KeptExec

if TYPE_CHECKING:
    import socket

UNIDENTIFIED: Final = str(uuid.UUID(int=0))
"""The generation of a guest that has had no identity yet."""

_TOOL = "/proc/1/exe"
"""Our init, which is also the guest's tools: there whatever the image has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who a machine is from its first instant on."""

    generation: str
    hostname: str
    unix_ns: int
    """Wall clock, nanoseconds since 1970."""
    entropy: bytes
    """32 bytes that no other machine gets."""
    env: Mapping[str, str]


class GuestChannel(GuestLine):
    """Speaks with one guest, before and after the agent that began it."""

    def __init__(
        self,
        sock: socket.socket,
        name: str,
        allowance: Allowance | None = None,
        tally: ExecTally | None = None,
        backlog: Commons | None = None,
    ) -> None:
        """`name` is the machine's, for messages. `allowance`: for output that is kept, of all machines;
        `tally`: of how commands ended, in all machines; `backlog`: for what waits for any of them."""
        super().__init__(sock, name, backlog)
        self._booted: asyncio.Future[frames.Booted] = self._loop.create_future()
        self._started: asyncio.Future[frames.Started | frames.StartFailed] | None = None
        self._identities: dict[str, asyncio.Future[frames.Identified | frames.IdentityFailed]] = {}
        self.asking = Asking(self)
        self._running: dict[str, GuestExec] = {}
        self._tally = ExecTally() if tally is None else tally
        self.kept = KeptExecs(name, self, allowance or Allowance(NODE_BYTES), self._tally)
        """Commands that are tied to nobody."""
        self._workload_exit: frames.WorkloadExit | None = None

    @property
    def workload_exit(self) -> frames.WorkloadExit | None:
        """How the template's command ended, once the guest has told."""
        return self._workload_exit

    async def wait_booted(self, *, deadline: float) -> None:
        """Until init serves. Raises `DeadlineExceeded`, `MachineGone`, `GuestError` for another protocol."""
        booted = await self.wait(self._booted, "boot", deadline)
        if booted.protocol != frames.PROTOCOL:
            raise GuestError(
                f"machine {self._name} speaks protocol {booted.protocol}, this agent speaks {frames.PROTOCOL}"
            )

    async def start_workload(
        self, argv: Sequence[str], env: Mapping[str, str], *, folder: str = "/", deadline: float
    ) -> None:
        """Set the template's environment and `folder` for all commands to come; start its command unless
        `argv` is empty.

        Once in a machine's life, before it is frozen. Raises `CommandRefused` if the command cannot be run.
        """
        line = self._encode(frames.Start(argv=tuple(argv), env=dict(env), cwd=folder))
        self._started = self._loop.create_future()
        self._send(line)
        outcome = await self.wait(self._started, "start the workload", deadline)
        if isinstance(outcome, frames.StartFailed):
            raise CommandRefused(quoted(outcome.message))

    def queue_identity(self, identity: Identity) -> None:
        """Put the identity into the channel before the guest runs, so that it is the first thing it reads.

        Never waits. `identified` tells how it went. Raises `MachineGone`, and `CommandRefused` for text that
        is not Unicode.
        """
        request = frames.TakeIdentity(
            generation=identity.generation,
            hostname=identity.hostname,
            unix_ns=identity.unix_ns,
            entropy=identity.entropy,
            env=dict(identity.env),
        )
        self._identities[identity.generation] = self._loop.create_future()
        self.kept.open()
        self._send(self._encode(request))

    async def identified(self, generation: str, *, deadline: float) -> None:
        """Until the guest has taken on the identity queued with this generation.

        Raises `DeadlineExceeded`, `MachineGone`, `GuestError` if it could not.
        """
        answer = self._identities.setdefault(generation, self._loop.create_future())
        outcome = await self.wait(answer, "take on its identity", deadline)
        if isinstance(outcome, frames.IdentityFailed):
            raise GuestError(
                f"machine {self._name} could not take on its identity: {quoted(outcome.message)}"
            )

    def take_over(self) -> None:
        """Ask for the commands that an agent before us began: they are carried ones from here on."""
        self.kept.open()
        self.send(frames.ListExecs())

    def set_clock(self, unix_ns: int) -> None:
        """Have the guest set its wall clock, nanoseconds since 1970, before it does anything else."""
        self.send(frames.SetClock(unix_ns=unix_ns))

    async def exec(self, command: Command, generation: str, *, deadline: float) -> ExecResult:
        """Run a command to its end in the machine of this generation.

        On cancellation or deadline the command is killed in the guest. Raises `CommandRefused` if it did not
        start, `AtCapacity` while too many run or too much input waits, `DeadlineExceeded`, `MachineGone`.
        """
        exec_id = self.new_id(command)
        limit = READ_FOR_END_BYTES if command.keep_end else command.output_limit_bytes
        end_bytes = command.output_limit_bytes if command.keep_end else None
        running = GuestExec(
            generation, limit, self._loop.create_future(), end_bytes=end_bytes, room=command.room
        )
        try:
            self._running[exec_id] = running
            self.start(exec_id, command, generation, None)
            ended = await self.wait(
                running.ended, f"run {command.argv[0]!r}" if command.argv else "run", deadline
            )
        except (DeadlineExceeded, asyncio.CancelledError):
            self._tally[ExecOutcome.ABANDONED] += 1
            if self._end is None:
                self.cancel(exec_id)
            raise
        except MachineGone:
            self._tally[ExecOutcome.LOST] += 1
            raise
        finally:
            del self._running[exec_id]
        self._tally[outcome_of(ended)] += 1
        return self._outcome(running, ended)

    def new_id(self, command: Command) -> str:
        """What the command is called. Raises `CommandRefused` if one of that id runs."""
        exec_id = command.id or uuid.uuid4().hex
        if exec_id in self._running or not self.kept.forget(exec_id):
            raise CommandRefused(f"a command with the id {exec_id} runs already")
        return exec_id

    def must_be_kept(self, exec_id: str) -> None:
        """Raises `CommandRefused` for a command whose output is its caller's alone."""
        if exec_id in self._running:
            raise CommandRefused(f"command {exec_id} is tied to its caller: begin it detached or streamed")

    def start(self, exec_id: str, command: Command, generation: str, flow: frames.Flow | None) -> None:
        """Send a command to the guest. Raises `CommandRefused`, `AtCapacity` and `MachineGone`."""
        is_open = command.stdin_open or command.terminal is not None
        size = command.terminal
        request = frames.Exec(
            id=exec_id,
            generation=generation,
            argv=(_TOOL, *command.argv) if command.builtin else command.argv,
            env=dict(command.env),
            cwd=command.cwd,
            stdin=None if is_open else command.stdin or None,
            timeout_ms=max(1, math.ceil(command.timeout_seconds * 1000)),
            output_limit=READ_FOR_END_BYTES if command.keep_end else command.output_limit_bytes,
            stdin_open=is_open,
            terminal=None if size is None else frames.TerminalSize(rows=size.rows, cols=size.cols),
            flow=flow,
        )
        line = self._encode(request)
        if len(line) > frames.MAX_REQUEST_BYTES:
            raise CommandRefused(
                f"the command and its input take {len(line)} bytes, more than {frames.MAX_REQUEST_BYTES}"
            )
        self._send_if_read(line)

    def cancel(self, exec_id: str) -> None:
        """Have a command killed, however much waits. Raises `MachineGone`."""
        self._send(self._encode(frames.Cancel(id=exec_id)))

    def execs(self) -> tuple[ExecState, ...]:
        """The commands that can be asked for, in order of their ids."""
        states = [known.state() for known in self.kept.all()]
        states += [running.state(exec_id) for exec_id, running in self._running.items()]
        return tuple(sorted(states, key=lambda state: state.id))

    def running_execs(self) -> int:
        """How many commands run."""
        return len(self._running) + sum(1 for known in self.kept.all() if not known.ended.done())

    async def attach(self, exec_id: str, *, deadline: float) -> ExecResult:
        """The end of a command that somebody waits for, or of a kept one, with what is kept of its output.

        Giving up leaves the command alone. Raises `ExecNotFound`, and what `exec` raises.
        """
        known: GuestExec | KeptExec | None = self._running.get(exec_id)
        if known is None:
            known = await self.kept.find(exec_id, deadline=deadline)
            await self.kept.recall(known, deadline=deadline)
        return self._outcome(known, await self.wait(known.ended, f"end command {exec_id}", deadline))

    async def kill(self, exec_id: str, *, deadline: float) -> bool:
        """Kill a command and wait for its end. False: it had ended before. Raises as `attach` does."""
        known = self._running.get(exec_id) or await self.kept.find(exec_id, deadline=deadline)
        if known.ended.done():
            return False
        self.cancel(exec_id)
        await self.wait(known.ended, f"end command {exec_id}", deadline)
        return True

    def _outcome(self, known: GuestExec | KeptExec, ended: Ending) -> ExecResult:
        if isinstance(ended, frames.ExecFailed):
            raise self.refusal(ended)
        return known.result(ended)

    def refusal(self, failed: frames.ExecFailed) -> CommandRefused | AtCapacity | GuestError:
        """Why a command did not start, as the error that a caller can act on."""
        message = quoted(failed.message)
        match failed.code:
            case frames.RefusalCode.TOO_MANY:
                return AtCapacity(f"machine {self._name}: {message}")
            case frames.RefusalCode.WRONG_GENERATION:
                return GuestError(f"machine {self._name} is not the one it was taken for: {message}")
            case _:
                return CommandRefused(message)

    def _take(self, report: frames.Report) -> None:
        match report:
            case frames.Booted():
                settle(self._booted, report)
            case frames.Started() | frames.StartFailed():
                settle(self._started, report)
            case frames.Identified() | frames.IdentityFailed():
                settle(self._identities.get(report.generation), report)
            case frames.Begun() | frames.StdinTaken():
                self.kept.take(report)
            case frames.Replayed():
                self.kept.replayed(report)
            case frames.Output():
                if (running := self._running.get(report.id)) is None:
                    self.kept.take(report)
                elif _is_open(running, report):
                    running.take(report)
            case frames.Exited() | frames.ExecFailed():
                if (running := self._running.get(report.id)) is None:
                    self.kept.take(report)
                elif _is_open(running, report):
                    settle(running.ended, report)
            case frames.Running():
                self.kept.confirm(each for each in report.ids if each not in self._running)
            case frames.WorkloadExit():
                self._workload_exit = self._workload_exit or report
            case frames.Pong() | frames.HttpStatus() | frames.Frozen() | frames.Thawed():
                self.asking.take(report)
            case _:
                assert_never(report)

    def _ended(self, end: MachineGone) -> None:
        fail([self._booted], end)
        if self._started is not None:
            fail([self._started], end)
        fail(self._identities.values(), end)
        fail((running.ended for running in self._running.values()), end)
        self.asking.close(end)
        self.kept.close(end)


def _is_open(running: GuestExec, report: frames.Output | Ending) -> bool:
    return running.generation == report.generation and not running.ended.done()
