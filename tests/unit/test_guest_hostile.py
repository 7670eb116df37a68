"""A guest that means harm, at the far end of a socket pair: what it can cost the agent has a bound."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from itertools import count

import msgspec
import pytest

from forktree_agent.commons import Commons
from forktree_agent.engine.contract import AtCapacity, Command, MachineGone, TerminalSize
from forktree_agent.engine.microvm import guest_frames as frames
from forktree_agent.engine.microvm import guest_line
from forktree_agent.engine.microvm.guest import GuestChannel
from forktree_agent.engine.microvm.kept_execs import (
    INPUT_WINDOW_BYTES,
    MAX_ENDED,
    MAX_RUNNING,
    UNSENT_INPUT_BYTES,
)
from forktree_agent.engine.microvm.kept_output import MACHINE_BYTES, Allowance
from unit.test_guest_carried import IDENTITY, all_read, output, runs
from unit.test_guest_channel import GENERATION, Peer, channel_is_alive, soon

NODE_BYTES = 4 << 20
Ends = tuple[GuestChannel, Peer, Allowance]


@pytest.fixture
async def ends() -> AsyncIterator[Ends]:
    """A channel on a node that keeps little, and the guest's end of it."""
    ours, theirs = socket.socketpair()
    peer, node = Peer(theirs), Allowance(NODE_BYTES)
    channel = GuestChannel(ours, "m1", node)
    async with channel.running():
        yield channel, peer, node
    peer.close()


async def begun(channel: GuestChannel, peer: Peer) -> None:
    """A detached command that takes input."""
    command = Command(argv=("x",), id="a", stdin_open=True)
    beginning = asyncio.create_task(channel.kept.begin(command, "a", GENERATION, deadline=soon()))
    await peer.request()
    await peer.send({"type": "begun", "generation": GENERATION, "id": "a"})
    await beginning


def held_bytes(channel: GuestChannel) -> int:
    return sum(each.kept_bytes for each in channel.kept.all())


async def test_what_is_told_out_of_order_counts_as_kept_too(ends: Ends) -> None:
    channel, peer, node = ends
    channel.queue_identity(IDENTITY)
    await peer.request()
    piece = bytes(700 << 10)
    for number in range(60):  # Each seems to have more before what it has told of, and never tells the rest.
        await peer.send(output(f"e{number}", b"x", offset=1 << 50), output(f"e{number}", piece))
        await peer.send({**output(f"e{number}", b"x", offset=1 << 50), "stream": "stderr"})
        await peer.send({**output(f"e{number}", piece), "stream": "stderr"})
    await all_read(channel, peer)
    held = sum(
        len(piece)
        for each in channel.kept.all()
        for stream in each.streams.values()
        for piece in stream.pieces
    )
    assert held == held_bytes(channel) <= min(NODE_BYTES, MACHINE_BYTES)
    channel.close()
    assert node.claim(2 * NODE_BYTES) == NODE_BYTES, "all of it was given back, and no more"


async def test_names_are_as_short_as_ours(ends: Ends) -> None:
    channel, peer, _ = ends
    channel.queue_identity(IDENTITY)
    await peer.request()
    await peer.send(output("x" * 100_000, b"x"), output("y" * 64, b"y"))
    await all_read(channel, peer)
    assert [each.id for each in channel.execs()] == ["y" * 64]
    for odd in [
        runs(*(f"e{number}" for number in range(10_000))),
        runs("z" * 1000),
        {"type": "pong", "nonce": "n" * 1000},
    ]:
        assert frames.decode(msgspec.json.encode(odd)) is None
    most = runs(*(f"e{number}" for number in range(MAX_RUNNING + MAX_ENDED)))
    assert frames.decode(msgspec.json.encode(most)) is not None, "as many as an honest guest can have"


async def test_a_long_excuse_is_not_kept(ends: Ends) -> None:
    channel, peer, _ = ends
    channel.queue_identity(IDENTITY)
    await peer.request()
    failed = {
        "type": "exec_failed",
        "generation": GENERATION,
        "id": "a",
        "code": "internal",
        "message": "m" * 900_000,
    }
    await peer.send(failed)
    await all_read(channel, peer)
    ended = channel.kept.of("a").ended.result()
    assert isinstance(ended, frames.ExecFailed)
    assert len(ended.message) < 1000


