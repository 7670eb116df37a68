"""Commands that ran before this channel did, told of by a scripted guest: an honest one and a liar."""

from __future__ import annotations

import asyncio
import base64

import pytest

from forktree_agent.engine.contract import (
    Command,
    CommandRefused,
    DeadlineExceeded,
    ExecNotFound,
    ExecResult,
    MachineGone,
)
from forktree_agent.engine.microvm import kept_execs
from forktree_agent.engine.microvm.guest import GuestChannel, Identity
from forktree_agent.engine.microvm.kept_execs import MAX_ENDED, MAX_RUNNING
from forktree_agent.engine.microvm.kept_output import MACHINE_BYTES, STREAM_BYTES
from unit.test_guest_channel import GENERATION, OTHER, Peer, ends, soon

__all__ = ["ends"]  # The fixture, for this module.

Ends = tuple[GuestChannel, Peer]
IDENTITY = Identity(generation=GENERATION, hostname="h", unix_ns=1, entropy=bytes(32), env={})


def output(exec_id: str, data: bytes, generation: str = GENERATION, *, offset: int = 0) -> dict[str, object]:
    encoded = base64.b64encode(data).decode()
    frame = {"type": "output", "generation": generation, "id": exec_id, "stream": "stdout"}
    return {**frame, "offset": offset, "data": encoded}


def exited(exec_id: str, code: int = 0, generation: str = GENERATION) -> dict[str, object]:
    frame = {"type": "exit", "generation": generation, "id": exec_id, "code": code}
    return {**frame, "timed_out": False, "signal": None, "truncated": False}


def runs(*ids: str) -> dict[str, object]:
    return {"type": "running", "generation": GENERATION, "ids": ids}


def ids(channel: GuestChannel) -> tuple[str, ...]:
    return tuple(each.id for each in channel.execs())


async def attached(channel: GuestChannel, peer: Peer, exec_id: str) -> ExecResult:
    """The end of a carried command, which this side asks for what the guest has kept first: nothing."""
    task = asyncio.create_task(channel.attach(exec_id, deadline=soon()), name="attach")
    await replayed(peer, exec_id)
    return await task


async def replayed(peer: Peer, exec_id: str, *frames: dict[str, object]) -> None:
    """Answer the next request, which is for what is kept of this command."""
    assert await peer.request() == {"type": "replay", "id": exec_id}
    frame = {"type": "replayed", "generation": GENERATION, "id": exec_id}
    await peer.send(*frames, {**frame, "stdin_bytes": 0, "stdin_open": False})


async def born(channel: GuestChannel, peer: Peer, *frames: dict[str, object]) -> None:
    """A machine that takes on its identity, and tells these things first."""
    channel.queue_identity(IDENTITY)
    await peer.request()
    await peer.send(*frames, {"type": "identified", "generation": GENERATION})
    await channel.identified(GENERATION, deadline=soon())


async def all_read(channel: GuestChannel, peer: Peer) -> None:
    """Until the channel has read all that was sent: it reads in order."""
    ping = asyncio.create_task(channel.asking.ping(deadline=soon()), name="ping")
    await peer.send({"type": "pong", "nonce": (await peer.request())["nonce"]})
    await ping


async def test_what_runs_at_the_identity_can_be_waited_for_with_what_it_writes_since(ends: Ends) -> None:
    channel, peer = ends
    await born(channel, peer, runs("a", "b"))
    assert ids(channel) == ("a", "b")
    waiting = [asyncio.create_task(channel.attach("a", deadline=soon())) for _ in range(2)]
    await replayed(peer, "a")
    await peer.send(output("a", b"on"), output("a", b"ce", offset=2), exited("a", 3))
    first, second = await asyncio.gather(*waiting)
    assert first == second == await channel.attach("a", deadline=soon())
    assert (first.stdout, first.exit_code, first.truncated) == (b"once", 3, False)
    with pytest.raises(DeadlineExceeded, match="did not end command b"):
        await channel.attach("b", deadline=soon(0.01))


async def test_what_was_read_before_the_identity_was_taken_on_is_the_childs_too(ends: Ends) -> None:
    channel, peer = ends
    await born(channel, peer, output("a", b"early ", OTHER), exited("gone", 7, OTHER), runs("a"))
    await peer.send(output("a", b"late", offset=6), exited("a"))
    assert (await attached(channel, peer, "a")).stdout == b"early late"
    assert (await attached(channel, peer, "gone")).exit_code == 7


async def test_a_command_that_neither_runs_nor_ended_is_not_kept(ends: Ends) -> None:
    channel, peer = ends
    await born(channel, peer, output("ghost", b"boo"), runs())
    assert ids(channel) == ()
    with pytest.raises(ExecNotFound):
        await channel.attach("ghost", deadline=soon())


async def test_without_a_fork_nothing_unknown_is_kept(ends: Ends) -> None:
    channel, peer = ends
    await peer.send(output("a", b"x"), exited("a"), runs("b"))
    await all_read(channel, peer)
    await born(channel, peer, runs())
    await peer.send(output("late", b"x"), exited("late"), runs("later"))
    await all_read(channel, peer)
    assert ids(channel) == ()


