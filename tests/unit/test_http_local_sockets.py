"""The agent's sockets on its own machine: who may open them, and what a client may take there."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import uvloop

from forktree_agent.http.connections import Bounds, listening_at
from forktree_agent.http.routes import Api
from forktree_agent.http.server import Door, Listener, serving
from forktree_agent.metrics import Metrics
from unit.test_http_connections import ASKS, SmallApi

SECONDS = 30.0
SHORT = 0.3


@asynccontextmanager
async def served(path: Path, bounds: Bounds) -> AsyncGenerator[SmallApi]:
    api = SmallApi()
    listener = Listener(host="127.0.0.1", port=0, names=("127.0.0.1",), tls_directory=path.parent / "tls")
    door = Door(listening_at(path), api.routes(), bounds)
    async with serving(listener, cast("Api", api), Metrics().answered, [door]):
        yield api


def on_both_loops(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(test())
    uvloop.run(test())


def test_a_socket_takes_the_place_of_one_that_nobody_listens_at(tmp_path: Path) -> None:
    path = tmp_path / "door.sock"

    async def test() -> None:
        async with served(path, Bounds()):
            assert path.stat().st_mode & 0o777 == 0o660
            reader, writer = await asyncio.open_unix_connection(path)
            writer.write(ASKS)
            async with asyncio.timeout(SECONDS):
                assert (await reader.readline()).split()[1] == b"200"
            writer.close()
        with pytest.raises(ConnectionRefusedError):  # And not: no such file. Clients come again after that.
            await asyncio.open_unix_connection(path)

    on_both_loops(test)


def test_what_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    with pytest.raises(FileExistsError, match="no socket"):
        listening_at(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "kept"
    with pytest.raises(FileNotFoundError):
        listening_at(tmp_path / "nowhere" / "socket")


def test_who_takes_nothing_of_an_answer_is_cut_and_who_takes_it_slowly_is_not(tmp_path: Path) -> None:
    async def test() -> None:
        path = tmp_path / "door.sock"
        async with served(path, Bounds(unread_seconds=SHORT)):
            slow, idle = (socket.socket(socket.AF_UNIX) for _ in range(2))
            with slow, idle:
                for each in (slow, idle):
                    each.setblocking(False)
                    await asyncio.get_running_loop().sock_connect(each, str(path))
                    await asyncio.get_running_loop().sock_sendall(each, ASKS.replace(b"short", b"large"))
                taken = 0
                async with asyncio.timeout(SECONDS):
                    for _ in range(8):  # Over several times what nothing may be taken for.
                        taken += len(await asyncio.get_running_loop().sock_recv(slow, 1 << 20))
                        await asyncio.sleep(SHORT / 2)
                    rest = await _all(idle)
                    assert rest < 32 << 20
                    assert taken + await _all(slow) > 64 << 20

    on_both_loops(test)


async def _all(connection: socket.socket) -> int:
    """How many bytes come until the end."""
    total = 0
    try:
        while piece := await asyncio.get_running_loop().sock_recv(connection, 1 << 20):
            total += len(piece)
            if total > 64 << 20:
                break
    except ConnectionResetError:
        pass
    return total