async def test_input_that_the_guest_says_it_took_and_did_not_is_not_sent_on_and_on(ends: Ends) -> None:
    channel, peer, _ = ends
    await begun(channel, peer)
    writing = asyncio.create_task(channel.kept.write("a", bytes(64 << 20), end=True, deadline=soon(20)))
    lie = {"type": "stdin_taken", "generation": GENERATION, "id": "a", "bytes": 1 << 60, "open": True}
    most = 0
    for _ in range(400):  # It reads nothing meanwhile.
        await peer.send(lie)
        await asyncio.sleep(0)
        most = max(most, channel.unsent_bytes)
    assert INPUT_WINDOW_BYTES < most < 2 * UNSENT_INPUT_BYTES
    assert not writing.done()
    taken = 0
    while not (await peer.request())["end"]:  # Once it reads, all comes.
        taken += 1
        await peer.send(lie)
    await writing
    assert taken > 1000


async def test_a_writer_who_waits_for_a_guest_that_reads_nothing_hears_of_its_end(ends: Ends) -> None:
    channel, peer, _ = ends
    await begun(channel, peer)
    writing = asyncio.create_task(channel.kept.write("a", bytes(64 << 20), end=True, deadline=soon(20)))
    while channel.unsent_bytes < UNSENT_INPUT_BYTES:
        lie = {"type": "stdin_taken", "generation": GENERATION, "id": "a", "bytes": 1 << 60, "open": True}
        await peer.send(lie)
        await asyncio.sleep(0)
    peer.close()
    with pytest.raises(MachineGone):
        await writing


async def test_requests_without_a_command_are_refused_too_while_much_waits(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel, peer, _ = ends
    monkeypatch.setattr(guest_line, "BACKLOG_BYTES", 1 << 20)
    await begun(channel, peer)
    sent = 0
    with pytest.raises(AtCapacity, match="wait to be read by machine m1"):
        for sent in count():
            channel.kept.resize("a", TerminalSize(rows=1 + sent % 1000, cols=80))
            assert channel.unsent_bytes < 2 << 20
    with pytest.raises(AtCapacity):
        await channel.asking.ping(deadline=soon())
    channel.cancel("a")  # But what frees the guest is always let through.
    while (await peer.request())["type"] != "cancel":
        pass
    assert sent > 1000
    await channel_is_alive(channel, peer)


@pytest.mark.parametrize("line", [b'{"type":"pong","nonce":""}\n', b"\n"])
async def test_a_flood_leaves_others_their_turn(
    ends: Ends, line: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all that it sends only so many lines are read before the loop does something else."""
    channel, peer, _ = ends
    read = 0

    def counted(data: bytes) -> frames.Report | None:
        nonlocal read
        read += 1
        return decode(data)

    decode = frames.decode
    monkeypatch.setattr(frames, "decode", counted)
    sending = asyncio.create_task(peer.send_raw(line * 50_000), name="flood")
    most = before = 0
    while before < 50_000:
        await asyncio.sleep(0)
        most, before = max(most, channel.lines_read - before), channel.lines_read
    await sending
    assert 0 < most <= guest_line.LINES_AT_ONCE
    assert read == (0 if line == b"\n" else 50_000)
    await channel_is_alive(channel, peer)


async def test_guests_that_take_nothing_cost_no_more_together_than_there_is_for_all() -> None:
    whole, line_bytes = 4 << 20, 128 << 10
    backlog = Commons(whole)
    async with AsyncExitStack() as stack:
        channels: list[GuestChannel] = []
        for number in range(12):
            ours, theirs = socket.socketpair()
            stack.callback(theirs.close)
            channels.append(GuestChannel(ours, f"m{number}", backlog=backlog))
            await stack.enter_async_context(channels[-1].running())
        command = Command(argv=("x",), stdin=bytes(line_bytes))
        for channel in channels[:-1]:
            with pytest.raises(AtCapacity, match="wait to be read by machine"):
                for number in range(100):
                    channel.start(str(number), command, GENERATION, None)
        assert sum(each.unsent_bytes for each in channels) <= whole
        assert backlog.held > whole // 2
        channels[-1].start("short", Command(argv=("true",)), GENERATION, None)
        for channel in channels:
            channel.close()
        assert backlog.held == 0
