"""The guest channel against a scripted guest at the other end of a socket pair: honest, slow, and hostile."""

from __future__ import annotations

import asyncio
import base64
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest

from forktree_agent.engine.contract import (
    AtCapacity,
    Command,
    CommandRefused,
    DeadlineExceeded,
    EngineError,
    ExecResult,
    MachineGone,
    NotStill,
)
from forktree_agent.engine.microvm.guest import UNIDENTIFIED, GuestChannel, Identity
from forktree_agent.engine.microvm.guest_line import GuestError

GENERATION = "6f1c2d3e-4a5b-4c6d-8e7f-901a2b3c4d5e"
OTHER = "11111111-2222-4333-8444-555555555555"
TRUE = Command(argv=("true",))


class Peer:
    """The far end. It sends what the test says and nothing else."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._socket.setblocking(False)
        self._received = bytearray()

    async def line(self) -> bytes:
        """The next line, empty ones too."""
        async with asyncio.timeout(5):
            while b"\n" not in self._received:
                chunk = await asyncio.get_running_loop().sock_recv(self._socket, 1 << 20)
                if not chunk:
                    raise EOFError
                self._received += chunk
        line, _, rest = bytes(self._received).partition(b"\n")
        self._received = bytearray(rest)
        return line

    async def request(self) -> dict[str, Any]:
        while not (line := await self.line()):
            pass
        return dict(json.loads(line))

    async def send(self, *frames: object) -> None:
        await self.send_raw(b"".join(json.dumps(frame).encode() + b"\n" for frame in frames))

    async def send_raw(self, data: bytes) -> None:
        async with asyncio.timeout(20):
            await asyncio.get_running_loop().sock_sendall(self._socket, data)

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
async def ends() -> AsyncIterator[tuple[GuestChannel, Peer]]:
    """A channel that listens, and the guest's end of it."""
    ours, theirs = socket.socketpair()
    peer = Peer(theirs)
    channel = GuestChannel(ours, "m1")
    async with channel.running():
        yield channel, peer
    peer.close()


def soon(seconds: float = 20.0) -> float:
    return asyncio.get_running_loop().time() + seconds


def output(request: dict[str, Any], data: bytes, stream: str = "stdout", **lies: object) -> dict[str, object]:
    honest = {"type": "output", "generation": request["generation"], "id": request["id"], "stream": stream}
    return honest | {"offset": 0, "data": base64.b64encode(data).decode()} | lies


def exited(request: dict[str, Any], **lies: object) -> dict[str, object]:
    honest = {"type": "exit", "generation": request["generation"], "id": request["id"], "code": 0}
    return honest | {"timed_out": False, "signal": None, "truncated": False} | lies


def running(channel: GuestChannel, command: Command = TRUE) -> asyncio.Task[ExecResult]:
    return asyncio.create_task(channel.exec(command, GENERATION, deadline=soon()), name="exec")


async def test_the_first_byte_ends_whatever_line_was_cut_before_us(ends: tuple[GuestChannel, Peer]) -> None:
    _, peer = ends
    assert await peer.line() == b""


async def test_boot_is_noticed_before_and_after_somebody_waits(ends: tuple[GuestChannel, Peer]) -> None:
    channel, peer = ends
    waiting = asyncio.create_task(channel.wait_booted(deadline=soon()), name="wait")
    await peer.send({"type": "booted", "protocol": 3})
    await waiting
    await channel.wait_booted(deadline=soon())


async def test_another_protocol_is_an_error_that_names_both(ends: tuple[GuestChannel, Peer]) -> None:
    channel, peer = ends
    await peer.send({"type": "booted", "protocol": 1})
    with pytest.raises(GuestError, match=r"protocol 1.* speaks 3"):
        await channel.wait_booted(deadline=soon())


async def test_a_waiter_that_gives_up_leaves_the_answer_to_the_next(ends: tuple[GuestChannel, Peer]) -> None:
    channel, peer = ends
    with pytest.raises(DeadlineExceeded, match="m1 did not boot"):
        await channel.wait_booted(deadline=soon(0.01))
    await peer.send({"type": "booted", "protocol": 3})
    await channel.wait_booted(deadline=soon())


async def test_a_command_goes_out_as_asked_and_its_result_comes_back(ends: tuple[GuestChannel, Peer]) -> None:
    channel, peer = ends
    command = Command(
        argv=("sh", "-c", "x"),
        env={"A": "ä"},
        cwd="/tmp",
        stdin=b"\0in",
        timeout_seconds=1.5,
        output_limit_bytes=9,
    )
    task = running(channel, command)
    request = await peer.request()
    assert request | {"id": ""} == {
        "type": "exec",
        "id": "",
        "generation": GENERATION,
        "argv": ["sh", "-c", "x"],
        "env": {"A": "ä"},
        "cwd": "/tmp",
        "stdin": base64.b64encode(b"\0in").decode(),
        "timeout_ms": 1500,
        "output_limit": 9,
        "stdin_open": False,
        "terminal": None,
        "flow": None,
    }
    await peer.send(
        output(request, b"o\0"),
        output(request, b"e", "stderr"),
        output(request, b"\xff"),
        exited(request, code=7),
    )
    assert await task == ExecResult(
        stdout=b"o\0\xff", stderr=b"e", exit_code=7, timed_out=False, truncated=False
    )


