"""Commands whose output is kept, told of by a scripted guest: an honest one and a liar."""

from __future__ import annotations

import asyncio
import base64
from contextlib import AsyncExitStack
from typing import Any

import pytest

from forktree_agent.engine.contract import (
    AtCapacity,
    Command,
    CommandRefused,
    ExecChunk,
    ExecEnd,
    ExecStream,
    MachineGone,
    TerminalSize,
)
from forktree_agent.engine.microvm.guest import GuestChannel
from forktree_agent.engine.microvm.kept_execs import INPUT_WINDOW_BYTES
from forktree_agent.engine.microvm.kept_output import MACHINE_BYTES, STREAM_BYTES, Allowance, KeptStream
from forktree_agent.engine.microvm.kept_reading import UNREAD_BYTES, WINDOW_BYTES, Reader
from unit.test_guest_carried import all_read, born, exited, output, replayed, runs
from unit.test_guest_channel import GENERATION, Peer, ends, soon

__all__ = ["ends"]  # The fixture, for this module.

Ends = tuple[GuestChannel, Peer]
BEGUN = {"type": "begun", "generation": GENERATION, "id": "a"}


async def begun(channel: GuestChannel, peer: Peer, **more: Any) -> dict[str, Any]:
    """A detached command that runs. Returns what the guest was asked."""
    command = Command(argv=("x",), id="a", **more)
    beginning = asyncio.create_task(channel.kept.begin(command, "a", GENERATION, deadline=soon()))
    request = await peer.request()
    await peer.send(BEGUN)
    await beginning
    return request


def taken(bytes_: int, *, is_open: bool = True) -> dict[str, object]:
    return {"type": "stdin_taken", "generation": GENERATION, "id": "a", "bytes": bytes_, "open": is_open}


async def test_a_detached_command_is_granted_much_and_waits_for_nobody(ends: Ends) -> None:
    channel, peer = ends
    request = await begun(channel, peer, terminal=TerminalSize(rows=2, cols=3))
    assert request["flow"] == {"granted": UNREAD_BYTES, "waits": False, "tail_bytes": 64 << 10}
    assert (request["terminal"], request["stdin_open"]) == ({"rows": 2, "cols": 3}, True)


@pytest.mark.parametrize("code", ["not_found", "too_many"])
async def test_one_that_does_not_start_is_not_known_afterwards(ends: Ends, code: str) -> None:
    channel, peer = ends
    command = Command(argv=("x",))
    beginning = asyncio.create_task(channel.kept.begin(command, "a", GENERATION, deadline=soon()))
    await peer.request()
    refusal = {"type": "exec_failed", "id": "a", "generation": GENERATION, "code": code, "message": "why"}
    await peer.send(refusal)
    with pytest.raises(AtCapacity if code == "too_many" else CommandRefused, match="why"):
        await beginning
    assert channel.execs() == ()


async def test_whoever_gives_up_before_it_runs_has_it_killed(ends: Ends) -> None:
    channel, peer = ends
    command = Command(argv=("x",))
    beginning = asyncio.create_task(channel.kept.begin(command, "a", GENERATION, deadline=soon()))
    await peer.request()
    beginning.cancel()
    with pytest.raises(asyncio.CancelledError):
        await beginning
    assert await peer.request() == {"type": "cancel", "id": "a"}


async def test_the_guest_is_granted_a_window_ahead_of_the_slowest_reader(ends: Ends) -> None:
    channel, peer = ends
    command = Command(argv=("x",))
    chunk = bytes(64 << 10)
    begin = channel.kept.streaming(command, "a", GENERATION, deadline=soon())
    opening = asyncio.create_task(begin.__aenter__())
    assert (await peer.request())["flow"]["granted"] == WINDOW_BYTES
    await peer.send(BEGUN)
    reader = await opening
    sent = WINDOW_BYTES // len(chunk)
    for number in range(sent):
        await peer.send(output("a", chunk, offset=number * len(chunk)))
    await all_read(channel, peer)
    for number in range(sent - 1):
        piece = await reader.next(deadline=soon())
        assert isinstance(piece, ExecChunk)
        assert piece.offset == number * len(chunk)
    # Two were dealt with, and the third is with the reader: that is what the grant says.
    assert await peer.request() == {
        "type": "grant",
        "id": "a",
        "granted": WINDOW_BYTES + 2 * len(chunk),
        "waits": True,
    }
    await begin.__aexit__(None, None, None)
    assert await peer.request() == {
        "type": "grant",
        "id": "a",
        "granted": sent * len(chunk) + UNREAD_BYTES,
        "waits": False,
    }


