"""What an engine promises: the one interface between the agent's decisions and the machines.

An engine branches machines; it knows neither Kubernetes nor HTTP. Times are milliseconds of the agent's
monotonic clock unless a name says otherwise, sizes are bytes, deadlines are absolute event-loop seconds.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar, NewType, Protocol

from forktree.errors import ForktreeError
from forktree.models.reasons import Level, Mode, Reason

MachineId = NewType("MachineId", str)
PointId = NewType("PointId", str)
BaselineId = NewType("BaselineId", str)
"""SHA-256, hex, over all that makes two starts comparable."""
TreeId = NewType("TreeId", str)
"""The root's uid. One tree shares one control group and one memory limit."""
Owner = NewType("Owner", str)
"""The caller's name for what it asked to be made. Journalled before the thing exists, so a restarted
caller finds again what it had begun. At most one live machine or point has a given owner."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TerminalSize:
    """In characters."""

    rows: int
    cols: int


class Room(Protocol):
    """Where output of a command may be kept."""

    def claim(self, count: int) -> int:
        """How much of `count` bytes may be kept more than before. Whoever gave the room gives it back."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command in the guest, given to execve as it is: no shell, no expansion."""

    argv: tuple[str, ...]
    id: str | None = None
    """By which it can be attached to, here and, if it still runs at a fork, in every child. None: any."""
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    """Added to the machine's own environment."""
    cwd: str | None = None
    stdin: bytes = b""
    stdin_open: bool = False
    """After `stdin` its input goes on with what `write` brings, until that ends it. Not for `exec`."""
    terminal: TerminalSize | None = None
    """It runs on a terminal of its own: its input is open and all its output is standard output. Not for
    `exec`."""
    builtin: bool = False
    """`argv` names one of the guest's own tools, which are there whatever the image has. Only for
    `streaming`, and it ends when that is left."""
    timeout_seconds: float = 30.0
    """Guest seconds until the process group is killed."""
    output_limit_bytes: int = 16 << 20
    """What goes beyond is read and dropped, and `truncated` says so. Only for `exec`."""
    room: Room | None = None
    """A limit that it shares with others: from where this has no more on, output is dropped likewise."""
    keep_end: bool = False
    """Keep the end of each stream, up to the limit, in place of the beginning of both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecResult:
    """How a command ended. A time-out is a result, not an error."""

    stdout: bytes
    stderr: bytes
    exit_code: int
    """The process's exit code, 128 + signal where one killed it, -1 after a time-out."""
    timed_out: bool
    truncated: bool
    end_lost: bool = False
    """Although its end was to be kept: there was more than an engine reads of one command."""

    def told(self) -> str:
        """How it ended, in words, with the last of what it said."""
        how = "no end before its time-out" if self.timed_out else f"exit code {self.exit_code}"
        said = (self.stdout + self.stderr).decode(errors="replace").strip()[-200:]
        return how + (f", {said!r}" if said else "")


class ExecOutcome(StrEnum):
    """How a command ended, in one word."""

    OK = "ok"
    """With exit code 0."""
    FAILED = "failed"
    """With another one."""
    TIMED_OUT = "timed_out"
    REFUSED = "refused"
    """It did not start."""
    ABANDONED = "abandoned"
    """Whoever waited for it went away, or could not wait any longer."""
    LOST = "lost"
    """Its machine ended first."""


class ExecStream(StrEnum):
    STDOUT = "stdout"
    STDERR = "stderr"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecChunk:
    """Output of a command. Where `offset` is beyond what came before, what lies between is not kept."""

    stream: ExecStream
    offset: int
    """What its stream had before it."""
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecEnd:
    """How a command ended, after all of its output."""

    exit_code: int
    """As in `ExecResult`."""
    timed_out: bool
    truncated: bool = False
    """Its output went beyond a limit, and the rest was dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecState:
    """One command that can be asked for."""

    id: str
    ended: bool
    end: ExecEnd | None
    """How. None while it runs, and where it could not be started."""
    age_seconds: float | None
    """Since it began. None where that was elsewhere: in the machine's parent, or under an agent before."""
    stdout_bytes: int
    """What it has written so far, as far as that is known."""
    stderr_bytes: int


