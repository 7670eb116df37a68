"""What the shim refuses, and that a refusal leaves guest memory and the next request as they were."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from component.shim_machine import (
    RAM_BYTES,
    ShimMachine,
    differing_pages,
    firmware_machine,
    memfd,
    shim_machine,
    soon,
)
from forktree_agent.engine.contract import DeadlineExceeded, MachineGone, TooFragmented
from forktree_agent.engine.microvm.layers import MAX_MAPPINGS, PAGE_BYTES, RUN_BYTES, Run
from forktree_agent.engine.microvm.shim import (
    Op,
    ShimClient,
    ShimError,
    Status,
    decode_reply,
    encode_map_table,
    encode_request,
)
from forktree_dev import native

PAGES = RAM_BYTES // PAGE_BYTES
LAYER_PAGES = 8
GOOD = Run(600, 2, 0)


@pytest.fixture
async def machine() -> AsyncIterator[ShimMachine]:
    async with firmware_machine() as machine:
        yield machine


def layer_of(*runs: Run) -> int:
    """A layer of a few pages of 0x5a and this run table."""
    return memfd(b"\x5a" * LAYER_PAGES * PAGE_BYTES + b"".join(run.encode() for run in runs))


async def refused(machine: ShimMachine, layer: int, table_offset: int, runs: int) -> ShimError:
    """The refusal, once it is shown that memory is what it was."""
    before = await machine.memory()
    try:
        with pytest.raises(ShimError) as caught:
            await machine.shim.map_layer(layer, table_offset, runs, deadline=soon())
    finally:
        os.close(layer)
    assert differing_pages(await machine.memory(), before) == []
    return caught.value


@pytest.mark.parametrize(
    "bad",
    [
        pytest.param(Run(PAGES, 1, 0), id="beyond-ram"),
        pytest.param(Run(PAGES - 1, 2, 0), id="across-the-end-of-ram"),
        pytest.param(Run(2**32 - 1, 2**32 - 1, 0), id="page-overflow"),
        pytest.param(Run(700, 0, 0), id="empty"),
        pytest.param(Run(700, 1, 1), id="unaligned"),
        pytest.param(Run(700, 1, LAYER_PAGES * PAGE_BYTES), id="in-the-run-table"),
        pytest.param(Run(700, LAYER_PAGES, PAGE_BYTES), id="across-the-end-of-the-layer"),
        pytest.param(Run(700, 1, 2**64 - PAGE_BYTES), id="offset-overflow"),
        pytest.param(Run(601, 1, 0), id="overlaps-the-run-before"),
        pytest.param(Run(1, 1, 0), id="out-of-order"),
    ],
)
async def test_one_bad_run_keeps_all_from_being_mapped(machine: ShimMachine, bad: Run) -> None:
    err = await refused(machine, layer_of(GOOD, bad), LAYER_PAGES * PAGE_BYTES, 2)
    assert err.status is Status.BAD_RUN
    assert "run 1" in err.message


@pytest.mark.parametrize(
    ("table_offset", "runs"),
    [
        pytest.param(LAYER_PAGES * PAGE_BYTES, 2, id="table-longer-than-the-file"),
        pytest.param(LAYER_PAGES * PAGE_BYTES + RUN_BYTES, 0, id="table-off-a-page-border"),
        pytest.param(2**64 - PAGE_BYTES, 1000, id="table-offset-overflow"),
    ],
)
async def test_a_table_that_is_not_there_is_no_layer(
    machine: ShimMachine, table_offset: int, runs: int
) -> None:
    err = await refused(machine, layer_of(GOOD), table_offset, runs)
    assert err.status is Status.BAD_LAYER


async def test_what_is_no_file_is_no_layer(machine: ShimMachine) -> None:
    reader, writer = os.pipe()
    os.close(writer)
    err = await refused(machine, reader, 0, 1)
    assert err.status is Status.BAD_LAYER


async def test_a_table_beyond_the_mappings_allowed_is_not_even_sent(machine: ShimMachine) -> None:
    layer = layer_of(GOOD)
    with pytest.raises(TooFragmented):
        await machine.shim.map_layer(layer, 0, MAX_MAPPINGS // 2, deadline=soon())
    os.close(layer)


async def test_mappings_are_never_more_than_was_said(machine: ShimMachine) -> None:
    fresh = await machine.shim.stat(deadline=soon())
    runs = [Run(600 + 2 * i, 1, (i % LAYER_PAGES) * PAGE_BYTES) for i in range(1000)]
    layer = layer_of(*runs)
    said = await machine.shim.map_layer(layer, LAYER_PAGES * PAGE_BYTES, len(runs), deadline=soon())
    os.close(layer)
    counted = (await machine.shim.stat(deadline=soon())).mappings
    lines = Path(f"/proc/{machine.process.pid}/maps").read_text().splitlines()
    assert counted == len(lines) <= said
    assert counted - fresh.mappings >= len(runs)


async def test_a_dump_needs_a_layer_and_fills_it_once(machine: ShimMachine) -> None:
    with pytest.raises(ShimError) as caught:
        await machine.shim.dump(4, deadline=soon())
    assert caught.value.status is Status.NO_LAYER
    await machine.run_until_written()
    layer, _ = await machine.dump()
    os.close(layer)
    with pytest.raises(ShimError) as caught:
        await machine.shim.dump(4, deadline=soon())
    assert caught.value.status is Status.NO_LAYER
    assert await machine.shim.finish(deadline=soon()) == 0


async def test_a_sealed_file_cannot_be_prepared_and_the_next_can(machine: ShimMachine) -> None:
    await machine.run_until_written()
    sealed, _ = await machine.dump()
    with pytest.raises(ShimError) as caught:
        await machine.shim.prepare(sealed, RAM_BYTES, deadline=soon())
    os.close(sealed)
    assert caught.value.status is Status.OS
    layer, _ = await machine.dump()
    os.close(layer)


async def test_memory_is_not_guessed(machine: ShimMachine) -> None:
    with pytest.raises(ShimError) as caught:
        await machine.shim.hello(2 * RAM_BYTES, deadline=soon())
    assert caught.value.status is Status.RAM_NOT_FOUND
    await machine.shim.hello(RAM_BYTES, deadline=soon())  # Asked again, as an agent does that takes over.


async def test_nothing_comes_before_hello() -> None:
    ram = memfd(size=RAM_BYTES)
    async with shim_machine(ram=ram, incoming=True) as machine:
        for ask in (machine.shim.stat, machine.shim.finish):
            with pytest.raises(ShimError) as caught:
                await ask(deadline=soon())
            assert caught.value.status is Status.NO_HELLO
        with pytest.raises(ShimError) as caught:
            await machine.shim.hello(RAM_BYTES + PAGE_BYTES, deadline=soon())
        assert caught.value.status is Status.RAM_NOT_FOUND
    os.close(ram)


async def test_memory_that_others_see_is_neither_dumped_nor_mapped_over() -> None:
    async with firmware_machine(share=True) as machine:
        layer = layer_of(GOOD)
        with pytest.raises(ShimError) as caught:
            await machine.shim.prepare(layer, PAGE_BYTES, deadline=soon())
        assert caught.value.status is Status.RAM_SHARED
        err = await refused(machine, layer, LAYER_PAGES * PAGE_BYTES, 1)
        assert err.status is Status.RAM_SHARED


@pytest.mark.parametrize(
    "packet",
    [
        pytest.param(b"\x01", id="no-header"),
        pytest.param(b"\x02\0\x63\0\x07\0\0\0", id="unknown-op"),
        pytest.param(b"\x02\0\x02\0\x07\0\0\0", id="no-fields"),
        pytest.param(bytes(64), id="too-long"),
        pytest.param(b"\x02\0\x07\0\x07\0\0\0", id="a-stat-with-files"),
    ],
)
async def test_a_packet_that_is_no_request_is_answered_and_forgotten(
    machine: ShimMachine, packet: bytes
) -> None:
    file = memfd()
    for fds in ([], [file], [file] * 3):
        socket.send_fds(machine.shim_socket, [packet], fds)
    os.close(file)
    await machine.shim.stat(deadline=soon())  # The three refusals before it bear other ids.
    descriptors = Path(f"/proc/{machine.process.pid}/fd")
    open_now = len(list(descriptors.iterdir()))
    for _ in range(20):
        file = memfd()
        socket.send_fds(machine.shim_socket, [packet], [file] * 3)
        os.close(file)
    await machine.shim.stat(deadline=soon())
    assert len(list(descriptors.iterdir())) == open_now


async def test_a_new_agent_goes_on_where_a_dead_one_stopped(machine: ShimMachine) -> None:
    await machine.run_until_written()
    layer = memfd()
    await machine.shim.prepare(layer, PAGE_BYTES, deadline=soon())
    with pytest.raises(DeadlineExceeded):
        await machine.shim.dump(4, deadline=0)  # Asked, and its answer never read.
    successor = ShimClient(machine.shim_socket)
    await successor.resume(deadline=soon())
    os.close(layer)
    assert (await successor.stat(deadline=soon())).private_pages > 0
    machine.shim = successor
    layer, dump = await machine.dump()
    assert dump.dirty_pages > 0
    os.close(layer)


async def test_a_file_too_many_is_refused(machine: ShimMachine) -> None:
    layer = layer_of(GOOD)
    request = encode_request(Op.MAP_TABLE, 7, encode_map_table(LAYER_PAGES * PAGE_BYTES, 1, 0))
    socket.send_fds(machine.shim_socket, [request], [layer] * 2)
    os.close(layer)
    packet = await asyncio.get_running_loop().sock_recv(machine.shim_socket, 64)
    assert decode_reply(packet).status is Status.MALFORMED


async def test_questions_asked_at_once_are_answered_in_turn(machine: ShimMachine) -> None:
    stats = await asyncio.gather(*(machine.shim.stat(deadline=soon()) for _ in range(8)))
    assert len(set(stats)) == 1


async def test_a_machine_that_stands_still_is_not_waited_for_beyond_the_deadline(
    machine: ShimMachine,
) -> None:
    machine.process.send_signal(signal.SIGSTOP)
    # A thread that is at work when the signal is sent may go on for a moment: wait until all stand.
    await asyncio.to_thread(os.waitid, os.P_PID, machine.process.pid, os.WSTOPPED | os.WNOWAIT)
    with pytest.raises(DeadlineExceeded):
        await machine.shim.stat(deadline=asyncio.get_running_loop().time() + 0.05)
    machine.process.send_signal(signal.SIGCONT)
    await machine.shim.stat(deadline=soon())


async def test_a_machine_that_ended_is_gone(machine: ShimMachine) -> None:
    machine.process.kill()
    await machine.process.wait()
    with pytest.raises(MachineGone):
        await machine.shim.stat(deadline=soon())


def qemu_version(**environment: str) -> subprocess.CompletedProcess[str]:
    command = ["qemu-system-x86_64", "--version"]
    env = {**os.environ, "LD_PRELOAD": str(native.shim()), **environment}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=60)


def test_without_its_variable_the_library_does_nothing() -> None:
    assert qemu_version().returncode == 0


@pytest.mark.parametrize("value", ["", "x", "-1", "0", "999999"])
def test_a_machine_that_could_never_be_forked_does_not_start(value: str) -> None:
    ended = qemu_version(FORKTREE_SHIM_FD=value)
    assert ended.returncode == 97
    assert ended.stdout == ""
    assert ended.stderr.startswith(f"forktree-shim: FORKTREE_SHIM_FD={value}: ")