async def test_each_stream_gets_its_turn(ends: Ends) -> None:
    channel, peer = ends
    await begun(channel, peer)
    reader = Reader(channel.kept.of("a"), 0, 0)
    await peer.send(output("a", bytes(200_000)), {**output("a", b"err"), "stream": "stderr"})
    await all_read(channel, peer)
    first, second = [await reader.next(deadline=soon()) for _ in range(2)]
    assert isinstance(first, ExecChunk)
    assert isinstance(second, ExecChunk)
    assert (first.stream, second.stream) == (ExecStream.STDOUT, ExecStream.STDERR)


async def test_a_reader_is_told_that_nothing_came_and_goes_on(ends: Ends) -> None:
    channel, peer = ends
    await begun(channel, peer)
    reading = channel.kept.reading("a", stdout_offset=2, stderr_offset=0, deadline=soon())
    async with reading as reader:
        assert await reader.next(deadline=soon(0.01)) is None
        await peer.send(output("a", b"late"), exited("a", 4))
        piece = await reader.next(deadline=soon())
        assert piece == ExecChunk(stream=ExecStream.STDOUT, offset=2, data=b"te")
        assert await reader.next(deadline=soon()) == ExecEnd(exit_code=4, timed_out=False)


async def test_the_end_of_the_machine_ends_a_stream_after_what_had_come(ends: Ends) -> None:
    channel, peer = ends
    await begun(channel, peer)
    await peer.send(output("a", b"last words"))
    await all_read(channel, peer)
    reading = channel.kept.reading("a", stdout_offset=0, stderr_offset=0, deadline=soon())
    async with reading as reader:
        assert isinstance(await reader.next(deadline=soon()), ExecChunk)
        peer.close()
        with pytest.raises(MachineGone):
            await reader.next(deadline=soon())


async def test_input_goes_no_further_ahead_than_a_window(ends: Ends) -> None:
    channel, peer = ends
    await begun(channel, peer, stdin_open=True)
    data = bytes(range(256)) * 2000
    writing = asyncio.create_task(channel.kept.write("a", data, end=True, deadline=soon(20)))
    got, told = b"", 0
    while not (request := await peer.request())["end"]:
        got += base64.b64decode(request["data"])
        assert len(got) <= told + INPUT_WINDOW_BYTES
        if len(got) == INPUT_WINDOW_BYTES:
            await asyncio.sleep(0.05)
            assert not writing.done()
        if len(got) >= INPUT_WINDOW_BYTES:
            told = len(got) - 1000
            await peer.send(taken(told))
    assert got + base64.b64decode(request["data"]) == data
    await writing
    with pytest.raises(CommandRefused, match="not open"):
        await channel.kept.write("a", b"x", end=False, deadline=soon())


async def test_a_guest_that_takes_more_than_it_got_is_not_believed(ends: Ends) -> None:
    channel, peer = ends
    await begun(channel, peer, stdin_open=True)
    await peer.send(taken(1 << 50))
    await all_read(channel, peer)
    writing = asyncio.create_task(channel.kept.write("a", bytes(1 << 20), end=False, deadline=soon(20)))
    got = 0
    while got < INPUT_WINDOW_BYTES:
        got += len(base64.b64decode((await peer.request())["data"]))
    await asyncio.sleep(0.05)
    assert not writing.done()
    await peer.send(taken(got, is_open=False))
    with pytest.raises(CommandRefused, match="not open"):
        await writing


