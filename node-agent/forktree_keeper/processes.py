"""One child process: forked, given all its settings, executed, and in the end reaped.

The keeper has a single thread, so the child may run Python between fork and exec. The child reports the step
at which it failed through a pipe that exec closes; an empty report means that the program runs.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import resource
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from forktree_keeper.protocol import child_descriptor

_PR_SET_PDEATHSIG = 1
_PR_SET_NO_NEW_PRIVS = 38
_CLONE_NEWNET = 0x40000000
_LIBC = ctypes.CDLL(None, use_errno=True)  # Loaded ahead: nothing should have to be found after the fork.


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Everything about a process to be started; nothing else reaches it."""

    argv: tuple[str, ...]
    env: dict[str, str]
    uid: int
    gid: int
    nice: int | None
    network_namespace: bool
    cgroup_entrances: Sequence[Path]
    log: Path
    """Standard output and error, emptied first."""
    descriptors: Sequence[int]
    """Become 3, 4, 5, ... in the process. The caller keeps and closes its own."""


@dataclass(frozen=True, slots=True)
class Spawned:
    """A child between fork and exec, or behind it. The caller owns both descriptors."""

    pid: int
    pidfd: int
    """Readable when the process has ended."""
    report: int
    """Readable when the program runs or its start has failed: then call `read_report`."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a process ended: exactly one of the numbers is set."""

    exit_code: int | None
    signal: int | None
    text: str


def spawn(launch: Launch) -> Spawned:
    """Fork a child that carries out `launch`. Raises `OSError` with no child left."""
    keeper = os.getpid()
    report, child_report = os.pipe()
    # A signal must not run the keeper's handlers in the child, which starts with none.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        pid = os.fork()
        if pid == 0:
            _become(launch, keeper, child_report)
    except OSError:
        os.close(report)
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        os.close(child_report)
    try:
        return Spawned(pid, os.pidfd_open(pid), report)
    except OSError:
        os.close(report)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise


def read_report(report: int) -> str:
    """The sentence of a failed start, empty if the program runs. The pipe has come to its end: no waiting."""
    return os.read(report, 4096).decode(errors="replace")


def reap(pid: int, pidfd: int) -> Ended:
    """Collect an ended child, and end with it what is left of its process group."""
    # While the child is a zombie its number cannot be given to another group.
    os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOWAIT)
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    status = os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
    if status is None:
        raise ChildProcessError(errno.ECHILD, f"process {pid} was not there to be reaped")
    if status.si_code == os.CLD_EXITED:
        return Ended(status.si_status, None, f"exited with code {status.si_status}")
    return Ended(
        None, status.si_status, f"killed by signal {status.si_status} ({_signal_name(status.si_status)})"
    )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "real-time"  # Only the first and last of these have names.


def _become(launch: Launch, keeper: int, report: int) -> NoReturn:
    """In the child: take on every setting, then execute. Never returns into the keeper's code."""
    step = "begin"
    try:
        # Out of the way of the places they are to take.
        first_free = child_descriptor(len(launch.descriptors))
        report = fcntl.fcntl(report, fcntl.F_DUPFD_CLOEXEC, first_free)
        descriptors = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, first_free) for each in launch.descriptors]
        for step, act in _steps(launch, keeper, descriptors):  # noqa: B007 - read where an act fails
            act()
        step = f"execute {launch.argv[0]}"
        os.execve(launch.argv[0], launch.argv, launch.env)
    except OSError as error:
        where = f" ({error.filename})" if error.filename and error.filename != launch.argv[0] else ""
        sentence = f"cannot {step}: {error.strerror}{where}"
    except BaseException as error:  # The keeper's own code must not go on in here.
        sentence = f"cannot {step}: {error!r}"
    with suppress(OSError):
        os.write(report, sentence.encode(errors="replace")[:4000])
    os._exit(127)


def _steps(launch: Launch, keeper: int, descriptors: Sequence[int]) -> list[tuple[str, Callable[[], None]]]:
    """What the child does, in this order, with the name by which a failure is told."""
    return [
        ("open its log", lambda: _open_standard_files(launch.log)),
        ("leave the keeper's session", os.setsid),
        ("enter the control group", lambda: _enter(launch.cgroup_entrances)),
        ("make a network namespace", lambda: _unshare_network() if launch.network_namespace else None),
        ("set its priority", lambda: _set_nice(launch.nice)),
        # A core file would hold the guest's memory.
        ("forbid core files", lambda: resource.setrlimit(resource.RLIMIT_CORE, (0, 0))),
        ("drop the groups", lambda: os.setgroups([])),
        ("set the gid", lambda: os.setresgid(launch.gid, launch.gid, launch.gid)),
        ("set the uid", lambda: os.setresuid(launch.uid, launch.uid, launch.uid)),
        # After the uid, whose change clears it.
        ("be ended with the keeper", lambda: _die_with(keeper)),
        ("give up new privileges", lambda: _prctl(_PR_SET_NO_NEW_PRIVS, 1)),
        ("go to the root folder", lambda: os.chdir("/")),
        ("place descriptors", lambda: _place(descriptors)),
        # Last: an exec keeps ignored signals (Python ignores SIGPIPE) and the mask.
        ("reset signals", _reset_signals),
    ]


def own_bytes(pid: int) -> int:
    """Memory that is the process's alone, by the kernel's counts, whose reading does not hold it up."""
    lines = (line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    # One that has just exited has none of these.
    return sum(int(line[1]) << 10 for line in lines if line and line[0] in {"RssAnon:", "VmSwap:"})


def _open_standard_files(log: Path) -> None:
    nothing = os.open("/dev/null", os.O_RDONLY)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_NOFOLLOW
    written = os.open(log, flags, 0o600)
    os.dup2(nothing, 0)
    os.dup2(written, 1)
    os.dup2(written, 2)


def _enter(entrances: Sequence[Path]) -> None:
    for entrance in entrances:
        descriptor = os.open(entrance, os.O_WRONLY)
        os.write(descriptor, b"0")  # 0: the writer itself.
        os.close(descriptor)


def _unshare_network() -> None:
    if _LIBC.unshare(_CLONE_NEWNET) != 0:
        raise _last_error()


def _set_nice(nice: int | None) -> None:
    if nice is not None:
        os.setpriority(os.PRIO_PROCESS, 0, nice)


def _die_with(keeper: int) -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != keeper:  # It has died before this could take effect.
        os._exit(127)


def _place(descriptors: Sequence[int]) -> None:
    for index, descriptor in enumerate(descriptors):
        os.dup2(descriptor, child_descriptor(index), inheritable=True)


def _reset_signals() -> None:
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def _prctl(option: int, value: int) -> None:
    nothing = ctypes.c_ulong(0)  # A plain 0 is an int, and the upper half of its register may be anything.
    if _LIBC.prctl(option, ctypes.c_ulong(value), nothing, nothing, nothing) != 0:
        raise _last_error()


def _last_error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))