async def test_a_time_out_is_a_result_with_exit_code_minus_one(ends: tuple[GuestChannel, Peer]) -> None:
    channel, peer = ends
    task = running(channel)
    await peer.send(exited(await peer.request(), code=137, signal=9, timed_out=True))
    result = await task
    assert (result.exit_code, result.timed_out) == (-1, True)


async def test_results_go_to_whom_they_belong_in_any_order(ends: tuple[GuestChannel, Peer]) -> None:
    channel, peer = ends
    tasks = [running(channel, Command(argv=(str(number),))) for number in range(20)]
    requests = [await peer.request() for _ in tasks]
    for request in reversed(requests):
        await peer.send(output(request, request["argv"][0].encode()), exited(request))
    assert [(await task).stdout for task in tasks] == [str(number).encode() for number in range(20)]


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("invalid", CommandRefused),
        ("not_found", CommandRefused),
        ("bad_cwd", CommandRefused),
        ("not_executable", CommandRefused),
        ("internal", CommandRefused),
        ("too_many", AtCapacity),
        ("wrong_generation", GuestError),
    ],
)
async def test_each_refusal_is_the_error_that_a_caller_can_act_on(
    ends: tuple[GuestChannel, Peer], code: str, error: type[EngineError]
) -> None:
    channel, peer = ends
    task = running(channel)
    request = await peer.request()
    refusal = {"type": "exec_failed", "id": request["id"], "generation": GENERATION, "code": code}
    await peer.send(refusal | {"message": "the reason " + "x" * 100_000})
    with pytest.raises(error, match="the reason") as caught:
        await task
    assert type(caught.value) is error
    assert len(str(caught.value)) < 1000


async def test_frames_of_other_generations_and_commands_are_dropped(ends: tuple[GuestChannel, Peer]) -> None:
    channel, peer = ends
    task = running(channel)
    request = await peer.request()
    await peer.send(
        output(request, b"parent", generation=OTHER),
        exited(request, generation=OTHER, code=1),
        output(request, b"stranger", id="nobody"),
        exited(request, id="nobody"),
        output(request, b"mine"),
        exited(request),
        output(request, b"afterwards"),
        exited(request, code=9),
    )
    result = await task
    assert (result.stdout, result.exit_code) == (b"mine", 0)


async def test_output_beyond_the_limit_is_dropped_even_if_the_guest_sends_it(
    ends: tuple[GuestChannel, Peer],
) -> None:
    channel, peer = ends
    task = running(channel, Command(argv=("x",), output_limit_bytes=100_000))
    request = await peer.request()
    for _ in range(50):
        await peer.send(output(request, b"a" * 40_000), output(request, b"b" * 40_000, "stderr"))
    await peer.send(exited(request))
    result = await task
    assert len(result.stdout) + len(result.stderr) == 100_000
    assert result.truncated


async def test_a_caller_that_leaves_cancels_the_command(ends: tuple[GuestChannel, Peer]) -> None:
    channel, peer = ends
    task = running(channel)
    request = await peer.request()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await peer.request() == {"type": "cancel", "id": request["id"]}
    with pytest.raises(DeadlineExceeded, match="run 'true'"):
        await channel.exec(TRUE, GENERATION, deadline=soon(0.01))
    request = await peer.request()
    assert await peer.request() == {"type": "cancel", "id": request["id"]}


async def test_the_identity_is_written_before_anybody_listens() -> None:
    ours, theirs = socket.socketpair()
    peer, channel = Peer(theirs), GuestChannel(ours, "m1")
    channel.queue_identity(
        Identity(generation=GENERATION, hostname="h-0", unix_ns=5, entropy=b"\1" * 32, env={"A": "b"})
    )
    sent = theirs.recv(65536)  # There without the event loop having run.
    assert sent.startswith(b"\n")
    assert json.loads(sent) == {
        "type": "identity",
        "generation": GENERATION,
        "hostname": "h-0",
        "unix_ns": 5,
        "entropy": base64.b64encode(b"\1" * 32).decode(),
        "env": {"A": "b"},
    }
    async with channel.running():
        await peer.send({"type": "identified", "generation": OTHER})
        with pytest.raises(DeadlineExceeded):
            await channel.identified(GENERATION, deadline=soon(0.05))
        await peer.send({"type": "identified", "generation": GENERATION})
        await channel.identified(GENERATION, deadline=soon())
    peer.close()


