"""Servers inside sessions, from Python and on the command line."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import urllib.request
from collections.abc import AsyncIterator, Generator
from contextlib import contextmanager

import pytest
import pytest_asyncio

from e2e.test_system_ports import SPEC
from e2e.whole import SECONDS, Whole
from forktree import AsyncClient, Client, errors

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]


@pytest_asyncio.fixture(loop_scope="session")
async def whole(whole: Whole) -> AsyncIterator[Whole]:
    """With a session `root` in which the servers run."""
    await whole.template("server", **SPEC)
    await whole.session("root", "server")
    yield whole


def counted(address: tuple[str, int], data: bytes) -> bytes:
    """What the server says that takes all that it is sent, and sends it back."""
    with socket.create_connection(address, timeout=SECONDS) as there:
        there.sendall(data)
        there.shutdown(socket.SHUT_WR)
        got = bytearray()
        while piece := there.recv(1 << 16):
            got += piece
    return bytes(got)


def fetched(address: tuple[str, int]) -> str:
    with urllib.request.urlopen(f"http://{address[0]}:{address[1]}/who", timeout=SECONDS) as answer:
        return str(answer.read())


async def test_a_port_of_this_machine_leads_to_the_server_inside(whole: Whole) -> None:
    told: list[errors.ClientError] = []
    async with AsyncClient(
        whole.node.url, token=whole.token, ca=whole.node.ca_path, namespace=whole.namespace
    ) as client:
        session = client.sessions.named("root")
        info = (await session.refresh()).info
        assert info.endpoints is not None
        assert await session.url("web") == info.endpoints["web"]
        async with session.forward("count") as address:
            assert address.host == "127.0.0.1"
            answers = await asyncio.gather(
                *(asyncio.to_thread(counted, address, b"x" * count) for count in (0, 5, 300_000))
            )
            assert answers == [b"x" * count + b"%d bytes" % count for count in (0, 5, 300_000)]
            with pytest.raises(errors.BadSettings, match="nobody can listen at"):
                async with session.forward("count", address.port):
                    pass
        with pytest.raises(ConnectionRefusedError):
            await asyncio.to_thread(counted, address, b"")
        async with session.forward("other", told=told.append) as address:
            with pytest.raises(ConnectionError):
                await asyncio.to_thread(counted, address, b"x")
    (why,) = told
    assert isinstance(why, errors.Refused)
    assert "is not exposed" in str(why)


async def test_the_sync_client_forwards_from_a_thread(whole: Whole) -> None:
    def work() -> tuple[bytes, str]:
        with Client(
            whole.node.url, token=whole.token, ca=whole.node.ca_path, namespace=whole.namespace
        ) as client:
            session = client.sessions.get("root")
            with session.forward(9000) as address, session.forward("web") as web:
                return counted(address, b"abc"), fetched(web)

    said, who = await asyncio.to_thread(work)
    assert said == b"abc3 bytes"
    assert "FORKTREE_GENERATION" in who


@contextmanager
def environment(whole: Whole) -> Generator[dict[str, str]]:
    yield os.environ | {
        "FORKTREE_URL": whole.node.url,
        "FORKTREE_CA": str(whole.node.ca_path),
        "FORKTREE_TOKEN": whole.token,
        "FORKTREE_NAMESPACE": whole.namespace,
    }


async def test_port_forward_goes_on_until_ctrl_c(whole: Whole) -> None:
    with environment(whole) as env:
        program = await asyncio.create_subprocess_exec(
            *(
                sys.executable,
                "-m",
                "forktree_cli",
                "port-forward",
                "root",
                ":web",
                ":count",
                ":9999",
                "-o",
                "json",
            ),
            env=env,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
    assert program.stdout is not None
    assert program.stderr is not None
    try:
        async with asyncio.timeout(SECONDS):
            said = json.loads(await read_json(program.stdout))
        web, count, none = (
            (host, int(port)) for host, _, port in (each["address"].partition(":") for each in said)
        )
        assert [each["port"] for each in said] == ["web", "count", "9999"]
        assert "FORKTREE_GENERATION" in await asyncio.to_thread(fetched, web)
        assert await asyncio.to_thread(counted, count, b"abc") == b"abc3 bytes"
        with pytest.raises(ConnectionError):
            await asyncio.to_thread(counted, none, b"x")
        async with asyncio.timeout(SECONDS):
            line = (await program.stderr.readline()).decode()
        assert line == (
            "forktree: port 9999 (none) of session root cannot be reached: nobody listens there\n"
        )
        with socket.create_connection(count) as open_one:
            open_one.sendall(b"x")
            program.send_signal(signal.SIGINT)
            async with asyncio.timeout(SECONDS):
                assert await program.wait() == 128 + signal.SIGINT
                assert await program.stderr.read() == b""
    finally:
        if program.returncode is None:
            program.kill()


async def read_json(stream: asyncio.StreamReader) -> str:
    """The one array that is printed, over as many lines as it takes."""
    text = ""
    while not text.rstrip().endswith("]"):
        line = (await stream.readline()).decode()
        assert line, text
        text += line
    return text


@pytest.mark.parametrize("ports", [["x:8000"], ["70000:web"], ["8000:"], []])
async def test_ports_that_are_none_are_a_usage_error(ports: list[str]) -> None:
    program = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "forktree_cli", "port-forward", "root", *ports),
        stderr=asyncio.subprocess.PIPE,
    )
    _, said = await program.communicate()
    assert program.returncode == 2, said
