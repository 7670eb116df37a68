"""A QEMU with the shim, without keeper and engine: for tests that look at guest memory byte by byte.

Its uid is a stranger's and its sandbox denies everything that it can, as in the engine. Firmware of our own
stands in for a guest where all that matters is memory that is written without end.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
import struct
from collections.abc import AsyncGenerator, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from typing import cast

from qemu.qmp import Message, QMPClient

from forktree_agent.engine.microvm.layers import PAGE_BYTES
from forktree_agent.engine.microvm.shim import Dump, ShimClient
from forktree_agent.engine.microvm.tracking import track
from forktree_dev import native

UID = 64_401
SANDBOX = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"
RAM_BYTES = 32 << 20
"""Of a machine that runs our firmware."""
FIRMWARE_BYTES = 64 << 10
LOOP_ADDRESS = 1 << 20
"""Where our firmware runs."""
FIRST_WRITTEN = 2 << 20
"""Where it begins to write."""
FIRMWARE_WINDOW = range(640 << 10, 1 << 20)
"""What lies here over memory is the firmware, which is no part of it: a machine that was loaded has none."""
SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK
SECONDS = 60.0


def soon() -> float:
    """A deadline that only a defect reaches."""
    return asyncio.get_running_loop().time() + SECONDS


def memfd(content: bytes = b"", *, size: int = 0) -> int:
    """A memory file. Sparse up to `size` where that is more than the content."""
    fd = os.memfd_create("shim-test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, max(size, len(content)))
    os.pwrite(fd, content, 0)
    return fd


def firmware(stride_pages: int = 1) -> bytes:
    """Firmware that numbers its rounds and in each writes the number to every `stride_pages`th page.

    So whenever it is stopped the pages hold one number up to where it is, and from there on the one before.
    """
    segments, descriptor = 0x80, 0xA0
    base = 0x100000 - FIRMWARE_BYTES
    prologue = (
        b"\xfa"  # cli
        + b"\x2e\x66\x0f\x01\x16" + struct.pack("<H", descriptor)  # lgdt cs:[descriptor]
        + b"\x0f\x20\xc0\x0c\x01\x0f\x22\xc0"  # Protected mode: mov eax, cr0; or al, 1; mov cr0, eax
    )  # fmt: skip
    loop = (
        b"\xbb" + struct.pack("<I", 1)  # mov ebx, 1
        + b"\xbf" + struct.pack("<I", FIRST_WRITTEN)  # round: mov edi, first
        + b"\x89\x1f"  # page: mov [edi], ebx
        + b"\x81\xc7" + struct.pack("<I", stride_pages * PAGE_BYTES)  # add edi, stride
        + b"\x81\xff" + struct.pack("<I", RAM_BYTES)  # cmp edi, end
        + b"\x72\xf0"  # jb page
        + b"\x43"  # inc ebx
        + b"\xeb\xe8"  # jmp round
    )  # fmt: skip
    jump_bytes, copy_bytes = 8, 32
    loop_at = base + len(prologue) + jump_bytes + copy_bytes
    jump = b"\x66\xea" + struct.pack("<IH", base + len(prologue) + jump_bytes, 8)  # To 32-bit code behind it.
    copy = (  # The loop runs in memory: a machine that is loaded has none of the firmware.
        b"\x66\xb8\x10\x00\x8e\xd8\x8e\xc0"  # mov ax, 0x10; mov ds, ax; mov es, ax
        + b"\xbe" + struct.pack("<I", loop_at)  # mov esi, loop
        + b"\xbf" + struct.pack("<I", LOOP_ADDRESS)  # mov edi, address
        + b"\xb9" + struct.pack("<I", len(loop))  # mov ecx, length
        + b"\xf3\xa4"  # rep movsb
        + b"\xb8" + struct.pack("<I", LOOP_ADDRESS) + b"\xff\xe0"  # mov eax, address; jmp eax
    )  # fmt: skip
    assert (len(jump), len(copy)) == (jump_bytes, copy_bytes)
    image = bytearray(FIRMWARE_BYTES)
    code = prologue + jump + copy + loop
    assert len(code) < segments
    image[: len(code)] = code
    flat = struct.pack("<QQQ", 0, 0x00CF9A000000FFFF, 0x00CF92000000FFFF)  # Nothing, code, data: all 4 GiB.
    image[segments : segments + len(flat)] = flat
    image[descriptor : descriptor + 6] = struct.pack("<HI", len(flat) - 1, base + segments)
    image[-16:-11] = b"\xea\x00\x00" + struct.pack("<H", base >> 4)  # Reset: jmp to the image's start.
    return bytes(image)


def rounds(memory: bytes, stride_pages: int = 1) -> list[int]:
    """What our firmware has written to each of its pages. All 0: it has not begun."""
    pages = range(FIRST_WRITTEN, len(memory), stride_pages * PAGE_BYTES)
    return [struct.unpack_from("<I", memory, page)[0] for page in pages]


def is_one_instant(numbers: Sequence[int]) -> bool:
    """Whether firmware can have left the pages like this: one round, from a place on the one before it."""
    return sorted(numbers, reverse=True) == list(numbers) and numbers[0] - numbers[-1] in (0, 1)


@dataclass(slots=True)
class ShimMachine:
    """One running QEMU."""

    process: asyncio.subprocess.Process
    qmp: QMPClient
    shim: ShimClient
    shim_socket: socket.socket
    guest: socket.socket
    """Of the port `forktree`, where the guest has one."""
    scratch: int
    """A file that QEMU has inherited under the same number; so is the next."""
    state: int
    ram_bytes: int

    async def memory(self) -> bytes:
        """All of guest memory, as QEMU's own monitor sees it. The machine should be stopped."""
        path = f"/proc/self/fd/{self.scratch}"
        await self.qmp.execute("pmemsave", {"val": 0, "size": self.ram_bytes, "filename": path})
        return os.pread(self.scratch, self.ram_bytes, 0)

    async def run_until_written(self, *, beyond: int = 1) -> None:
        """Let firmware come beyond this round, at least to its second, then stop it."""
        while True:
            await self.qmp.execute("cont")
            await self.qmp.execute("stop")
            if min(rounds(await self.memory())[:1]) > beyond:
                return

    async def load(self, state: int) -> None:
        """Load device state and stay stopped."""
        await self.qmp.execute("migrate-set-capabilities", {"capabilities": [
            {"capability": "events", "state": True}
        ]})  # fmt: skip
        reader = os.open(f"/proc/self/fd/{state}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            self.qmp.send_fd_scm(reader)
            await self.qmp.execute("getfd", {"fdname": "state"})
        finally:
            os.close(reader)
        with self.qmp.listener(("MIGRATION",)) as events:
            await self.qmp.execute("migrate-incoming", {"uri": "fd:state"})
            async with asyncio.timeout_at(soon()):
                while (status := _migration_status(await events.get())) != "completed":
                    assert status != "failed"

    async def save(self) -> None:
        """Write the stopped machine's device state to its file `state`."""
        path = f"/proc/self/fd/{self.state}"
        await self.qmp.execute("xen-save-devices-state", {"filename": path, "live": False})

    async def track(self) -> None:
        """Have its writes noted, as the engine does."""
        assert await track(self.shim, "auto", deadline=soon()) is None

    async def dump(
        self, *, prepared_bytes: int = 1 << 20, gap_pages: int = 4, since: int = 0, mark: int = 0
    ) -> tuple[int, Dump]:
        """A sealed layer of this stopped machine. The descriptor is the caller's."""
        layer = memfd()
        await self.shim.prepare(layer, prepared_bytes, deadline=soon())
        dump = await self.shim.dump(gap_pages, since=since, mark=mark, deadline=soon())
        assert await self.shim.finish(deadline=soon()) == dump.bytes == os.fstat(layer).st_size
        fcntl.fcntl(layer, fcntl.F_ADD_SEALS, SEALS)
        return layer, dump


def _migration_status(event: Message) -> object:
    data = event["data"]
    assert isinstance(data, dict)
    return cast("dict[str, object]", data)["status"]


@asynccontextmanager
async def shim_machine(
    *arguments: str, ram: int, files: Sequence[int] = (), incoming: bool = False, share: bool = False
) -> AsyncGenerator[ShimMachine]:
    """A QEMU over the memory file `ram`: stopped, or waiting for state. It inherits `files`."""
    ram_bytes = os.fstat(ram).st_size
    with ExitStack() as ours:
        ends = [socket.socketpair(type=kind) for kind in (socket.SOCK_STREAM,) * 2 + (socket.SOCK_SEQPACKET,)]
        for pair in ends:
            for end in pair:
                ours.callback(end.close)
        monitor, guest, shim = (far.fileno() for _, far in ends)
        library = os.open(native.shim(), os.O_RDONLY | os.O_CLOEXEC)
        ours.callback(os.close, library)
        scratch, state = memfd(), memfd()
        ours.callback(os.close, scratch)
        ours.callback(os.close, state)
        process = await asyncio.create_subprocess_exec(
            "qemu-system-x86_64",
            *("-no-user-config", "-nodefaults", "-display", "none", "-no-reboot", "-S"),
            *("-machine", "microvm,acpi=on,memory-backend=ram,suppress-vmdesc=on"),
            *("-accel", "tcg,tb-size=32", "-cpu", "max", "-m", f"{ram_bytes >> 20}M"),
            "-object",
            f"memory-backend-file,id=ram,size={ram_bytes},mem-path=/proc/self/fd/{ram},"
            f"share={'on' if share else 'off'}",
            *("-global", "migration.send-configuration=off"),
            *("-sandbox", SANDBOX),
            *("-chardev", f"socket,id=monitor,fd={monitor}", "-mon", "chardev=monitor,mode=control"),
            *("-device", "virtio-serial-device", "-chardev", f"socket,id=guest,fd={guest}"),
            *("-device", "virtserialport,chardev=guest,name=forktree"),
            *arguments,
            *(("-incoming", "defer") if incoming else ()),
            stdin=asyncio.subprocess.DEVNULL,
            env={**os.environ, "LD_PRELOAD": f"/proc/self/fd/{library}", "FORKTREE_SHIM_FD": str(shim)},
            pass_fds=(monitor, guest, shim, library, ram, scratch, state, *files),
            user=UID,
            group=UID,
            extra_groups=(),
        )
        for _, far in ends:
            far.close()
        qmp = QMPClient()
        try:
            await qmp.connect(ends[0][0])
            yield ShimMachine(
                process, qmp, ShimClient(ends[2][0]), ends[2][0], ends[1][0], scratch, state, ram_bytes
            )
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()
            with suppress(EOFError, OSError):  # Its machine was killed, which is how all of them end.
                await qmp.disconnect()


@asynccontextmanager
async def firmware_machine(
    *, stride_pages: int = 1, ram: int | None = None, incoming: bool = False, share: bool = False
) -> AsyncGenerator[ShimMachine]:
    """A machine with our firmware, its shim greeted, over `ram` or an empty memory file of its own."""
    with ExitStack() as ours:
        image = memfd(firmware(stride_pages))
        ours.callback(os.close, image)
        if ram is None:
            ram = memfd(size=RAM_BYTES)
            ours.callback(os.close, ram)
        bios = f"/proc/self/fd/{image}"
        async with shim_machine(
            "-bios", bios, ram=ram, files=(image,), incoming=incoming, share=share
        ) as machine:
            await machine.shim.hello(machine.ram_bytes, deadline=soon())
            yield machine


def differing_pages(one: bytes, other: bytes) -> list[int]:
    """Pages of memory that are not the same, the first few."""
    assert len(one) == len(other)
    pages = (at for at in range(0, len(one), PAGE_BYTES) if at not in FIRMWARE_WINDOW)
    differ = (at // PAGE_BYTES for at in pages if one[at : at + PAGE_BYTES] != other[at : at + PAGE_BYTES])
    return list(islice(differ, 20))
