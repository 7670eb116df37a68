"""A real guest for tests of init and the guest channel: QEMU with the engine's arguments, nothing between."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
from collections.abc import AsyncGenerator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from forktree_agent.engine.contract import Command, ExecResult
from forktree_agent.engine.microvm.arguments import Boot, Descriptor, Wiring, qemu_arguments
from forktree_agent.engine.microvm.guest import UNIDENTIFIED, GuestChannel
from forktree_dev.images import guest_directory

MEMORY_BYTES = 256 << 20
OVERLAY_BYTES = 64 << 20


def soon(seconds: float = 180.0) -> float:
    """A deadline that only a hang reaches, also on a machine that does other things."""
    return asyncio.get_running_loop().time() + seconds


@dataclass(slots=True)
class GuestMachine:
    """A guest that has booted."""

    channel: GuestChannel
    console: Path
    generation: str = field(default=UNIDENTIFIED)

    async def exec(
        self, *argv: str, stdin: bytes = b"", seconds: float = 150.0, limit: int = 1 << 20, **more: object
    ) -> ExecResult:
        command = Command(
            argv=argv,
            stdin=stdin,
            timeout_seconds=seconds,
            output_limit_bytes=limit,
            **more,  # type: ignore[arg-type]
        )
        return await self.channel.exec(command, self.generation, deadline=soon())

    async def sh(self, script: str) -> str:
        """What a script that has to succeed prints."""
        result = await self.exec("sh", "-c", script)
        assert (result.exit_code, result.stderr) == (0, b""), result
        return result.stdout.decode()


@asynccontextmanager
async def booted(folder: Path, image: str = "tiny", *, vcpus: int = 1) -> AsyncGenerator[GuestMachine]:
    """Boot `builtin:IMAGE` under emulation; the machine is killed and reaped on leaving."""
    guest = await asyncio.to_thread(guest_directory, [image])
    disk = guest / "images" / f"{image}.erofs"
    async with started(folder, guest, disk, vcpus=vcpus) as (channel, console, _):
        try:
            await channel.wait_booted(deadline=soon())
        except Exception as err:
            err.add_note(console.read_text(errors="replace"))
            raise
        yield GuestMachine(channel, console)


@asynccontextmanager
async def started(
    folder: Path, guest: Path, disk: Path, *, vcpus: int = 1
) -> AsyncGenerator[tuple[GuestChannel, Path, subprocess.Popen[bytes]]]:
    """A QEMU that begins to boot, its console written to a file."""
    console = folder / "console.log"
    with ExitStack() as opened:
        ours, theirs = socket.socketpair()
        monitor, unused = socket.socketpair()
        ram = os.memfd_create("forktree-test-ram")
        opened.callback(os.close, ram)
        os.ftruncate(ram, MEMORY_BYTES)
        files = [os.open(path, os.O_RDONLY) for path in (disk, guest / "vmlinux", guest / "initrd")]
        for descriptor in files:
            opened.callback(os.close, descriptor)
        for end in (theirs, monitor, unused):
            opened.enter_context(end)
        inherited = [Descriptor(each) for each in (ram, *files, monitor.fileno(), theirs.fileno())]
        arguments = qemu_arguments(
            "qemu-system-x86_64",
            "test",
            accelerator="tcg",
            vcpus=vcpus,
            memory_bytes=MEMORY_BYTES,
            wiring=Wiring(ram=inherited[0], root_disk=inherited[1], monitor=inherited[4], guest=inherited[5]),
            boot=Boot(
                kernel=inherited[2],
                initrd=inherited[3],
                overlay_bytes=OVERLAY_BYTES,
                network=False,
                counter_khz=None,
            ),
        )
        log = opened.enter_context(console.open("wb"))
        process = subprocess.Popen(
            arguments, stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=inherited
        )
        try:
            theirs.close()
            channel = GuestChannel(ours, "test")
            async with channel.running():
                yield channel, console, process
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
