"""What no fork can do without, measured beside every fork: copy as many bytes as were dirty, once, and save
and load the device state, once.

The copy is a plain memory copy in this process, between pages that are there already. The device state is
that of a bare QEMU with the machine type and devices of our guests, saved and loaded by its own commands over
a blocking socket; no guest has run in it.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import mmap
import os
import secrets
import socket
import time
from collections.abc import AsyncGenerator, Generator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from forktree_bench.figures import Figure
from forktree_dev.processes import Service

COPY = Figure(name="floor_copy", clock="plain copy of as many bytes in one process; benchmark's clock")
SAVE = Figure(
    name="floor_save", clock="device state of a bare QEMU saved, by one QMP command; benchmark's clock"
)
LOAD = Figure(
    name="floor_load", clock="device state loaded by a waiting QEMU until it runs; benchmark's clock"
)
FLOOR = Figure(name="floor", clock="the sum of copy, save and load of one run; benchmark's clock")

_MILLISECONDS = 1000.0
_ANSWER_SECONDS = 20.0
_COMMAND = (
    "qemu-system-x86_64",
    "-no-user-config",
    "-nodefaults",
    "-machine",
    "microvm,acpi=on,suppress-vmdesc=on",
    *("-accel", "tcg,tb-size=32"),
    *("-cpu", "max"),
    *("-smp", "1"),
    *("-display", "none"),
    *("-global", "migration.send-configuration=off"),
    *("-chardev", "null,id=console", "-serial", "chardev:console"),
    *("-device", "virtio-serial-device"),
    *("-chardev", "null,id=guest", "-device", "virtserialport,chardev=guest,name=forktree"),
    *("-drive", "id=root,driver=null-co,size=67108864,if=none,readonly=on"),
    *("-device", "virtio-blk-device,drive=root"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Milliseconds."""

    copy: float
    save: float
    load: float

    @property
    def whole(self) -> float:
        return self.copy + self.save + self.load


class Floor:
    """Measures the floor of forks that copy so many bytes. Everything is made ready before a clock starts."""

    def __init__(self, folder: Path, saver: _Qemu, memory_mb: int) -> None:
        self._folder = folder
        self._saver = saver
        self._memory_mb = memory_mb

    @classmethod
    @asynccontextmanager
    async def running(cls, folder: Path, *, memory_mb: int) -> AsyncGenerator[Self]:
        """`folder` on a tmpfs, as layers and states are. `memory_mb` as large as the guests."""
        async with _Qemu.running(folder, memory_mb, waiting=False) as saver:
            yield cls(folder, saver, memory_mb)

    async def sample(self, size_bytes: int) -> Sample:
        async with _Qemu.running(self._folder, self._memory_mb, waiting=True) as loader:
            state = self._folder / f"state-{secrets.token_hex(4)}"
            copy = copy_ms(size_bytes)
            try:
                return Sample(copy=copy, save=self._saver.save_ms(state), load=loader.load_ms(state))
            finally:
                state.unlink(missing_ok=True)


def copy_ms(size_bytes: int) -> float:
    """A copy from private memory that was just written to into a file in memory that was touched before."""
    size = max(size_bytes, mmap.PAGESIZE)
    with ExitStack() as held:
        descriptor = os.memfd_create("floor")
        held.callback(os.close, descriptor)
        os.truncate(descriptor, size)
        target = held.enter_context(mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED))
        source = held.enter_context(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        for each, fill in ((target, 1), (source, 2)):
            ctypes.memset(_address(each), fill, size)
        began = time.monotonic()
        ctypes.memmove(_address(target), _address(source), size)
        return (time.monotonic() - began) * _MILLISECONDS


def _address(memory: mmap.mmap) -> int:
    # The view is let go at once: memory that is looked at cannot be unmapped.
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


class _Qemu:
    """One bare QEMU and its monitor. What it is asked for takes a millisecond, so asking may block."""

    def __init__(self, monitor: socket.socket) -> None:
        self._monitor = monitor
        self._lines = monitor.makefile("rb")

    @classmethod
    @asynccontextmanager
    async def running(cls, folder: Path, memory_mb: int, *, waiting: bool) -> AsyncGenerator[Self]:
        """Connected; with `waiting` it takes a state to go on from, else it stands before its first step."""
        name = f"floor-{secrets.token_hex(4)}"
        path = folder / f"{name}.qmp"
        with _listening(path) as listener:
            start = ("-incoming", "defer", "-S") if waiting else ("-S",)
            service = Service(
                name,
                [*_COMMAND, "-m", f"{memory_mb}M", "-qmp", f"unix:{path}", *start],
                folder,
                grace_seconds=0.0,  # It holds nothing that anybody misses.
            )
            service.start()
            try:
                monitor = await asyncio.to_thread(_accepted, listener, service)
                with monitor:
                    qemu = cls(monitor)
                    await asyncio.to_thread(qemu._greet)
                    yield qemu
            finally:
                await service.stop()
                service.log_path.unlink(missing_ok=True)

    def save_ms(self, state: Path) -> float:
        began = time.monotonic()
        self._command("xen-save-devices-state", filename=str(state), live=False)
        return (time.monotonic() - began) * _MILLISECONDS

    def load_ms(self, state: Path) -> float:
        """From the load's request to the event that says that it runs."""
        with state.open("rb") as content:
            socket.send_fds(self._monitor, [b" "], [content.fileno()])
            self._command("getfd", fdname="state")
        began = time.monotonic()
        self._send("migrate-incoming", uri="fd:state")
        self._send("cont")
        while self._read().get("event") != "RESUME":
            pass
        return (time.monotonic() - began) * _MILLISECONDS

    def _greet(self) -> None:
        self._read()
        self._command("qmp_capabilities")
        # Without it the RESUME of a loaded machine is not told.
        events = [{"capability": "events", "state": True}]
        self._command("migrate-set-capabilities", capabilities=events)

    def _command(self, name: str, **arguments: object) -> None:
        self._send(name, **arguments)
        while True:
            answer = self._read()
            if "error" in answer:
                raise RuntimeError(f"the floor's QEMU refused {name}: {answer['error']}")
            if "return" in answer:
                return

    def _send(self, name: str, **arguments: object) -> None:
        self._monitor.sendall(json.dumps({"execute": name, "arguments": arguments}).encode() + b"\n")

    def _read(self) -> dict[str, object]:
        line = self._lines.readline()
        if not line:
            raise RuntimeError("the floor's QEMU ended")
        answer: dict[str, object] = json.loads(line)
        return answer


@contextmanager
def _listening(path: Path) -> Generator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(1)
        listener.settimeout(_ANSWER_SECONDS)
        try:
            yield listener
        finally:
            path.unlink()


def _accepted(listener: socket.socket, service: Service) -> socket.socket:
    """The QEMU's connection. Raises `ProcessFailed` with its log when it ends instead."""
    try:
        monitor, _ = listener.accept()
    except TimeoutError:
        raise service.failure() from None
    monitor.settimeout(_ANSWER_SECONDS)
    return monitor