class ExecReader(Protocol):
    """Reads what one command writes. The command waits for its readers, and goes on when they are closed."""

    @property
    def id(self) -> str:
        """The command's."""
        ...

    async def next(self, *, deadline: float) -> ExecChunk | ExecEnd | None:
        """The next piece of output; how the command ended, once there is none; None at the deadline.

        What was returned before counts as dealt with. Raises `MachineGone`, and what `begin` raises for a
        command that did not start.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Hooks:
    """Commands that take part in a fork: one that fails or is late fails it, as a child that fails does."""

    pre: Command | None = None
    """Run in the running parent when all else is ready for the stop. Not part of `branch`."""
    post: Command | None = None
    """Run in each child once it has its own identity, before anybody hears of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """A version that must hold before a baseline counts: `argv` has to print exactly `expect`."""

    name: str
    argv: tuple[str, ...]
    expect: str
    """Compared after trimming white space at both ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpGet:
    """A request over the guest's loopback. Statuses 200 to 399 are success."""

    port: int
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SecretVariable:
    """A variable whose value is nobody's business: it is never printed, journalled or hashed."""

    name: str
    value: str = field(repr=False)
    version: str
    """Says which value it is without saying it: equal versions are equal values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """When a booted machine counts as ready: a command that exits 0, or a request that succeeds."""

    ask: tuple[str, ...] | HttpGet
    initial_delay_seconds: float = 0.0
    period_seconds: float = 1.0
    timeout_seconds: float = 5.0
    failure_threshold: int = 30
    """Failures in a row after which the bake is given up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """A root file system that the engine did not bring with it."""

    file: str
    """Path of an EROFS image. It must be there until `Engine.bake` returns, and no longer."""
    digest: str
    """SHA-256, hex, that says which it is: equal ones have equal content."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Everything of a template that decides what its baseline is."""

    image: str
    """Of those that the engine has; with `disk`, what that is called."""
    disk: Disk | None = None
    vcpus: int
    """With more than one, programs are stopped before the machine is: see `ForkClocks`."""
    memory_bytes: int
    overlay_bytes: int
    """Writable space of the root file system. It is guest RAM, so it is bounded by `memory_bytes`."""
    command: tuple[str, ...] = ()
    """The environment's own long-lived process; empty: none."""
    working_folder: str = "/"
    """Where it is run, and every command that does not say where."""
    env: tuple[tuple[str, str], ...] = ()
    secret_env: tuple[SecretVariable, ...] = ()
    """Further variables; of these the baseline depends on the versions alone."""
    probe: Probe | None = None
    pins: tuple[Pin, ...] = ()
    egress: bool = False
    """Whether its machines reach the outside, as far as the node lets any. False: they have no network."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """A template's frozen ready state on this node."""

    id: BaselineId
    point: PointId
    """Branch from it to start a root."""
    boot_ms: float
    """Machine started until every check held."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildOrder:
    """One machine to be started."""

    owner: Owner
    hostname: str
    """Becomes the guest's host name: at most 64 bytes of [a-z0-9-]."""
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    """This branch's identity, seen by its commands and in `/run/forktree/identity` of the guest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeLimits:
    """What one tree may take on this node."""

    tree: TreeId
    memory_bytes: int | None = None
    """Worst case over all its machines and points; None: the node's own limit alone."""
    pause_budget_ms: float | None = None
    """Longest that a fork may be expected to stop a machine of it; None: as long as it takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A machine that runs. Only one that `fork` did not wait for may still have to answer its identity."""

    id: MachineId
    owner: Owner
    tree: TreeId
    baseline: BaselineId
    generation: str
    """UUID, new in every machine and seen by its guest."""
    mode: Mode
    level: Level
    paused: bool = False
    """It stands still until it is resumed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """What memory one machine takes now, as the kernel counts it: not what it has been promised."""

    unique_bytes: int
    """Goes when the machine does: pages that it changed, its VMM's own, and layers that nobody else uses."""
    shared_bytes: int
    """Layers that it stands upon, and other machines or held instants too, each counted whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A held instant from which children can start."""

    id: PointId
    owner: Owner
    tree: TreeId | None
    """None for a baseline, which belongs to no tree."""
    bytes: int
    """What holding this instant costs: the layers that it added and its device state, not what it shares."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkClocks:
    """Never one for another. Each is None where that clock does not exist."""

    pause_ms: float | None
    """Parent stopped to parent running; with several vCPUs, its programs told to stop to its programs going
    on, which is longer at both ends. None from an earlier instant or of a paused parent: nothing was
    stopped."""
    fork_ms: float
    """Parent stopped (earlier instant: children released from it) to every child running."""
    ready_ms: float | None
    """The same start, to every child's answered identity message. None where that was not waited for."""
    began_at: float | None = None
    """That start, in monotonic seconds. None where nothing was started."""
    copied_ms: tuple[float, float] | None = None
    """From and until when, after that start, the parent's pages were copied while it stood still."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkResult:
    """Children of one instant, in the order of the orders."""

    point: Point
    children: tuple[Machine, ...]
    clocks: ForkClocks


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkLost:
    """A machine runs on, and does not reach the outside any more. Its children will."""

    machine: MachineId
    owner: Owner
    text: str
    """How what it reached the outside by ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adoption:
    """What survived a restart of the agent: exactly the machines and points that run and hold."""

    machines: tuple[Machine, ...]
    points: tuple[Point, ...]
    baselines: tuple[Baseline, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineExit:
    """A machine ended although nobody asked for it."""

    machine: MachineId
    owner: Owner
    text: str
    """How it ended, in words, for status: "killed by signal 9 (SIGKILL)"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capability:
    """What a probe found, by trying on a canary."""

    passed: bool
    engine: str
    accelerator: str
    """`kvm` or `tcg`; empty where no machine runs."""
    reason: str
    """One word for status: `CanaryPassed`, or `Emulated` where it passed without KVM; else why it failed."""
    message: str
    """Why this accelerator, and why not the better one."""
    boot_ms: float
    fork_ms: float
    egress: bool = False
    """Machines whose shape asks for it reach the outside, behind a wall that is up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Memory as admission counts it: the worst case, not what is resident."""

    capacity_bytes: int
    reserved_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """How much there is of what, now."""

    machines: int
    points: int
    point_bytes: int
    """What holding all instants costs, as admission counts it."""
    standby: int
    """Made ahead of forks to come. They are no machines."""
    execs_running: int
    execs_ended: Mapping[ExecOutcome, int]
    """Since this engine began. What is not there did not happen."""


class EngineError(ForktreeError):
    """Anything an engine refuses or fails at."""

    reason: ClassVar[Reason] = Reason.INTERNAL


class AtCapacity(EngineError):
    """Refused at admission. Nothing was started, so asking again is safe."""

    reason = Reason.AT_CAPACITY
    retryable = True


class MemoryLimit(EngineError):
    """The tree's own memory limit does not leave room. Nothing was started."""

    reason = Reason.MEMORY_LIMIT


class ImageNotFound(EngineError):
    """This node has no such image."""

    reason = Reason.IMAGE_NOT_FOUND


class EgressForbidden(EngineError):
    """This node lets no machine reach the outside, or cannot put up the wall that it would need."""

    reason = Reason.EGRESS_FORBIDDEN


class NeverReady(EngineError):
    """The readiness probe did not succeed in time."""

    reason = Reason.NEVER_READY


class PinMismatch(EngineError):
    """A pinned version is another one."""

    reason = Reason.PIN_MISMATCH


class BakeFailed(EngineError):
    """The machine did not boot, or its workload did not start."""

    reason = Reason.BAKE_FAILED


class ParentLost(EngineError):
    """The machine to be forked ended before or during the fork."""

    reason = Reason.PARENT_LOST


class PointLost(EngineError):
    """The instant to be forked is not held (any more)."""

    reason = Reason.POINT_LOST


class TooFragmented(EngineError):
    """The child would need more memory mappings than the kernel grants safely."""

    reason = Reason.TOO_FRAGMENTED


class MachineGone(EngineError):
    """The machine is not there (any more)."""

    reason = Reason.MACHINE_LOST


class ForkFailed(EngineError):
    """A child did not come up. No child is left and the parent runs."""

    reason = Reason.FORK_FAILED


class PauseOverBudget(EngineError):
    """The parent would stand still for longer than its tree allows. It was not stopped; asked again when it
    writes less, it may be."""

    reason = Reason.PAUSE_BUDGET
    retryable = True


class NotStill(EngineError):
    """Programs of a machine with several vCPUs did not stand still, without which it is neither forked nor
    paused. No child is left and they run on, so asking again is safe."""

    reason = Reason.FORK_FAILED
    retryable = True


class DeadlineExceeded(EngineError):
    """The deadline passed first. What was begun was undone."""

    reason = Reason.DEADLINE_EXCEEDED


class HookFailed(EngineError):
    """A hook failed or was not done in time. No child is left, and the parent is as it was."""

    reason = Reason.HOOK_FAILED


class MachinePaused(EngineError):
    """The machine stands still, so nothing can be run in it. Resumed, it can."""

    reason = Reason.PAUSED
    retryable = True


class ExecNotFound(EngineError):
    """The machine has no command of this id, and had none at its fork."""

    reason = Reason.INVALID


class CommandRefused(EngineError):
    """The guest could not start the command (no such file, no such folder, too many at once)."""

    reason = Reason.INVALID


NO_HOOKS = Hooks()


class Engine(Protocol):
    """A way to branch machines. One instance owns its machines; every method may be called concurrently.

    Whatever makes or changes something is written down first: `JournalError` where it cannot be, and then
    nothing was done.
    """

    async def adopt(self, *, deadline: float) -> Adoption:
        """Take over what an earlier agent left running; end what it had only begun. Call once, first."""
        ...

    async def probe(self, *, deadline: float) -> Capability:
        """Find out by a canary machine what this node can do. Remembered until the node's next boot."""
        ...

    async def bake(self, shape: Shape, *, deadline: float) -> Baseline:
        """Boot `shape` to readiness and freeze it. Equal shapes are baked once, also when asked at once.

        Raises `ImageNotFound`, `NeverReady`, `PinMismatch`, `BakeFailed`, `AtCapacity`, `DeadlineExceeded`,
        and `EgressForbidden` where the shape asks for what this node does not allow.
        """
        ...

    async def fork(
        self,
        parent: MachineId,
        owner: Owner,
        orders: Sequence[ChildOrder],
        limits: TreeLimits,
        *,
        hooks: Hooks = NO_HOOKS,
        answered: bool = True,
        deadline: float,
    ) -> ForkResult:
        """Freeze an instant of `parent` under `owner` and start one child per order from it.

        All or nothing: after any error or cancellation no child and no point is left, and the parent runs. A
        paused parent stays paused; its children run. Without orders only the point is made. Not `answered`:
        returns as soon as every child runs, and each of them then answers or is ended for itself by
        `deadline`; see `answered`. A parent that has not answered yet itself is waited for. Raises
        `AtCapacity`, `MemoryLimit`, `TooFragmented`, `ForkFailed`, `NotStill`, `PauseOverBudget`,
        `HookFailed`, `DeadlineExceeded`, `ParentLost`.
        """
        ...

    async def answered(self, machine: MachineId, *, deadline: float) -> float | None:
        """Until a machine has answered its identity, and the hook after it is done.

        Returns when that was, on the clock `ready_ms` of its fork; None for a machine that was waited for by
        `fork`, or by an agent before this. Raises `MachineGone`, saying why it did not answer where that is
        so, and `DeadlineExceeded`. `exec`, `attach`, `pause` and `resume` wait for it by themselves.
        """
        ...

    def give(self, owners: Mapping[Owner, Owner]) -> None:
        """Machines and points of these owners are the others' from here on. Unknown owners are left out.

        Raises `JournalError`; some may have been given then, and giving again gives the rest.
        """
        ...

    async def branch(
        self,
        point: PointId,
        orders: Sequence[ChildOrder],
        limits: TreeLimits,
        *,
        hooks: Hooks = NO_HOOKS,
        deadline: float,
    ) -> ForkResult:
        """Start children from a held instant: a baseline's for a root, an earlier fork's to expand it again.

        All or nothing, like `fork`. Raises the same, and `PointLost` in place of `ParentLost`.
        """
        ...

    def keep_ready(self, baseline: BaselineId, count: int) -> None:
        """From now on keep what makes so many roots of a baseline start sooner, as far as there is room.

        Until told otherwise, the baseline is dropped, or this agent ends. What is kept is no machine.
        """
        ...

    async def exec(self, machine: MachineId, command: Command, *, deadline: float) -> ExecResult:
        """Run a command to its end. On cancellation or deadline the command is killed in the guest.

        Raises `CommandRefused`, `MachineGone`, `MachinePaused`, `DeadlineExceeded`.
        """
        ...

    async def begin(self, machine: MachineId, command: Command, *, deadline: float) -> str:
        """Start a command that is tied to nobody, and return its id once it runs.

        It goes on until its own time is over, also under an agent after this. The end of what it writes is
        kept, and how it ended for some minutes after that. Raises as `exec` does.
        """
        ...

    def streaming(
        self, machine: MachineId, command: Command, *, deadline: float
    ) -> AbstractAsyncContextManager[ExecReader]:
        """`begin` a command and read it from its first byte on. Leaving leaves the command alone."""
        ...

    def reading(
        self, machine: MachineId, exec_id: str, *, stdout_offset: int, stderr_offset: int, deadline: float
    ) -> AbstractAsyncContextManager[ExecReader]:
        """Read what a command writes from these bytes of its streams on, or from what is still kept of them.

        Of one begun by `begin` or `streaming`, one that ran at this machine's fork, or one of an agent before
        this; those that have ended too. Raises `ExecNotFound`, `MachineGone`, and `CommandRefused` for one
        that is run by `exec`.
        """
        ...

    async def write(
        self, machine: MachineId, exec_id: str, data: bytes, *, end: bool, deadline: float
    ) -> None:
        """Give a command input; `end`: its last. Returns when the machine has it: the command may be slow.

        Raises `ExecNotFound`, `CommandRefused` where its input is not open (any more), `MachineGone`,
        `DeadlineExceeded`: a part may have been given then.
        """
        ...

    async def resize(self, machine: MachineId, exec_id: str, size: TerminalSize) -> None:
        """A command's terminal has another size. Raises `ExecNotFound`, `MachineGone`."""
        ...

    async def kill_exec(self, machine: MachineId, exec_id: str, *, deadline: float) -> bool:
        """Kill a command, whoever began it, and wait for its end. False: it had ended before.

        Raises `ExecNotFound`, `MachineGone`, `MachinePaused`, `DeadlineExceeded`.
        """
        ...

    def execs(self, machine: MachineId) -> tuple[ExecState, ...]:
        """The commands that can be asked for in a machine, in order of their ids. Raises `MachineGone`.

        Those that began before this agent did are among them as soon as the machine has told of them.
        """
        ...

    async def execs_told(self, machine: MachineId, *, deadline: float) -> tuple[ExecState, ...]:
        """The same once it has, or has not within seconds. Raises `MachineGone`, `DeadlineExceeded`."""
        ...

    async def attach(self, machine: MachineId, exec_id: str, *, deadline: float) -> ExecResult:
        """The end of a command that was begun by another call, or that ran at this machine's fork.

        With what is kept of its output: of the latter, and of one begun under an agent before this, what it
        wrote since and a little before. Giving up leaves the command alone. Raises `ExecNotFound`,
        `MachineGone`, `DeadlineExceeded`, and what `exec` raises for a command that did not start.
        """
        ...

    async def pause(self, machine: MachineId, *, deadline: float) -> None:
        """Have a machine stand still, also over a restart of the agent. Idempotent.

        Waits for a fork of it that is under way. Raises `MachineGone`, `DeadlineExceeded`, and `NotStill`,
        after which it runs on.
        """
        ...

    async def resume(self, machine: MachineId, *, deadline: float) -> None:
        """Let a paused machine go on, its clock set to now. Idempotent. Raises `MachineGone`,
        `DeadlineExceeded`."""
        ...

    async def release(self, machine: MachineId) -> None:
        """End a machine and free all that is its own. Idempotent; returns when it is reaped."""
        ...

    async def drop_point(self, point: PointId) -> None:
        """Hold an instant no longer. Idempotent; memory goes when no machine maps it any more."""
        ...

    async def drop_baseline(self, baseline: BaselineId) -> None:
        """Hold a baseline no longer. Idempotent; running machines keep what they map."""
        ...

    async def free_image(self, digest: str) -> bool:
        """Whether no machine, instant or bake uses the disk of this digest; then nothing of it is held."""
        ...

    def machines(self) -> tuple[Machine, ...]:
        """The machines that run now. All of them: whoever wants one asks `machine_of`."""
        ...

    def machine_of(self, owner: Owner) -> Machine | None:
        """The machine that runs under `owner` now."""
        ...

    def points(self) -> tuple[Point, ...]:
        """The instants held now, baselines' included."""
        ...

    def point_of(self, owner: Owner) -> Point | None:
        """The instant that is held under `owner` now."""
        ...

    def holds(self, point: PointId) -> bool:
        """Whether an instant is held now."""
        ...

    def exits(self) -> AsyncIterator[MachineExit | NetworkLost]:
        """Machines that ended by themselves, as it happens, and those that lost what they had of the outside.
        One consumer."""
        ...

    def usage(self) -> Usage: ...

    def counts(self) -> Counts:
        """For whoever watches the node. Costs some microseconds for each machine, and asks none."""
        ...

    async def memory(self, machine: MachineId, *, deadline: float) -> MemoryUse:
        """What a machine takes now; also of one that is paused. Raises `MachineGone`, `DeadlineExceeded`."""
        ...
