"""The keeper's machines: a process each, its channels, and how it ended, from start until it is forgotten."""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from forktree_keeper import companions
from forktree_keeper.cgroups import ControlGroups
from forktree_keeper.companions import Companion
from forktree_keeper.connection import Connection
from forktree_keeper.processes import Launch, Spawned, own_bytes, read_report, reap, spawn
from forktree_keeper.protocol import (
    MAX_TEXT_CHARACTERS,
    Channel,
    ChannelType,
    Code,
    CompanionExit,
    Exit,
    Launched,
    MachineEntry,
    Refusal,
    Start,
    Weight,
    encode_companion_exited,
    encode_exited,
    encode_result,
)
from forktree_keeper.ready_loop import ReadyLoop
from forktree_keeper.wall import Wall

MAX_LOG_BYTES = 1 << 20
"""A log that has grown beyond is emptied: the state directory is memory."""
END_SECONDS = 10.0
"""At the keeper's end, from killing every machine to giving up on one that the kernel does not let go."""

_log = logging.getLogger("forktree_keeper")


@dataclass(slots=True)
class Waiter:
    """A request that is answered later."""

    connection: Connection
    request_id: int


@dataclass(slots=True, kw_only=True)
class Machine:
    """A process and what is kept for it. It starts while `starter` is set, and has ended once `exit` is."""

    name: str
    uid: int
    cgroup: str | None
    pid: int
    pidfd: int
    channels: dict[str, socket.socket]
    starter: Waiter | None
    companion: Companion | None = None
    killers: list[Waiter] = field(default_factory=list[Waiter])
    gone: bool = False
    """Its process has ended. Its end is told when its companion is reaped too: nothing of it is left then."""
    start_failure: str | None = None
    """Why its program could not be started; whoever asked is told once it is reaped."""
    exit: Exit | None = None

    def entry(self) -> MachineEntry:
        return MachineEntry(
            machine=self.name,
            pid=self.pid,
            uid=self.uid,
            cgroup=self.cgroup,
            exit=self.exit,
            companion_lost=self.companion.how if self.companion is not None else None,
        )

    def channel_descriptors(self) -> tuple[int, ...]:
        return tuple(channel.fileno() for channel in self.channels.values())