async def test_a_guest_that_names_many_and_writes_much_fills_no_memory(ends: Ends) -> None:
    channel, peer = ends
    await born(channel, peer, runs(*(f"e{number}" for number in range(5 * MAX_RUNNING))))
    assert len(ids(channel)) == MAX_RUNNING + MAX_ENDED
    some = ids(channel)[: MACHINE_BYTES // STREAM_BYTES + 3]
    chunk = bytes(256 << 10)
    for exec_id in some:
        for number in range(2 * STREAM_BYTES // len(chunk)):
            await peer.send(output(exec_id, chunk, offset=number * len(chunk)))
    await all_read(channel, peer)
    kept = [channel.kept.of(each).kept_bytes for each in some]
    assert max(kept) == STREAM_BYTES
    assert sum(kept) == MACHINE_BYTES
    for exec_id in some:  # The guest has just said that they run.
        await peer.send(exited(exec_id))
    await all_read(channel, peer)
    assert (await attached(channel, peer, some[0])).truncated
    # Only so many of those that ended are remembered, the last ones.
    await peer.send(*(exited(each) for each in ids(channel)))
    await all_read(channel, peer)
    assert len(ids(channel)) == MAX_ENDED


async def test_an_id_that_runs_is_not_given_again_and_one_that_ended_is(ends: Ends) -> None:
    channel, peer = ends
    await born(channel, peer, runs("a"))
    command = Command(argv=("true",), id="a")
    with pytest.raises(CommandRefused, match="id a runs already"):
        await channel.exec(command, GENERATION, deadline=soon())
    await peer.send(exited("a", 1))
    await attached(channel, peer, "a")
    new = asyncio.create_task(channel.exec(command, GENERATION, deadline=soon()), name="new")
    assert (await peer.request())["id"] == "a"
    with pytest.raises(CommandRefused, match="id a runs already"):
        await channel.exec(command, GENERATION, deadline=soon())
    again = asyncio.create_task(channel.attach("a", deadline=soon()), name="attached")
    await asyncio.sleep(0)  # It has to know the command before that ends: an answered one is forgotten.
    await peer.send(exited("a", 2))
    assert (await new).exit_code == (await again).exit_code == 2


async def test_an_agent_that_takes_over_asks_what_runs(ends: Ends) -> None:
    channel, peer = ends
    channel.take_over()
    assert (await peer.request())["type"] == "list"
    await peer.send(output("a", b"x"), runs("a"), exited("a"))
    await all_read(channel, peer)
    assert (await attached(channel, peer, "a")).stdout == b"x"


async def test_who_asks_before_the_guest_has_told_an_agent_that_takes_over_waits_for_that(ends: Ends) -> None:
    channel, peer = ends
    channel.take_over()
    early = asyncio.create_task(attached(channel, peer, "a"), name="early")
    wrong = asyncio.create_task(channel.attach("b", deadline=soon()), name="wrong")
    assert (await peer.request())["type"] == "list"
    await peer.send(runs("a"), output("a", b"x"), exited("a"))
    assert (await early).stdout == b"x"
    with pytest.raises(ExecNotFound):
        await wrong


async def test_the_end_of_the_machine_ends_the_wait(ends: Ends) -> None:
    channel, peer = ends
    await born(channel, peer, runs("a"))
    waiting = asyncio.create_task(channel.attach("a", deadline=soon()), name="wait")
    await replayed(peer, "a")
    peer.close()
    with pytest.raises(MachineGone):
        await waiting


async def test_a_request_over_loopback_is_answered_by_its_nonce(ends: Ends) -> None:
    channel, peer = ends
    asking = asyncio.create_task(
        channel.asking.http_get(80, "/x", timeout_seconds=1.5, deadline=soon()), name="asking"
    )
    request = await peer.request()
    nonce = request.pop("nonce")
    assert request == {"type": "http_get", "port": 80, "path": "/x", "timeout_ms": 1500}
    await peer.send(
        {"type": "http_status", "nonce": "other", "status": 500, "message": None},
        {"type": "http_status", "nonce": nonce, "status": 204, "message": None},
    )
    assert (await asking).status == 204
    with pytest.raises(DeadlineExceeded, match="did not ask port 80"):
        await channel.asking.http_get(80, "/x", timeout_seconds=1, deadline=soon(0.01))


async def test_a_list_just_after_another_agent_waits_until_the_guest_has_told(ends: Ends) -> None:
    channel, peer = ends
    channel.take_over()
    assert await peer.request() == {"type": "list"}
    assert ids(channel) == ()  # As it was shown to callers.
    told = asyncio.create_task(channel.kept.told(deadline=soon()), name="told")
    await all_read(channel, peer)
    assert not told.done()
    await peer.send(runs("a"))
    await told
    assert ids(channel) == ("a",)


async def test_a_guest_that_tells_nothing_does_not_keep_a_list_waiting(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel, _ = ends
    monkeypatch.setattr(kept_execs, "RECALL_SECONDS", 0.05)
    channel.take_over()
    await channel.kept.told(deadline=soon())
    assert ids(channel) == ()
