"""QEMU's monitor over an inherited socket: the few commands that the engine needs, with typed failures."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import uuid
from collections.abc import Generator
from contextlib import contextmanager, suppress

import msgspec
from qemu.qmp import EventListener, ExecInterruptedError, Message, QMPClient, QMPError
from qemu.qmp.qmp_client import ExecuteError

from forktree_agent.engine.contract import DeadlineExceeded, EngineError, MachineGone

RESYNC_SECONDS = 5.0
"""A monitor that lives answers in under a millisecond; one that does not in this time is given up."""
STATE_NAME = "state"
STATE_SET = 7
"""Number of the descriptor set that carries a state file. Any number will do: one set exists at a time."""


class Vcpu(msgspec.Struct, frozen=True, rename="kebab"):
    """One line of what `query-cpus-fast` answers."""

    thread_id: int


class Reply(msgspec.Struct, frozen=True):
    """Any line of the monitor, as far as it tells whom it answers."""

    id: str | None = None


class MonitorError(EngineError):
    """QEMU refused a command."""


class _Client(QMPClient):
    """Writes no line about each message: the library makes its text even where nobody wants to read it, which
    is a tenth of a fork."""

    def _cb_outbound(self, msg: Message) -> Message:
        return msg

    def _cb_inbound(self, msg: Message) -> Message:
        return msg


class Monitor:
    """One connection to one QEMU. `connect` or `resume` first, `close` last."""

    def __init__(self, sock: socket.socket, name: str) -> None:
        self._sock = sock
        self._name = name
        self._client = _Client(name)

    async def connect(self, *, deadline: float) -> None:
        """Greet a QEMU that was just started. Raises `MachineGone` when it ended instead."""
        with self._translated("connect"):
            async with asyncio.timeout_at(deadline):
                await self._client.connect(self._sock)
                # Without this capability the RESUME of a loaded machine is not announced by an event.
                await self._execute(
                    "migrate-set-capabilities", capabilities=[{"capability": "events", "state": True}]
                )

    async def resume(self, *, deadline: float) -> None:
        """Take over the connection of an agent that died, perhaps in the middle of a line."""
        with self._translated("resume"):
            async with asyncio.timeout_at(deadline):
                # Blocking, but QEMU answers at once; the time-out of the socket bounds it.
                await asyncio.to_thread(_resynchronise, self._sock)
                self._client.await_greeting = self._client.negotiate = False
                await self._client.connect(self._sock)

    async def close(self) -> None:
        """End the connection. The machine does not notice: the keeper holds a copy of it."""
        try:
            await self._client.disconnect()
        except (QMPError, OSError, EOFError):
            pass  # It had ended already, which is what was wanted.
        finally:
            self._sock.close()

    async def stop(self) -> None:
        await self._command("stop")

    async def cont(self) -> None:
        await self._command("cont")

    async def settle(self, *, paused: bool) -> None:
        """Make a machine that another agent may have left in the midst of a freeze what it is meant to be."""
        # The keeper's copy of the connection hides that agent's end from QEMU, so its file stays offered.
        with suppress(MonitorError):  # Most of the time there is none.
            await self.withdraw_state_file()
        await (self.stop() if paused else self.cont())

    async def vcpu_threads(self) -> tuple[int, ...]:
        """Thread ids of the vCPUs, in QEMU's own namespace. They do not change while it runs."""
        vcpus = msgspec.convert(await self._command("query-cpus-fast"), list[Vcpu])
        return tuple(vcpu.thread_id for vcpu in vcpus)

    async def offer_state_file(self, state_fd: int) -> None:
        """Hand QEMU a file for `save_state`, ahead of time. The engine's own descriptor stays its own."""
        # QEMU opens members of a set by access mode and writes at the shared offset: a description of
        # its own, write-only and at 0.
        writer = os.open(f"/proc/self/fd/{state_fd}", os.O_WRONLY | os.O_CLOEXEC)
        try:
            await self._with_descriptor(writer, "add-fd", **{"fdset-id": STATE_SET})
        finally:
            os.close(writer)

    async def save_state(self) -> None:
        """Write the stopped machine's device state into the file offered."""
        await self._command("xen-save-devices-state", filename=f"/dev/fdset/{STATE_SET}", live=False)

    async def withdraw_state_file(self) -> None:
        await self._command("remove-fd", **{"fdset-id": STATE_SET})

    async def give_state(self, state_fd: int) -> None:
        """Hand a waiting QEMU the device state it is to start from, ahead of time."""
        reader = os.open(f"/proc/self/fd/{state_fd}", os.O_RDONLY | os.O_CLOEXEC)  # At offset 0, its own.
        try:
            await self._with_descriptor(reader, "getfd", fdname=STATE_NAME)
        finally:
            os.close(reader)

    async def load_and_run(self) -> None:
        """Load the state given and run. Returns when the guest runs.

        `cont` is sent without waiting for the load: QEMU notes it and starts by itself when done, which
        saves asking for the migration's status.
        """
        with self._translated("load"), self._client.listener(("RESUME",)) as resumed:
            await asyncio.gather(
                self._execute("migrate-incoming", uri=f"fd:{STATE_NAME}"), self._execute("cont")
            )
            await self._event(resumed)

    async def _event(self, listener: EventListener) -> None:
        """Wait for one event, or for the end of the connection, whichever is first."""
        wait = asyncio.ensure_future(listener.get())
        ended = asyncio.ensure_future(self._ended())
        try:
            await asyncio.wait((wait, ended), return_when=asyncio.FIRST_COMPLETED)
            if not wait.done():
                raise MachineGone(f"{self._name} ended while it loaded its state")
        finally:
            wait.cancel()
            ended.cancel()

    async def _ended(self) -> None:
        state = await self._client.runstate_changed()
        while state.name == "RUNNING":
            state = await self._client.runstate_changed()

    async def _command(self, name: str, **arguments: object) -> object:
        with self._translated(name):
            return await self._execute(name, **arguments)

    async def _execute(self, name: str, **arguments: object) -> object:
        return await self._client.execute(name, arguments or None)

    async def _with_descriptor(self, descriptor: int, name: str, **arguments: object) -> None:
        with self._translated(name):
            # The client's own method needs a socket of asyncio's loop and fails with uvloop's.
            socket.send_fds(self._sock, [b" "], [descriptor])
            await self._execute(name, **arguments)

    @contextmanager
    def _translated(self, command: str) -> Generator[None]:
        try:
            yield
        except ExecuteError as err:
            raise MonitorError(f"{self._name} refused {command}: {err}") from err
        except TimeoutError as err:
            raise DeadlineExceeded(f"{self._name} did not answer {command} in time") from err
        except (ExecInterruptedError, QMPError, OSError, EOFError) as err:
            raise MachineGone(f"{self._name} went away during {command}") from err


def _resynchronise(sock: socket.socket) -> None:
    """Read past whatever an earlier client left: half a command of its own, replies nobody took, events.

    `\\xff` cannot occur in JSON: QEMU's parser drops what it holds and answers with an error; our own
    reply, known by its id, then marks the place from where the stream is ours.
    """
    sock.setblocking(True)
    sock.settimeout(RESYNC_SECONDS)
    mark = f"resync-{uuid.uuid4()}"
    sock.sendall(b"\xff\n" + json.dumps({"execute": "query-status", "id": mark}).encode() + b"\n")
    while _take_line(sock).id != mark:
        pass
    sock.setblocking(False)


def _take_line(sock: socket.socket) -> Reply:
    """Exactly one line of the stream: what follows it belongs to the next reader."""
    line = b""
    while not line.endswith(b"\n"):
        seen = sock.recv(1 << 16, socket.MSG_PEEK)
        if not seen:
            raise EOFError("monitor closed")
        end = seen.find(b"\n")
        line += sock.recv(end + 1 if end >= 0 else len(seen))
    try:
        return msgspec.json.decode(line, type=Reply)
    except msgspec.MsgspecError:
        return Reply()  # Half of something, from before us.
