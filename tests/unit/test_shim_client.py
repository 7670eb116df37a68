"""What the agent does with a shim that does not behave: a guest that broke out of QEMU could be speaking."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Iterator

import pytest

from forktree_agent.engine.contract import MachineGone
from forktree_agent.engine.microvm.shim import (
    MAX_STRAY_REPLIES,
    VERSION,
    NoShim,
    Op,
    RamHalfMapped,
    ShimClient,
    ShimError,
    Stat,
    Status,
)

SECONDS = 5.0


class Impostor:
    """The other end of a client's socket."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock

    async def asked(self) -> int:
        """The id of the next request."""
        request = await asyncio.get_running_loop().sock_recv(self._sock, 64)
        return int.from_bytes(request[4:8], "little")

    def say(self, packet: bytes) -> None:
        self._sock.send(packet)

    def close(self) -> None:
        self._sock.close()


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
    with ours, theirs:
        yield ours, theirs


def soon() -> float:
    return asyncio.get_running_loop().time() + SECONDS


def stat_reply(request_id: int, mappings: int, private_pages: int, written_pages: int = 0) -> bytes:
    numbers = (mappings, private_pages, written_pages)
    return struct.pack("<HHIIiQQQ", VERSION, Op.STAT, request_id, 0, 0, *numbers)


async def test_answers_to_questions_of_others_are_passed_over(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    client, impostor = ShimClient(ends[0]), Impostor(ends[1])
    async with asyncio.TaskGroup() as tasks:
        stat = tasks.create_task(client.stat(deadline=soon()))
        mine = await impostor.asked()
        impostor.say(stat_reply(mine - 1, 1, 1))
        impostor.say(stat_reply(mine ^ 0x80000000, 2, 2))
        impostor.say(stat_reply(mine, 3, 4, 2))
    assert stat.result() == Stat(mappings=3, private_pages=4, written_pages=2)


@pytest.mark.parametrize(
    "form",
    [
        pytest.param("", id="too-short"),
        pytest.param("<HHIIi", id="no-body"),
        pytest.param("<HHIIiQQQI", id="too-long"),
    ],
)
async def test_what_is_no_answer_is_not_believed(
    ends: tuple[socket.socket, socket.socket], form: str
) -> None:
    client, impostor = ShimClient(ends[0]), Impostor(ends[1])

    async def answer() -> None:
        mine = await impostor.asked()
        impostor.say(
            stat_reply(mine, 3, 4)[: struct.calcsize(form)].ljust(max(struct.calcsize(form), 1), b"\1")
        )

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(answer())
        with pytest.raises(NoShim):
            await client.stat(deadline=soon())


@pytest.mark.parametrize(("version", "status"), [(VERSION - 1, 0), (VERSION, 11), (VERSION, 2**32 - 1)])
async def test_another_version_and_unknown_refusals_are_not_believed(
    ends: tuple[socket.socket, socket.socket], version: int, status: int
) -> None:
    client, impostor = ShimClient(ends[0]), Impostor(ends[1])

    async def answer() -> None:
        impostor.say(struct.pack("<HHIIiQ", version, Op.STAT, await impostor.asked(), status, 0, 0))

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(answer())
        with pytest.raises(NoShim):
            await client.stat(deadline=soon())


@pytest.mark.parametrize("status", [status for status in Status if status is not Status.OK])
async def test_every_refusal_is_a_sentence(ends: tuple[socket.socket, socket.socket], status: Status) -> None:
    client, impostor = ShimClient(ends[0]), Impostor(ends[1])

    async def answer() -> None:
        impostor.say(struct.pack("<HHIIiQ", VERSION, Op.STAT, await impostor.asked(), status, 12, 3))

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(answer())
        with pytest.raises(ShimError, match="the fork shim refused STAT: ") as caught:
            await client.stat(deadline=soon())
    assert caught.value.status is status
    assert isinstance(caught.value, RamHalfMapped) == (status is Status.HALF_MAPPED)


async def test_whoever_never_stops_talking_is_not_listened_to_for_ever(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    client, impostor = ShimClient(ends[0]), Impostor(ends[1])
    ends[0].setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
    ends[1].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 22)

    async def answer() -> None:
        mine = await impostor.asked()
        for _ in range(MAX_STRAY_REPLIES):
            impostor.say(stat_reply(mine - 1, 1, 1))

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(answer())
        with pytest.raises(NoShim, match="nobody asked"):
            await client.stat(deadline=soon())


async def test_the_end_of_the_stream_is_the_end_of_the_machine(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    client, impostor = ShimClient(ends[0]), Impostor(ends[1])
    async with asyncio.TaskGroup() as tasks:
        asking = tasks.create_task(asyncio.wait_for(_gone(client), SECONDS))
        await impostor.asked()
        impostor.close()
    assert asking.done()
    await _gone(client)


async def _gone(client: ShimClient) -> None:
    with pytest.raises(MachineGone):
        await client.stat(deadline=soon())