async def test_what_the_guest_has_kept_comes_before_what_came_since(ends: Ends) -> None:
    channel, peer = ends
    await born(channel, peer, runs("a"))
    await peer.send(output("a", b"live", offset=100))
    await all_read(channel, peer)
    reading = channel.kept.reading("a", stdout_offset=0, stderr_offset=0, deadline=soon())
    opening = asyncio.create_task(reading.__aenter__())
    await replayed(peer, "a", output("a", b"56789", offset=95), output("a", b"live", offset=100))
    reader = await opening
    piece = await reader.next(deadline=soon())
    assert piece == ExecChunk(stream=ExecStream.STDOUT, offset=95, data=b"56789live")
    await reading.__aexit__(None, None, None)


async def test_a_guest_that_floods_fills_no_memory_and_changes_no_past(ends: Ends) -> None:
    channel, peer = ends
    await begun(channel, peer)
    for number in range(30):
        await peer.send(output("a", bytes(256 << 10), offset=number * 7))
        await peer.send(output("a", bytes(256 << 10), offset=(1 << 60) - number * (1 << 20)))
    await peer.send(exited("a", 1), exited("a", 2), output("a", b"after", offset=5))
    await all_read(channel, peer)
    known = channel.kept.of("a")
    assert known.kept_bytes <= STREAM_BYTES
    assert known.end() == ExecEnd(exit_code=1, timed_out=False)


def test_pieces_of_a_stream_meet_however_they_come() -> None:
    stream = KeptStream()
    assert [stream.add(10, b"abc"), stream.add(13, b"def"), stream.add(12, b"cdefgh")] == [3, 3, 2]
    assert (stream.start, stream.whole(), stream.is_cut) == (10, b"abcdefgh", False)
    assert stream.add(6, b"67") == stream.add(8, b"89ab") == 0
    assert (stream.start, stream.whole()) == (6, b"6789abcdefgh")
    stream.add(0, b"01")  # What does not reach what we have is no use.
    assert (stream.start, stream.whole()) == (6, b"6789abcdefgh")
    stream.add(100, b"new")
    assert (stream.start, stream.whole(), stream.is_cut) == (100, b"new", True)
    assert stream.trim(1) == 2, "what did not reach what we have goes first"
    assert stream.trim(1) == 1
    assert (stream.start, stream.end, stream.piece(101, 5)) == (101, 103, b"ew")


def test_where_there_is_no_room_the_oldest_that_ended_goes_first() -> None:
    allowance = Allowance(10)
    held = {"one": 4, "two": 5}

    def drop(key: str) -> int:
        return held.pop(key)

    assert allowance.claim(4) == 4
    assert allowance.claim(5) == 5
    assert allowance.claim(3) == 1, "nothing may go yet"
    allowance.give_back(1)
    allowance.idle("one", lambda: drop("one"))
    allowance.idle("two", lambda: drop("two"))
    assert (allowance.claim(3), list(held)) == (3, ["two"])
    allowance.in_use("two")
    assert (allowance.claim(9), list(held)) == (2, ["two"])


async def test_what_tools_said_takes_no_room_once_it_is_read(ends: Ends) -> None:
    """Or those that go on for long, as connections do, would cut what the others of the machine say."""
    channel, peer = ends
    chunk = bytes(64 << 10)
    async with AsyncExitStack() as stack:
        for number in range(MACHINE_BYTES // STREAM_BYTES + 1):
            exec_id = f"tool-{number}"
            begin = channel.kept.streaming(
                Command(argv=("connect", "80"), builtin=True), exec_id, GENERATION, deadline=soon()
            )
            opening = asyncio.create_task(stack.enter_async_context(begin))
            await peer.send({**BEGUN, "id": exec_id})
            reader = await opening
            for offset in range(0, STREAM_BYTES, len(chunk)):
                await peer.send(output(exec_id, chunk, offset=offset))
                piece = await reader.next(deadline=soon())
                assert piece == ExecChunk(stream=ExecStream.STDOUT, offset=offset, data=chunk)
