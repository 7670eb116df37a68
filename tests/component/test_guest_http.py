"""Requests that init makes over loopback for the readiness probe: what counts as an answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from component.guest_machine import GuestMachine, booted, soon

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def guest(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[GuestMachine]:
    async with booted(tmp_path_factory.mktemp("guest")) as machine:
        yield machine


async def ask(
    guest: GuestMachine, port: int, path: str = "/", seconds: float = 20
) -> tuple[int | None, str | None]:
    answer = await guest.channel.asking.http_get(port, path, timeout_seconds=seconds, deadline=soon())
    return answer.status, answer.message


async def listen(guest: GuestMachine, port: int, says: str) -> None:
    """A server that takes one connection and sends what the command `says` prints."""
    await guest.sh(
        f"({says} | nc -l -p {port}) >/dev/null 2>&1 &"
        f" while ! netstat -ltn | grep -q :{port}; do usleep 20000; done"
    )


async def test_a_server_is_asked_for_the_path_and_its_status_is_told(guest: GuestMachine) -> None:
    await guest.sh("mkdir /tmp/www; echo hello > /tmp/www/there; httpd -p 127.0.0.1:8000 -h /tmp/www")
    assert await ask(guest, 8000, "/there") == (200, None)
    assert await ask(guest, 8000, "/not-there?x=1") == (404, None)


async def test_no_server_is_an_answer_too(guest: GuestMachine) -> None:
    status, message = await ask(guest, 8001)
    assert status is None
    assert message is not None
    assert "refused" in message


async def test_a_server_that_hangs_or_speaks_something_else_is_given_up(guest: GuestMachine) -> None:
    await listen(guest, 8002, "sleep 100")
    began = time.monotonic()
    assert await ask(guest, 8002, seconds=1) == (None, "no answer within 1000 ms")
    assert time.monotonic() - began < 10
    await listen(guest, 8003, "echo SSH-2.0")
    assert await ask(guest, 8003) == (None, "what answered does not speak HTTP")


async def test_a_path_that_is_none_is_refused_in_the_guest_too(guest: GuestMachine) -> None:
    for path in ("there", "/a b", "/a\r\nX: y", "/ü"):
        assert await ask(guest, 8000, path) == (None, "the path is not one")


async def test_commands_run_while_a_request_waits(guest: GuestMachine) -> None:
    await listen(guest, 8004, "sleep 100")
    waiting = [asyncio.create_task(ask(guest, 8004, seconds=4), name=f"ask-{i}") for i in range(10)]
    assert await guest.sh("echo runs") == "runs\n"
    messages = [message for _, message in await asyncio.gather(*waiting)]
    assert messages.count("too many requests at once") == 2, "a bound, and an answer for those above it"
