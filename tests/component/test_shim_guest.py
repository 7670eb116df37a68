"""A real guest forked by hand: with QEMU's monitor, the shim and the guest's channel, step by step."""

from __future__ import annotations

import os
import secrets
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager

from component.shim_machine import ShimMachine, differing_pages, memfd, shim_machine, soon
from forktree_agent.engine.contract import Command
from forktree_agent.engine.microvm.guest import UNIDENTIFIED, GuestChannel, Identity
from forktree_dev.images import guest_directory

RAM_BYTES = 128 << 20
APPEND = (
    "console=ttyS0 reboot=t panic=-1 quiet forktree.overlay=33554432 "
    "tsc_early_khz=2000000 lpj=4000000 no_timer_check"
)


@asynccontextmanager
async def guest_machine(*, incoming: bool) -> AsyncGenerator[tuple[ShimMachine, GuestChannel]]:
    """A machine of the image `tiny`: to be booted, or to be loaded. Its memory is private from the start."""
    directory = guest_directory(["tiny"])
    with ExitStack() as ours:

        def opened(name: str) -> int:
            fd = os.open(directory / name, os.O_RDONLY | os.O_CLOEXEC)
            ours.callback(os.close, fd)
            return fd

        ram = memfd(size=RAM_BYTES)
        ours.callback(os.close, ram)
        disk, kernel, initrd = opened("images/tiny.erofs"), opened("vmlinux"), opened("initrd")
        arguments = [
            *("-drive", f"id=root,file=/proc/self/fd/{disk},format=raw,if=none,readonly=on"),
            *("-device", "virtio-blk-device,drive=root"),
        ]
        if not incoming:
            arguments += ["-kernel", f"/proc/self/fd/{kernel}", "-initrd", f"/proc/self/fd/{initrd}"]
            arguments += ["-append", APPEND]
        files = (disk, kernel, initrd)
        async with shim_machine(*arguments, ram=ram, files=files, incoming=incoming) as machine:
            await machine.shim.hello(RAM_BYTES, deadline=soon())
            guest = GuestChannel(machine.guest, f"guest-{machine.process.pid}")
            async with guest.running():
                yield machine, guest


async def sh(guest: GuestChannel, generation: str, script: str) -> str:
    result = await guest.exec(Command(argv=("/bin/sh", "-c", script)), generation, deadline=soon())
    assert result.exit_code == 0, result
    return result.stdout.decode()


async def identify(guest: GuestChannel) -> str:
    """Give the guest a new identity; it comes before anything else that the guest does."""
    generation = str(uuid.uuid4())
    guest.queue_identity(
        Identity(
            generation=generation,
            hostname="child",
            unix_ns=time.time_ns(),
            entropy=secrets.token_bytes(32),
            env={},
        )
    )
    return generation


async def test_a_guests_child_has_its_memory_and_its_running_programs() -> None:
    async with AsyncExitStack() as machines:
        parent, parents_guest = await machines.enter_async_context(guest_machine(incoming=False))
        await parent.qmp.execute("cont")
        await parents_guest.wait_booted(deadline=soon())
        waiting = "mkfifo go out; (n=41; read x < go; echo $((n + 1)) > out) >/dev/null 2>&1 &"
        await sh(parents_guest, UNIDENTIFIED, f"cd /tmp; {waiting}")
        await parent.qmp.execute("stop")
        await parent.save()
        layer, dump = await parent.dump(prepared_bytes=64 << 20)
        memory = await parent.memory()
        child, childs_guest = await machines.enter_async_context(guest_machine(incoming=True))
        await child.shim.map_layer(layer, dump.table_offset, dump.runs, deadline=soon())
        os.close(layer)
        await child.load(parent.state)
        assert differing_pages(await child.memory(), memory) == []
        generation = await identify(childs_guest)
        await child.qmp.execute("cont")
        await childs_guest.identified(generation, deadline=soon())
        await parent.qmp.execute("cont")
        # Were it one program for both, it would answer once and leave the other to its deadline.
        for guest, identity in ((childs_guest, generation), (parents_guest, UNIDENTIFIED)):
            assert await sh(guest, identity, "cd /tmp; echo > go; cat out") == "42\n"