async def test_an_identity_that_was_not_taken_on_is_an_error(ends: tuple[GuestChannel, Peer]) -> None:
    channel, peer = ends
    channel.queue_identity(Identity(generation=GENERATION, hostname="h", unix_ns=0, entropy=b"", env={}))
    await peer.send({"type": "identity_failed", "generation": GENERATION, "message": "no clock"})
    with pytest.raises(GuestError, match="no clock"):
        await channel.identified(GENERATION, deadline=soon())


async def test_the_workload_is_started_or_refused(ends: tuple[GuestChannel, Peer]) -> None:
    channel, peer = ends
    task = asyncio.create_task(channel.start_workload(("srv",), {"A": "1"}, deadline=soon()), name="start")
    assert await peer.request() == {"type": "start", "argv": ["srv"], "env": {"A": "1"}, "cwd": "/"}
    await peer.send(
        {"type": "started", "pid": 7},
        {"type": "workload_exit", "generation": UNIDENTIFIED, "code": 1, "signal": None},
    )
    await task
    await channel_is_alive(channel, peer)
    assert channel.workload_exit is not None
    assert channel.workload_exit.code == 1


async def test_a_workload_that_cannot_run_says_why(ends: tuple[GuestChannel, Peer]) -> None:
    channel, peer = ends
    task = asyncio.create_task(channel.start_workload(("srv",), {}, deadline=soon()), name="start")
    await peer.request()
    await peer.send({"type": "start_failed", "message": "no program 'srv'"})
    with pytest.raises(CommandRefused, match="no program 'srv'"):
        await task


async def channel_is_alive(channel: GuestChannel, peer: Peer) -> None:
    task = asyncio.create_task(channel.asking.ping(deadline=soon()), name="ping")
    while (request := await peer.request())["type"] != "ping":
        pass
    await peer.send({"type": "pong", "nonce": "another"}, {"type": "pong", "nonce": request["nonce"]})
    await task


async def test_a_few_lines_of_noise_are_stepped_over(ends: tuple[GuestChannel, Peer]) -> None:
    channel, peer = ends
    await peer.send_raw(b'AAAA","stream":"stdout"}\n\n\n{"type":"pong"}\nnull\n\xff\xfe\n{"half":')
    await peer.send_raw(b"\n")
    await channel_is_alive(channel, peer)


@pytest.mark.parametrize("flood", [b"noise\n" * 500_000, b"x" * (3 << 20)], ids=["lines", "one line"])
async def test_a_guest_that_floods_with_noise_is_not_listened_to_any_more(
    ends: tuple[GuestChannel, Peer], flood: bytes
) -> None:
    channel, peer = ends
    waiting = running(channel)
    sending = asyncio.create_task(peer.send_raw(flood), name="flood")
    with pytest.raises(GuestError, match=r"m1 sent .* not listened to"):
        await waiting
    with pytest.raises(GuestError):
        await channel.exec(TRUE, GENERATION, deadline=soon())
    with pytest.raises(GuestError):
        await channel.asking.ping(deadline=soon())
    sending.cancel()  # The flood backs up on its own side.
    with pytest.raises(asyncio.CancelledError):
        await sending


async def test_a_flood_of_valid_frames_that_nobody_asked_for_does_no_harm(
    ends: tuple[GuestChannel, Peer],
) -> None:
    channel, peer = ends
    stray = {"generation": OTHER, "id": "x"}
    for _ in range(200):
        await peer.send(
            {"type": "booted", "protocol": 3},
            {"type": "started", "pid": None},
            {"type": "identified", "generation": OTHER},
            output(stray, b"x" * 1000),
            exited(stray),
            {"type": "pong", "nonce": "x"},
        )
    await channel_is_alive(channel, peer)


async def test_every_wait_fails_when_the_machine_ends(ends: tuple[GuestChannel, Peer]) -> None:
    channel, peer = ends
    channel.queue_identity(Identity(generation=GENERATION, hostname="h", unix_ns=0, entropy=b"", env={}))
    waits: list[asyncio.Task[None] | asyncio.Task[ExecResult]] = [
        running(channel),
        asyncio.create_task(channel.wait_booted(deadline=soon()), name="boot"),
        asyncio.create_task(channel.start_workload((), {}, deadline=soon()), name="start"),
        asyncio.create_task(channel.identified(GENERATION, deadline=soon()), name="identified"),
        asyncio.create_task(channel.asking.ping(deadline=soon()), name="ping"),
    ]
    for _ in range(5):
        if (await peer.request())["type"] == "ping":
            break
    peer.close()
    await asyncio.wait(waits)
    assert [type(wait.exception()) for wait in waits] == [MachineGone] * 5
    with pytest.raises(MachineGone):
        channel.queue_identity(Identity(generation=OTHER, hostname="h", unix_ns=0, entropy=b"", env={}))


