"""What callers make the agent hold: much output, read by nobody, and many requests. Others get their turn."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from e2e.http_stage import SECONDS, Stage, rights, staged
from forktree_agent.engine.contract import Command, ExecResult
from forktree_agent.http import server
from forktree_dev import provisioning
from forktree_dev.control_plane import ControlPlane

MIB = 1 << 20
HELD_BYTES = 48 * MIB
OUTPUT_BYTES = 14 * MIB
"""More than the kernel takes of an answer that nobody reads."""


async def printing(command: Command) -> ExecResult:
    """As much as `argv` says, as far as there is room."""
    size = int(command.argv[0])
    given = size if command.room is None else command.room.claim(size)
    given = min(given, command.output_limit_bytes)
    return ExecResult(stdout=b"x" * given, stderr=b"", exit_code=0, timed_out=False, truncated=given < size)


@pytest.fixture
async def small(control_plane: ControlPlane, namespace: str, tmp_path: Path) -> AsyncIterator[Stage]:
    """A server that may hold little, and in it a session that prints what it is asked to."""
    async with staged(control_plane, namespace, tmp_path, held_bytes=HELD_BYTES) as stage:
        stage.engine.answering = printing
        await stage.session_here("loud")
        yield stage


async def prints(stage: Stage, size: int, session: str = "loud") -> tuple[int, dict[str, Any]]:
    return await stage.ask("POST", f"/sessions/{session}/exec", {"argv": [str(size)]})


@asynccontextmanager
async def unread(stage: Stage, path: str, body: object) -> AsyncGenerator[asyncio.StreamReader]:
    """A request whose answer has begun, and of which nothing more is read."""
    trust = ssl.create_default_context(cadata=stage.ca_bundle)
    host, port = stage.url.removeprefix("https://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port), ssl=trust, limit=1 << 14)
    sent = json.dumps(body).encode()
    head = (
        f"POST /ns/{stage.namespace}/v1{path} HTTP/1.1\r\nHost: agent\r\nContent-Length: {len(sent)}\r\n"
        f"Authorization: Bearer {stage.token}\r\n\r\n"
    )
    try:
        writer.write(head.encode() + sent)
        assert b" 200 " in await reader.readline()
        yield reader
    finally:
        writer.transport.abort()


async def test_output_that_nobody_reads_is_held_within_a_bound(small: Stage) -> None:
    status, whole = await prints(small, OUTPUT_BYTES)
    assert (status, len(whole["stdout"]), whole["truncated"]) == (200, OUTPUT_BYTES, False)
    async with AsyncExitStack() as unreads:
        for _ in range(6):
            body = {"argv": [str(OUTPUT_BYTES)]}
            await unreads.enter_async_context(unread(small, "/sessions/loud/exec", body))
        status, cut = await prints(small, OUTPUT_BYTES)
        assert (status, cut["truncated"], cut["exit_code"]) == (200, True, 0)
        assert len(cut["stdout"]) < OUTPUT_BYTES
        # What is short is not cut because others are long, and another session has room of its own.
        assert len((await prints(small, 1000))[1]["stdout"]) == 1000
        await small.session_here("other")
        status, beside = await prints(small, MIB, "other")
        assert (len(beside["stdout"]), beside["truncated"]) == (MIB, False)
    async with asyncio.timeout(SECONDS):  # The server hears of it when it writes next.
        while (await prints(small, OUTPUT_BYTES))[1]["truncated"]:
            pass


async def test_the_parts_of_a_batch_are_held_within_the_same_bound(small: Stage) -> None:
    sessions = [f"s{number}" for number in range(6)]
    for session in sessions:
        await small.session_here(session)
    body = {"session_ids": sessions, "exec": {"argv": [str(OUTPUT_BYTES)]}}
    status, done = await small.ask("POST", "/batch/exec", body)
    assert (status, [each["session_id"] for each in done["results"]]) == (200, sessions)
    execs = [each["exec"] for each in done["results"]]
    assert sum(len(each["stdout"]) for each in execs) <= HELD_BYTES // 2
    assert [each["truncated"] for each in execs] == [len(each["stdout"]) < OUTPUT_BYTES for each in execs]
    assert any(each["truncated"] for each in execs)
    status, after = await prints(small, OUTPUT_BYTES)
    assert after["truncated"] is False


async def test_bodies_for_which_there_is_no_room_are_refused_with_a_reason(
    control_plane: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    async with staged(control_plane, namespace, tmp_path, held_bytes=MIB) as stage:
        await stage.session_here("loud")
        body = {"argv": ["cat"], "stdin": "x" * (512 << 10)}
        status, refused = await stage.ask("POST", "/sessions/loud/exec", body)
        assert (status, refused["code"]) == (503, "overloaded")
        assert "more than there is room for here now" in refused["message"]
        assert (await stage.ask("POST", "/sessions/loud/exec", {"argv": ["cat"]}))[0] == 200


@pytest.fixture
async def neighbour(small: Stage) -> str:
    """The token of somebody in another namespace."""
    kubectl, other = small.plane.kubectl, f"{small.namespace}-next"
    await kubectl.run("create", "namespace", other)
    await kubectl.apply(rights(other, "user"))
    return await provisioning.user_token(kubectl, "user", namespace=other)


async def test_requests_of_one_namespace_leave_some_to_others(small: Stage, neighbour: str) -> None:
    """Commands that sleep for an hour cost their caller nothing, and would shut the server for all others."""
    go_on, many = asyncio.Event(), server.REQUESTS_AT_ONCE * 4 // 5

    async def sleeping(command: Command) -> ExecResult:
        await go_on.wait()
        return await printing(command)

    small.engine.answering = sleeping
    trust = ssl.create_default_context(cadata=small.ca_bundle)
    crowd = aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=trust, limit=0))
    async with crowd, asyncio.TaskGroup() as tasks:
        loud = replace(small, client=crowd)
        asked = [tasks.create_task(prints(loud, 1)) for _ in range(many)]
        async with asyncio.timeout(SECONDS):
            await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        status, _ = await small.ask("GET", "/sessions", token=neighbour, own=True)
        assert status in {200, 403}  # It was heard.
        go_on.set()
    statuses = [each.result()[0] for each in asked]
    assert statuses.count(200) >= many // 2
    sentences = {body["code"] for status, body in (each.result() for each in asked) if status != 200}
    assert sentences == {"overloaded"}