class Machines:
    """The table by name. A start is answered when its program runs, a kill when the process is reaped."""

    def __init__(
        self,
        loop: ReadyLoop,
        groups: ControlGroups,
        wall: Wall,
        logs: Path,
        in_charge: Callable[[], Connection | None],
    ) -> None:
        self._loop = loop
        self._groups = groups
        self._wall = wall
        self._logs = logs
        self._in_charge = in_charge
        self._machines: dict[str, Machine] = {}

    def __len__(self) -> int:
        return len(self._machines)

    def names(self) -> list[str]:
        return list(self._machines)

    def descriptors(self) -> int:
        """How many are open at most: channels, a pidfd, and the report of a start."""
        return sum(
            len(machine.channels) + 2 + (companions.DESCRIPTORS if machine.companion is not None else 0)
            for machine in self._machines.values()
        )

    def get(self, name: str) -> Machine:
        """Raises `Refusal` (no such machine)."""
        try:
            return self._machines[name]
        except KeyError as error:
            raise Refusal(Code.NO_SUCH_MACHINE, f"no machine {name[:200]}") from error

    def start(self, waiter: Waiter, request: Start, files: Sequence[int]) -> None:
        """Answers the waiter when the program runs. `files` stay the caller's. Raises `Refusal`."""
        if request.machine in self._machines:
            raise Refusal(Code.MACHINE_EXISTS, f"machine {request.machine} exists")
        if request.companion is not None and not self._wall.holds(request.uid):
            raise Refusal(Code.WALL_FAILED, f"no wall is up that user id {request.uid} is behind")
        if request.cgroup is not None:
            self._groups.make(request.cgroup)
        near: dict[str, socket.socket] = {}
        far: list[socket.socket] = []
        companion: Companion | None = None
        try:
            for channel in request.channels:
                near[channel.name], far_end = _pair(channel)
                far.append(far_end)
            if request.companion is not None:
                companion, its_end = self._start_companion(request)
                far.append(its_end)
            spawned = spawn(self._launch(request, [*files, *(each.fileno() for each in far)]))
        except OSError as error:
            for each in near.values():
                each.close()
            if companion is not None:
                companion.end()
            raise Refusal(Code.START_FAILED, f"cannot fork: {error.strerror}") from error
        finally:
            for each in far:
                each.close()
        machine = Machine(
            name=request.machine,
            uid=request.uid,
            cgroup=request.cgroup,
            pid=spawned.pid,
            pidfd=spawned.pidfd,
            channels=near,
            starter=waiter,
            companion=companion,
        )
        self._machines[machine.name] = machine
        self._loop.watch(spawned.report, lambda: self._on_report(machine, spawned))

    def kill(self, waiter: Waiter, name: str) -> None:
        """Answers the waiter when the process is reaped. Raises `Refusal` (no such machine)."""
        machine = self.get(name)
        if machine.exit is not None:
            waiter.connection.send(encode_result(waiter.request_id, machine.exit))
            return
        machine.killers.append(waiter)
        signal.pidfd_send_signal(machine.pidfd, signal.SIGKILL)
        if machine.companion is not None:
            machine.companion.end()

    def weigh(self, name: str) -> Weight:
        """Raises `Refusal` (no such machine)."""
        machine = self.get(name)
        return Weight(0 if machine.exit is not None else own_bytes(machine.pid))

    def forget(self, name: str) -> None:
        """Idempotent. Raises `Refusal` (machine running)."""
        machine = self._machines.get(name)
        if machine is None:
            return
        if machine.exit is None:
            raise Refusal(Code.MACHINE_RUNNING, f"machine {name} runs: kill it first")
        del self._machines[name]
        for channel in machine.channels.values():
            channel.close()
        with suppress(OSError):  # It may not even have come to be.
            self._log_path(name).unlink()
        if machine.companion is not None:
            machine.companion.forget()

    def end_companions(self) -> None:
        """Nobody may reach the outside any more. The machines run on."""
        for machine in self._running():
            if machine.companion is not None:
                machine.companion.end()

    def bound_logs(self) -> None:
        """Empty the logs that have grown too long."""
        for machine in self._machines.values():
            paths = [self._log_path(machine.name)]
            if machine.companion is not None:
                paths.append(machine.companion.log)
            for path in paths:
                with suppress(OSError):
                    if path.stat().st_size > MAX_LOG_BYTES:
                        os.truncate(path, 0)  # It is written to in append mode, so it goes on from the start.
                        _log.warning("log_emptied machine=%s", machine.name)

    def end(self) -> None:
        """Kill, reap and forget all of them."""
        for machine in self._running():
            signal.pidfd_send_signal(machine.pidfd, signal.SIGKILL)
        deadline = time.monotonic() + END_SECONDS
        while self._running() and (left := deadline - time.monotonic()) > 0:
            self._loop.step(left)
        for machine in self._running():
            _log.error("not_ended machine=%s pid=%d", machine.name, machine.pid)
        for name in [machine.name for machine in self._machines.values() if machine.exit is not None]:
            self.forget(name)

    def _start_companion(self, request: Start) -> tuple[Companion, socket.socket]:
        """It, and the machine's end of the socket between them, which the caller owns. Raises `OSError`."""
        assert request.companion is not None
        name = request.machine
        its_end, machines_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            launch = Launch(
                argv=request.companion.argv,
                env=request.companion.env,
                uid=request.uid,
                gid=request.uid,  # Not the machine's, which may be that of a device.
                nice=request.nice,
                network_namespace=False,
                cgroup_entrances=() if request.cgroup is None else self._groups.entrances(request.cgroup),
                log=self._companion_log(name),
                descriptors=(its_end.fileno(),),
            )
            companion = Companion.started(self._loop, name, launch, lambda: self._on_companion_gone(name))
        except OSError:
            machines_end.close()
            raise
        finally:
            its_end.close()
        return companion, machines_end

    def _launch(self, request: Start, descriptors: Sequence[int]) -> Launch:
        return Launch(
            argv=request.argv,
            env=request.env,
            uid=request.uid,
            gid=request.gid,
            nice=request.nice,
            network_namespace=request.network_namespace,
            cgroup_entrances=() if request.cgroup is None else self._groups.entrances(request.cgroup),
            log=self._log_path(request.machine),
            descriptors=descriptors,
        )

    def _on_report(self, machine: Machine, spawned: Spawned) -> None:
        """The program runs, or the child has told why not."""
        self._loop.unwatch(spawned.report)
        sentence = read_report(spawned.report)
        os.close(spawned.report)
        starter, machine.starter = machine.starter, None
        assert starter is not None
        # From here on an exit counts; before, it could have overtaken the report.
        self._loop.watch(machine.pidfd, lambda: self._on_exit(machine))
        if not sentence:
            _log.info("started machine=%s pid=%d uid=%d", machine.name, machine.pid, machine.uid)
            result = encode_result(starter.request_id, Launched(machine.pid))
            starter.connection.send(result, machine.channel_descriptors())
            self._tell_of_companion(machine)  # It may have ended already.
            return
        _log.error("start_failed machine=%s message=%r", machine.name, sentence)
        machine.start_failure, machine.starter = sentence, starter

    def _on_exit(self, machine: Machine) -> None:
        """Its process has ended: with it goes its companion, and then it has ended as a whole."""
        self._loop.unwatch(machine.pidfd)
        machine.gone = True
        if machine.companion is not None and machine.companion.how is None:
            machine.companion.end()
            return
        self._ended(machine)

    def _on_companion_gone(self, name: str) -> None:
        machine = self._machines.get(name)
        if machine is None or machine.companion is None or machine.companion.how is None:
            with suppress(OSError):  # Its machine could not even be forked.
                self._companion_log(name).unlink()
            return
        if machine.gone:
            self._ended(machine)
        else:
            self._tell_of_companion(machine)

    def _tell_of_companion(self, machine: Machine) -> None:
        """That it has ended, where it has: not before whoever asked for the machine knows that it runs, and
        not when the machine is to end."""
        companion, agent = machine.companion, self._in_charge()
        if companion is None or companion.how is None or agent is None:
            return
        if machine.starter is None and not machine.killers:
            agent.send(encode_companion_exited(CompanionExit(machine.name, companion.how)))

    def _ended(self, machine: Machine) -> None:
        exited = self._reap(machine)
        starter, machine.starter = machine.starter, None
        if starter is not None and starter.connection is self._in_charge():
            self.forget(machine.name)
            starter.connection.refuse(
                starter.request_id, Refusal(Code.START_FAILED, machine.start_failure or exited.text)
            )
        else:  # Also where who asked has gone: the next one may have seen it in a listing.
            self._tell(exited)

    def _reap(self, machine: Machine) -> Exit:
        """Collect the process and answer who waits for that. The machine stays, until it is forgotten."""
        ended = reap(machine.pid, machine.pidfd)
        os.close(machine.pidfd)
        text = (machine.start_failure or ended.text)[:MAX_TEXT_CHARACTERS]
        machine.exit = Exit(
            machine=machine.name, pid=machine.pid, exit_code=ended.exit_code, signal=ended.signal, text=text
        )
        _log.info("exited machine=%s pid=%d how=%r", machine.name, machine.pid, text)
        for killer in machine.killers:
            killer.connection.send(encode_result(killer.request_id, machine.exit))
        machine.killers.clear()
        return machine.exit

    def _tell(self, exited: Exit) -> None:
        agent = self._in_charge()
        if agent is not None:
            agent.send(encode_exited(exited))

    def _running(self) -> list[Machine]:
        return [machine for machine in self._machines.values() if machine.exit is None]

    def _log_path(self, machine: str) -> Path:
        return self._logs / f"{machine}.log"

    def _companion_log(self, machine: str) -> Path:
        return self._logs / f"{machine}.companion.log"


def _pair(channel: Channel) -> tuple[socket.socket, socket.socket]:
    kind = socket.SOCK_SEQPACKET if channel.type is ChannelType.SEQPACKET else socket.SOCK_STREAM
    return socket.socketpair(socket.AF_UNIX, kind)
