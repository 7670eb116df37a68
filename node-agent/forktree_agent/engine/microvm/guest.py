"""The agent's end of the guest channel: commands in, their output out, and the identity after a fork.

What comes from the guest is a stranger's word. Every frame is checked against what was asked, frames of
another generation or of commands that nobody can ask for are dropped, all that is kept has a bound, and a
guest that goes on talking nonsense is not listened to any more. A request that had reached the guest before a
fork is answered by the parent and by every child; in a child it is a carried command.
"""

from __future__ import annotations

import asyncio
import logging
import math
import uuid
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import chain, islice
from typing import TYPE_CHECKING, Final, TypeVar, assert_never

from forktree_agent.engine.contract import (
    AtCapacity,
    Command,
    CommandRefused,
    DeadlineExceeded,
    ExecOutcome,
    ExecResult,
    ExecState,
    MachineGone,
    NotStill,
)
from forktree_agent.engine.microvm import guest_frames as frames
from forktree_agent.engine.microvm.guest_execs import (
    READ_FOR_END_BYTES,
    Ending,
    ExecTally,
    GuestExec,
    outcome_of,
)
from forktree_agent.engine.microvm.kept_execs import KeptExecs
from forktree_agent.engine.microvm.kept_output import NODE_BYTES, Allowance
from forktree_agent.engine.microvm.kept_reading import Bell, KeptExec

if TYPE_CHECKING:
    import socket

log = logging.getLogger(__name__)

UNIDENTIFIED: Final = str(uuid.UUID(int=0))
"""The generation of a guest that has had no identity yet."""

_READ_BYTES = 256 << 10
LINES_AT_ONCE = 256
"""Are read of one guest, in some 0.5 ms; then others get their turn."""
_REST_SECONDS = 0.005
"""After so many lines at once, until the guest has its turn again: a flood gets a tenth of our time. Our init
sends 48 KiB of output a line, so this slows none but the smallest of them."""
_BACKLOG_BYTES = 64 << 20
"""Commands are refused while this much waits to be taken by the guest."""
_MAX_NOISE_LINES = 100
"""A fork and a change of agents leave one cut line each; more than this is not chance."""
_TOOL = "/proc/1/exe"
"""Our init, which is also the guest's tools: there whatever the image has."""
_QUOTED_CHARACTERS = 500
"""Of a guest's sentence in ours."""

_T = TypeVar("_T")


class GuestError(MachineGone):
    """The guest does not do what our init does, so nothing can be asked of it: the machine is lost."""


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


