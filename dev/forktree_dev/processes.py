"""Processes that development starts: each in its own session, with a log, a record, and one way to end it.

A record (pid and start time) lets a later command find the process again and end it without ever hitting
another one that got the same pid. All waiting is on pidfds, so a service may be used from any event loop.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from forktree_dev.parent_death import die_with_us
from forktree_dev.restarting import restarting


class ProcessFailed(Exception):
    """A process ended although it should run. Says everything once: arguments, exit, end of its log."""

    def __init__(self, name: str, argv: Sequence[str], ending: str, log_tail: str) -> None:
        super().__init__(f"{name} {ending}\n$ {shlex.join(argv)}\n{log_tail}")


@dataclass(frozen=True, slots=True)
class ProcessRecord:
    """Names one process for ever: a pid is given out again, a pid with its start time is not."""

    name: str
    pid: int
    start_ticks: int
    """Clock ticks since boot, field 22 of /proc/PID/stat."""
    boot_id: str
    order: int
    """When it was started, nanoseconds since the epoch: what was started last is ended first."""

    @classmethod
    def of(cls, name: str, pid: int) -> ProcessRecord:
        """Of a child of ours, which stays readable until we reap it."""
        _, start_ticks = _stat(pid) or ("", 0)
        return cls(name, pid, start_ticks, boot_id(), time.time_ns())

    def open(self) -> int | None:
        """A pidfd of the process, or None when it is gone. The caller closes it."""
        if self.boot_id != boot_id():
            return None
        try:
            pidfd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return None
        # The pidfd pins whoever has the pid now; only then is its start time worth comparing.
        if not self.runs():
            os.close(pidfd)
            return None
        return pidfd

    def runs(self) -> bool:
        return self._state() not in ("", "Z", "X")

    def reap(self) -> str:
        """Collect it if it was a child of ours and has ended; how it ended, in words."""
        state = self._state()
        if state and state not in "ZX":
            return "still runs"
        try:
            # Not WNOHANG: the first thread of a program can be over some moments before its others are.
            reaped, status = os.waitpid(self.pid, 0) if state else (0, 0)
        except ChildProcessError:
            reaped, status = 0, 0
        if reaped == 0:
            return "ended (nobody knows how: it was not ours to reap)"
        code = os.waitstatus_to_exitcode(status)
        if code >= 0:
            return f"exited with code {code}"
        return f"was killed by signal {-code} ({signal.Signals(-code).name})"

    def _state(self) -> str:
        """The letter of /proc/PID/stat; empty when this very process is not there any more."""
        stat = _stat(self.pid)
        return stat[0] if stat and stat[1] == self.start_ticks and self.boot_id == boot_id() else ""


def boot_id() -> str:
    """The running kernel's boot, as Node objects report it."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _stat(pid: int) -> tuple[str, int] | None:
    """State letter and start time of a process, None when there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, *fields = stat.rpartition(")")[2].split()  # The name before it may hold spaces and brackets.
    return state, int(fields[18])


class Service:
    """One long-running process that can be started, killed, started again, and found by a later command."""

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        folder: Path,
        *,
        env: Mapping[str, str] | None = None,
        outlives_us: bool = False,
        restarts: bool = False,
        grace_seconds: float = 10.0,
    ) -> None:
        """`folder` gets `logs/` and `records/`. Unless it `outlives_us`, it is told to end when we do.

        One that `restarts` is started again when it ends by itself; `pid` is then that of who does so.
        """
        self.name = name
        self.argv = tuple(restarting(argv) if restarts else argv)
        self.log_path = folder / "logs" / f"{name}.log"
        self._record_path = folder / "records" / f"{name}.json"
        self._env = dict(os.environ if env is None else env)
        self._outlives_us = outlives_us
        self._grace_seconds = grace_seconds

    @property
    def pid(self) -> int | None:
        """Its pid while it runs."""
        record = _load(self._record_path)
        return record.pid if record and record.runs() else None

    def start(self) -> None:
        """Start it unless it runs. Returns when the process exists, which is not yet when it works."""
        if self.pid is not None:
            return
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        self._record_path.parent.mkdir(parents=True, exist_ok=True)
        argv = self.argv if self._outlives_us else die_with_us(self.argv)
        append = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        pid = os.posix_spawnp(
            argv[0],
            argv,
            self._env,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, str(self.log_path), append, 0o600),
                (os.POSIX_SPAWN_DUP2, 1, 2),
            ],
            setsid=True,
        )
        _save(ProcessRecord.of(self.name, pid), self._record_path)

    async def stop(self) -> None:
        """Ask it to end, kill it when it does not, reap it. Safe to repeat."""
        await _end(self._record_path, grace_seconds=self._grace_seconds)

    async def kill(self) -> None:
        """SIGKILL and reap: what a crash looks like to the others."""
        await _end(self._record_path, grace_seconds=0.0)

    async def restart(self) -> None:
        await self.stop()
        self.start()

    async def ended(self, *, deadline: float) -> bool:
        """Wait until it has ended, by itself or not; False when it still runs at the deadline (loop time)."""
        record = _load(self._record_path)
        pidfd = record.open() if record else None
        if pidfd is None:
            return True
        try:
            return await _readable(pidfd, deadline=deadline)
        finally:
            os.close(pidfd)

    def failure(self) -> ProcessFailed:
        """The error that says how it ended. Call when it does not run any more."""
        record = _load(self._record_path)
        return ProcessFailed(self.name, self.argv, record.reap() if record else "never ran", self.log_tail())

    def log_tail(self, lines: int = 20) -> str:
        if not self.log_path.exists():
            return "(no log)"
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-lines:])


def running_recorded(folder: Path) -> list[str]:
    """Names of the processes recorded at or below `folder` that run now."""
    return [record.name for record, _ in _records(folder) if record.runs()]


async def stop_recorded(folder: Path, *, grace_seconds: float = 10.0) -> list[str]:
    """End every process recorded at or below `folder`, last started first; names of those that ran.

    Goes to its end also when the caller is cancelled meanwhile, and the cancellation then goes on.
    """
    task = asyncio.create_task(_stop_recorded(folder, grace_seconds), name="stop-recorded")
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait((task,))
        raise


async def _stop_recorded(folder: Path, grace_seconds: float) -> list[str]:
    found = sorted(_records(folder), key=lambda pair: pair[0].order, reverse=True)
    return [record.name for record, path in found if await _end(path, grace_seconds=grace_seconds)]


def _records(folder: Path) -> list[tuple[ProcessRecord, Path]]:
    return [(record, path) for path in folder.glob("**/records/*.json") if (record := _load(path))]


async def _end(record_path: Path, *, grace_seconds: float) -> bool:
    """The ladder: ask, deadline, SIGKILL, reap, forget. True if there was something to end."""
    record = _load(record_path)
    if record is None:
        return False
    pidfd = record.open()
    if pidfd is not None:
        try:
            await _end_process(pidfd, grace_seconds=grace_seconds)
        finally:
            os.close(pidfd)
    record.reap()
    _forget(record_path)
    return pidfd is not None


async def _end_process(pidfd: int, *, grace_seconds: float) -> None:
    loop = asyncio.get_running_loop()
    try:
        if grace_seconds > 0:
            signal.pidfd_send_signal(pidfd, signal.SIGTERM)
            if await _readable(pidfd, deadline=loop.time() + grace_seconds):
                return
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    except ProcessLookupError:
        return
    if not await _readable(pidfd, deadline=loop.time() + 30.0):
        raise TimeoutError("a killed process did not end within 30 s")


async def _readable(pidfd: int, *, deadline: float) -> bool:
    """A pidfd is readable once its process has ended."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(pidfd, ready.set)
    try:
        async with asyncio.timeout_at(deadline):
            await ready.wait()
    except TimeoutError:
        return False
    finally:
        loop.remove_reader(pidfd)
    return True


def _save(record: ProcessRecord, path: Path) -> None:
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(asdict(record)))
    draft.rename(path)


def _forget(path: Path) -> None:
    path.unlink(missing_ok=True)


def _load(path: Path) -> ProcessRecord | None:
    try:
        return ProcessRecord(**json.loads(path.read_text()))
    except FileNotFoundError:
        return None
