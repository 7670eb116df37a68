"""The keeper's client against a keeper that does not keep to the protocol."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from forktree_agent.keeper_client import Keeper, KeeperGone
from forktree_keeper.protocol import Greeting, encode_result, receive_packet, send_packet

Answerer = Callable[[socket.socket, int], None]
GREETING = Greeting(version=1, epoch=1, boot_id="b", machines=0, files=0)


def soon() -> float:
    return asyncio.get_running_loop().time() + 10


def greet(to: socket.socket, number: int) -> None:
    send_packet(to, encode_result(number, GREETING), [])


def hang_up(to: socket.socket, _: int) -> None:
    to.shutdown(socket.SHUT_RDWR)


def say_too_much(to: socket.socket, _: int) -> None:
    send_packet(to, b"x" * 70_000, [0])


@asynccontextmanager
async def fake_keeper(folder: Path, answer: Answerer) -> AsyncGenerator[Path]:
    """Greets one client, and answers its next request by `answer`."""
    path = folder / "keeper.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        listener.listen(1)
        listener.settimeout(10)

        def serve() -> None:
            peer, _ = listener.accept()
            with peer:
                peer.settimeout(10)
                for act in (greet, answer):
                    data, files = receive_packet(peer)
                    for file in files:
                        os.close(file)
                    act(peer, json.loads(data)["id"])
                receive_packet(peer)  # Until the client has gone.

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(asyncio.to_thread(serve))
            yield path


def with_files(data: str) -> Answerer:
    return lambda to, number: send_packet(to, data.replace("ID", str(number)).encode(), [0, 1])


@pytest.mark.parametrize(
    "answer",
    [
        with_files("not json"),
        with_files('{"id": ID}'),
        with_files('{"id": ID, "result": {}}'),
        with_files('{"id": ID, "result": {"channels": ["one"]}}'),
        with_files('{"id": ID, "failure": {"code": "no such code", "message": ""}}'),
        with_files('{"id": null, "failure": {"code": "bad_message", "message": "x"}}'),
        hang_up,
        say_too_much,
    ],
)
async def test_a_broken_answer_ends_the_connection_and_leaks_nothing(
    tmp_path: Path, answer: Answerer
) -> None:
    async with fake_keeper(tmp_path, answer) as path, Keeper.connected(path, deadline=soon()) as keeper:
        before = descriptors()
        with pytest.raises(KeeperGone):
            await keeper.lend("m", deadline=soon())
        with pytest.raises(KeeperGone):
            await keeper.lend("m", deadline=soon())
        with pytest.raises(KeeperGone):
            await anext(keeper.exits())
        assert descriptors() <= before


async def test_an_answer_that_nobody_waits_for_is_closed(tmp_path: Path) -> None:
    def answer_another(to: socket.socket, number: int) -> None:
        send_packet(to, b'{"id": 999, "result": {}}', [0, 1])
        send_packet(to, encode_result(number, GREETING), [])

    async with (
        fake_keeper(tmp_path, answer_another) as path,
        Keeper.connected(path, deadline=soon()) as keeper,
    ):
        before = descriptors()
        with pytest.raises(KeeperGone, match="Lent"):
            await keeper.lend("m", deadline=soon())
        assert descriptors() <= before


async def test_without_a_keeper_it_says_so_at_once(tmp_path: Path) -> None:
    for path in (tmp_path / "keeper.sock", tmp_path / "missing" / "keeper.sock"):
        with pytest.raises(KeeperGone, match="No such file"):
            async with Keeper.connected(path, deadline=soon()):
                pass


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - the numbers alone