async def test_leaving_fails_the_waits_and_closes_the_socket() -> None:
    ours, theirs = socket.socketpair()
    peer, channel = Peer(theirs), GuestChannel(ours, "m1")
    async with channel.running():
        task = running(channel)
        request = await peer.request()
        await peer.send_raw(json.dumps(output(request, b"x")).encode()[:30])  # Half a line.
    with pytest.raises(MachineGone, match="closed"):
        await task
    with pytest.raises((EOFError, ConnectionResetError)):
        await peer.request()
    channel.close()
    peer.close()


async def test_an_adopted_channel_reads_on_after_the_rest_of_a_line() -> None:
    ours, theirs = socket.socketpair()
    kept = ours.dup()  # As the keeper does.
    first, peer = GuestChannel(ours, "m1"), Peer(theirs)
    async with first.running():
        task = running(first)
        request = await peer.request()
        line = json.dumps(output(request, b"x")).encode() + b"\n"
        await peer.send_raw(line[:30])
    with pytest.raises(MachineGone):
        await task
    second = GuestChannel(kept, "m1")
    async with second.running():
        await peer.send_raw(line[30:])
        await channel_is_alive(second, peer)
    peer.close()


async def test_what_a_slow_guest_does_not_take_is_bounded(ends: tuple[GuestChannel, Peer]) -> None:
    channel, peer = ends
    big = Command(argv=("cat",), stdin=bytes(15 << 20))
    tasks = [running(channel, big) for _ in range(4)]
    await asyncio.sleep(0)  # Let each put its line into the queue.
    with pytest.raises(AtCapacity, match="wait to be read by machine m1"):
        await channel.exec(TRUE, GENERATION, deadline=soon())
    for _ in tasks:
        await peer.send(exited(await peer.request()))
    assert [(await task).exit_code for task in tasks] == [0] * 4
    await channel_is_alive(channel, peer)


async def test_input_that_the_guest_could_not_read_is_refused_here(ends: tuple[GuestChannel, Peer]) -> None:
    channel, _ = ends
    for command, message in [
        (Command(argv=("cat",), stdin=bytes(18 << 20)), "more than"),
        (Command(argv=("echo", "\ud800")), "not valid Unicode"),
    ]:
        with pytest.raises(CommandRefused, match=message):
            await channel.exec(command, GENERATION, deadline=soon())


async def test_programs_stop_and_go_on_when_the_guest_says_so(ends: tuple[GuestChannel, Peer]) -> None:
    channel, peer = ends
    freezing = asyncio.create_task(channel.asking.freeze(deadline=soon()), name="freeze")
    request = await peer.request()
    assert request["type"] == "freeze"
    await peer.send({"type": "frozen", "nonce": "another", "message": None})
    await peer.send({"type": "frozen", "nonce": request["nonce"], "message": None})
    await freezing
    answer = channel.asking.queue_thaw()
    request = await peer.request()
    await peer.send({"type": "thawed", "nonce": request["nonce"], "message": None})
    await channel.asking.thawed(answer, deadline=soon())


async def test_programs_that_do_not_stop_or_go_on_are_told_of_in_the_guests_words(
    ends: tuple[GuestChannel, Peer],
) -> None:
    channel, peer = ends
    freezing = asyncio.create_task(channel.asking.freeze(deadline=soon()), name="freeze")
    await peer.send({"type": "frozen", "nonce": (await peer.request())["nonce"], "message": "x" * 1000})
    with pytest.raises(NotStill, match=r"machine m1 do not stand still: x{500}…$"):
        await freezing
    with pytest.raises(DeadlineExceeded, match="m1 did not stop its programs"):
        await channel.asking.freeze(deadline=soon(0.05))
    answer = channel.asking.queue_thaw()
    await peer.request()
    await peer.send({"type": "thawed", "nonce": (await peer.request())["nonce"], "message": "why"})
    with pytest.raises(GuestError, match="could not let its programs go on: why"):
        await channel.asking.thawed(answer, deadline=soon())


async def test_whoever_waits_for_programs_learns_that_the_machine_is_gone(
    ends: tuple[GuestChannel, Peer],
) -> None:
    channel, peer = ends
    answer = channel.asking.queue_thaw()
    freezing = asyncio.create_task(channel.asking.freeze(deadline=soon()), name="freeze")
    await peer.request()
    peer.close()
    for waiting in (freezing, channel.asking.thawed(answer, deadline=soon())):
        with pytest.raises(MachineGone):
            await waiting