class GuestChannel:
    """Speaks with one guest, before and after the agent that began it, over a stream socket that it owns.

    Made inside a running event loop. Works, in both directions, while `running()`; what is queued before that
    is sent as far as the socket takes it at once.
    """

    def __init__(
        self,
        sock: socket.socket,
        name: str,
        allowance: Allowance | None = None,
        tally: ExecTally | None = None,
    ) -> None:
        """`name` is the machine's, for messages. `allowance`: for output that is kept, of all machines;
        `tally`: of how commands ended, in all machines."""
        self._loop = asyncio.get_running_loop()
        self._socket = sock
        self._socket.setblocking(False)
        self._name = name
        self._cutter = frames.LineCutter()
        self._noise_lines = 0
        # Ends a line that an agent before us, or the parent's agent before a fork, did not.
        self._unsent: deque[memoryview] = deque([memoryview(b"\n")])
        self._unsent_bytes = 1
        self._sent = Bell()
        self._is_read = False
        self._lines: Iterator[bytes] = iter(())
        self._resting: asyncio.TimerHandle | None = None
        self.lines_read = 0
        """So far, those that were no frames too."""
        self._end: MachineGone | None = None
        self._booted: asyncio.Future[frames.Booted] = self._loop.create_future()
        self._started: asyncio.Future[frames.Started | frames.StartFailed] | None = None
        self._identities: dict[str, asyncio.Future[frames.Identified | frames.IdentityFailed]] = {}
        self._pings: dict[str, asyncio.Future[frames.Pong]] = {}
        self._gets: dict[str, asyncio.Future[frames.HttpStatus]] = {}
        self._freezes: dict[str, asyncio.Future[frames.Frozen]] = {}
        self._thaws: dict[str, asyncio.Future[frames.Thawed]] = {}
        self._running: dict[str, GuestExec] = {}
        self._tally = ExecTally() if tally is None else tally
        self.kept = KeptExecs(name, self, allowance or Allowance(NODE_BYTES), self._tally)
        """Commands that are tied to nobody."""
        self._workload_exit: frames.WorkloadExit | None = None

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Listen to the guest until left, then close the socket. Enter once.

        If the channel breaks meanwhile, every wait fails with `MachineGone`, or `GuestError` if it was the
        guest that broke it, and so does whatever is asked afterwards.
        """
        if self._end is None:
            self._is_read = True
            self._loop.add_reader(self._socket, self._on_readable)
            self._flush()
        try:
            yield
        finally:
            self.close()

    def close(self) -> None:
        """Let go of the channel; the machine runs on. Waits fail with `MachineGone`. Idempotent."""
        self._break(MachineGone(f"the channel to machine {self._name} was closed"))
        self._socket.close()

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
            raise CommandRefused(_quoted(outcome.message))

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
                f"machine {self._name} could not take on its identity: {_quoted(outcome.message)}"
            )

    async def ping(self, *, deadline: float) -> None:
        """Until init answers. Raises `DeadlineExceeded`, `MachineGone`."""
        nonce = uuid.uuid4().hex
        self._pings[nonce] = self._loop.create_future()
        try:
            self.send(frames.Ping(nonce=nonce))
            await self.wait(self._pings[nonce], "answer", deadline)
        finally:
            del self._pings[nonce]

    def take_over(self) -> None:
        """Ask for the commands that an agent before us began: they are carried ones from here on."""
        self.kept.open()
        self.send(frames.ListExecs())

    def set_clock(self, unix_ns: int) -> None:
        """Have the guest set its wall clock, nanoseconds since 1970, before it does anything else."""
        self.send(frames.SetClock(unix_ns=unix_ns))

    async def freeze(self, *, deadline: float) -> None:
        """Have all programs of the guest stop, until `queue_thaw`. Returns when they have.

        Raises `NotStill` if they run on, `DeadlineExceeded`, `MachineGone`.
        """
        nonce = uuid.uuid4().hex
        self._freezes[nonce] = self._loop.create_future()
        try:
            self.send(frames.Freeze(nonce=nonce))
            frozen = await self.wait(self._freezes[nonce], "stop its programs", deadline)
        finally:
            del self._freezes[nonce]
        if frozen.message is not None:
            raise NotStill(
                f"the programs of machine {self._name} do not stand still: {_quoted(frozen.message)}"
            )

    def queue_thaw(self) -> asyncio.Future[frames.Thawed]:
        """Have them go on, whether they were stopped or not. What this returns is for `thawed`.

        Never waits. Raises `MachineGone`.
        """
        nonce = uuid.uuid4().hex
        self.send(frames.Thaw(nonce=nonce))
        answer = self._thaws[nonce] = self._loop.create_future()
        return answer

    async def thawed(self, answer: asyncio.Future[frames.Thawed], *, deadline: float) -> None:
        """Until they go on. Raises `DeadlineExceeded`, `MachineGone`, `GuestError` if they could not."""
        thawed = await self.wait(answer, "let its programs go on", deadline)
        if thawed.message is not None:
            raise GuestError(
                f"machine {self._name} could not let its programs go on: {_quoted(thawed.message)}"
            )

    async def http_get(
        self, port: int, path: str, *, timeout_seconds: float, deadline: float
    ) -> frames.HttpStatus:
        """What a server in the guest answers to a request over loopback. That it does not is an answer too.

        Raises `DeadlineExceeded` if the guest itself does not answer, `MachineGone`.
        """
        nonce = uuid.uuid4().hex
        self._gets[nonce] = self._loop.create_future()
        timeout_ms = max(1, math.ceil(timeout_seconds * 1000))
        try:
            self.send(frames.HttpGet(nonce=nonce, port=port, path=path, timeout_ms=timeout_ms))
            return await self.wait(self._gets[nonce], f"ask port {port}", deadline)
        finally:
            del self._gets[nonce]

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

    def send(self, request: frames.Request) -> None:
        """Raises `MachineGone`, `AtCapacity`, and `CommandRefused` for text that is not Unicode."""
        self._send_if_read(self._encode(request))

    def cancel(self, exec_id: str) -> None:
        """Have a command killed, however much waits. Raises `MachineGone`."""
        self._send(self._encode(frames.Cancel(id=exec_id)))

    @property
    def unsent_bytes(self) -> int:
        """What waits to be read by the guest."""
        return self._unsent_bytes

    @property
    def is_resting(self) -> bool:
        """Whether not all that was read of the guest is dealt with yet."""
        return self._resting is not None

    def is_behind(self, more_than_bytes: int) -> bool:
        """Whether more than so much waits to be read by the guest. Nothing waits for one that is gone."""
        return self._unsent_bytes > more_than_bytes

    async def taken(self, but_for_bytes: int) -> None:
        """Until no more than so much waits, or the guest is gone. Only reading it counts, not saying so."""
        while self.is_behind(but_for_bytes):
            await self._sent.heard(math.inf)

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
        message = _quoted(failed.message)
        match failed.code:
            case frames.RefusalCode.TOO_MANY:
                return AtCapacity(f"machine {self._name}: {message}")
            case frames.RefusalCode.WRONG_GENERATION:
                return GuestError(f"machine {self._name} is not the one it was taken for: {message}")
            case _:
                return CommandRefused(message)

    async def wait(self, future: asyncio.Future[_T], what: str, deadline: float) -> _T:
        """What the guest answers. Raises `DeadlineExceeded`, `MachineGone`."""
        if self._end is not None:
            raise self._ended(self._end)
        try:
            async with asyncio.timeout_at(deadline):
                # Shielded: one that gives up must not take the answer away from the others.
                return await asyncio.shield(future)
        except TimeoutError:
            raise DeadlineExceeded(f"machine {self._name} did not {what} before the deadline") from None

    @staticmethod
    def _ended(end: MachineGone) -> MachineGone:
        """The same again: one exception raised many times would collect the traces of all."""
        return type(end)(end.message)

    def _encode(self, request: frames.Request) -> bytes:
        try:
            return frames.encode(request)
        except UnicodeEncodeError:
            raise CommandRefused("text for the guest is not valid Unicode") from None

    # Sending

    def _send_if_read(self, line: bytes) -> None:
        if self._end is None and self._unsent_bytes > _BACKLOG_BYTES:
            raise AtCapacity(f"{self._unsent_bytes} bytes wait to be read by machine {self._name}")
        self._send(line)

    def _send(self, line: bytes) -> None:
        if self._end is not None:
            raise self._ended(self._end)
        self._unsent.append(memoryview(line))
        self._unsent_bytes += len(line)
        self._flush()

    def _flush(self) -> None:
        while self._unsent:
            try:
                sent = self._socket.send(self._unsent[0])
            except BlockingIOError:
                if self._is_read:
                    self._loop.add_writer(self._socket, self._flush)
                return
            except OSError as err:
                self._break(MachineGone(f"machine {self._name} ended: {err}"))
                return
            self._unsent_bytes -= sent
            self._sent.ring()
            if sent == len(self._unsent[0]):
                self._unsent.popleft()
            else:
                self._unsent[0] = self._unsent[0][sent:]
        self._loop.remove_writer(self._socket)

    # Receiving

    def _on_readable(self) -> None:
        try:
            chunk = self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError as err:
            self._break(MachineGone(f"machine {self._name} ended: {err}"))
            return
        if not chunk:
            self._break(MachineGone(f"machine {self._name} ended"))
            return
        self._lines = self._cutter.feed(chunk)
        self._take_lines()

    def _take_lines(self) -> None:
        """As many as there may be at once of what was read. While some are left, no more is read."""
        was_resting, self._resting = self._resting is not None, None
        try:
            for line in islice(self._lines, LINES_AT_ONCE):
                self.lines_read += 1
                self._take_line(line)
                if self._end is not None:
                    return
            rest = next(self._lines, None)
        except frames.LineTooLong:
            self._distrust("sent a line without end")
            return
        if rest is None and was_resting:
            self._loop.add_reader(self._socket, self._on_readable)
        elif rest is not None:
            self._lines = chain((rest,), self._lines)
            self._loop.remove_reader(self._socket)
            self._resting = self._loop.call_later(_REST_SECONDS, self._take_lines)

    def _take_line(self, line: bytes) -> None:
        if not line:
            return
        report = frames.decode(line)
        if report is not None:
            self._take(report)
            return
        self._noise_lines += 1
        log.debug("guest_noise machine=%s lines=%d bytes=%d", self._name, self._noise_lines, len(line))
        if self._noise_lines > _MAX_NOISE_LINES:
            self._distrust(f"sent {self._noise_lines} lines that are no frames")

    def _take(self, report: frames.Report) -> None:
        match report:
            case frames.Booted():
                _settle(self._booted, report)
            case frames.Started() | frames.StartFailed():
                _settle(self._started, report)
            case frames.Identified() | frames.IdentityFailed():
                _settle(self._identities.get(report.generation), report)
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
                    _settle(running.ended, report)
            case frames.Running():
                self.kept.confirm(each for each in report.ids if each not in self._running)
            case frames.Frozen():
                _settle(self._freezes.get(report.nonce), report)
            case frames.Thawed():
                _settle(self._thaws.pop(report.nonce, None), report)
            case frames.HttpStatus():
                _settle(self._gets.get(report.nonce), report)
            case frames.WorkloadExit():
                self._workload_exit = self._workload_exit or report
            case frames.Pong():
                _settle(self._pings.get(report.nonce), report)
            case _:
                assert_never(report)

    # Ending

    def _distrust(self, what: str) -> None:
        log.warning("guest_channel_broken machine=%s cause=%r", self._name, what)
        self._break(GuestError(f"machine {self._name} {what}; it is not listened to any more"))

    def _break(self, end: MachineGone) -> None:
        """The first end counts. The socket is open until `close`: its number must not be given out again."""
        if self._end is not None:
            return
        self._end = end
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        if self._resting is not None:
            self._resting.cancel()
        self._lines = iter(())
        self._unsent.clear()
        self._unsent_bytes = 0
        self._sent.ring()
        _fail([self._booted], end)
        if self._started is not None:
            _fail([self._started], end)
        _fail(self._identities.values(), end)
        _fail(self._pings.values(), end)
        _fail(self._gets.values(), end)
        _fail(self._freezes.values(), end)
        _fail(self._thaws.values(), end)
        _fail((running.ended for running in self._running.values()), end)
        self.kept.close(end)


def _is_open(running: GuestExec, report: frames.Output | Ending) -> bool:
    return running.generation == report.generation and not running.ended.done()


def _settle(future: asyncio.Future[_T] | None, value: _T) -> None:
    """The first answer counts; what nobody asked for has no future."""
    if future is not None and not future.done():
        future.set_result(value)


def _fail(futures: Iterable[asyncio.Future[_T]], end: MachineGone) -> None:
    for future in futures:
        if not future.done():
            future.set_exception(end)
            future.exception()  # Counts as retrieved: nobody has to wait for it.


def _quoted(text: str) -> str:
    return text if len(text) <= _QUOTED_CHARACTERS else f"{text[:_QUOTED_CHARACTERS]}…"
