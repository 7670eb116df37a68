"""What a command writes arrives whole and once, over as many connections as it takes."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web

from forktree import AsyncClient, Ended, Output, errors
from unit.agent_server import ScriptedAgent, breaks, created, finished, refuses
from unit.api_server import Answer, says

STARTED = {"type": "started", "id": "e"}
ALIVE = {"type": "alive"}
END = {"type": "end", "id": "e", "exit_code": 3, "timed_out": False, "truncated": False, "exec_time_ms": 1.0}


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[ScriptedAgent]:
    async with ScriptedAgent.running(tmp_path / "tls") as running:
        yield running


@pytest.fixture
async def client(server: ScriptedAgent) -> AsyncIterator[AsyncClient]:
    async with server.client() as client:
        yield client


def out(offset: int, text: str, stream: str = "stdout") -> dict[str, object]:
    data = base64.b64encode(text.encode()).decode()
    return {"type": "output", "stream": stream, "offset": offset, "data_base64": data}


def lines(*events: object, cut: bool = False, rest: bytes = b"") -> Answer:
    """A stream of these; it ends then, or its connection breaks."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        for event in events:
            await response.write(json.dumps(event).encode() + b"\n")
        await response.write(rest)
        return await breaks(request) if cut else response

    return answer


async def test_a_stream_that_breaks_goes_on_where_it_was(server: ScriptedAgent, client: AsyncClient) -> None:
    server.script += [
        created(),
        lines(STARTED, out(0, "one "), out(0, "err", "stderr"), cut=True, rest=b'{"type": "output", "str'),
        breaks,
        refuses("upstream_error", 502),
        lines(STARTED, out(4, "two "), ALIVE),  # It ends, and the command does not.
        lines(out(8, "three"), END),
    ]
    session = await client.sessions.create("t")
    seen = [event async for event in session.stream("work")]
    assert [
        (event.stream, event.text, event.missing) for event in seen[:-1] if isinstance(event, Output)
    ] == [
        ("stdout", "one ", 0),
        ("stderr", "err", 0),
        ("stdout", "two ", 0),
        ("stdout", "three", 0),
    ]
    assert seen[-1] == Ended(exit_code=3, timed_out=False, truncated=False)
    begun, *again = server.seen[1:]
    assert begun.body["stream"] is True
    path = f"/ns/ns/v1/sessions/s/execs/{begun.body['id']}?stream=1"
    assert [each.path for each in again] == [
        f"{path}&stdout_offset=4&stderr_offset=3",
        f"{path}&stdout_offset=4&stderr_offset=3",
        f"{path}&stdout_offset=4&stderr_offset=3",
        f"{path}&stdout_offset=8&stderr_offset=3",
    ]


async def test_output_that_is_no_longer_kept_is_told(server: ScriptedAgent, client: AsyncClient) -> None:
    server.script += [created(), lines(out(0, "ab"), cut=True), lines(out(10, "z"), END)]
    session = await client.sessions.create("t")
    seen = [event async for event in session.stream("work")]
    assert [event.missing for event in seen if isinstance(event, Output)] == [0, 8]


async def test_a_stream_whose_beginning_is_lost_is_begun_once(
    server: ScriptedAgent, client: AsyncClient
) -> None:
    # The first time it had begun all the same, the second time it had not.
    server.script += [created(), breaks, refuses("not_ready", 409), lines(out(0, "x"), END)]
    session = await client.sessions.create("t")
    assert len([event async for event in session.stream("work")]) == 2
    assert [each.method for each in server.seen] == ["POST", "POST", "GET", "GET"]

    server.script += [breaks, refuses("not_found", 404), lines(STARTED, END)]
    assert len([event async for event in session.stream("work")]) == 1
    assert [each.method for each in server.seen[4:]] == ["POST", "GET", "POST"]
    first, second = server.seen[4].body, server.seen[6].body
    assert first == second


async def test_a_stream_whose_session_is_gone_says_so(server: ScriptedAgent, client: AsyncClient) -> None:
    error = {
        "type": "error",
        "error": "its machine ended",
        "code": "session_gone",
        "message": "its machine ended",
    }
    server.script += [created(), lines(out(0, "x"), {**error, "error_code": "session_gone"})]
    session = await client.sessions.create("t")
    with pytest.raises(errors.SessionGone, match="its machine ended"):
        async for _ in session.stream("work"):
            pass


@pytest.mark.parametrize(
    "line", [{"type": "output"}, out(0, "x") | {"data_base64": "!"}, out(0, "x") | {"stream": "x"}, [], {}]
)
async def test_a_line_that_cannot_be_read_ends_the_stream(
    line: object, server: ScriptedAgent, client: AsyncClient
) -> None:
    server.script += [created(), lines(line)]
    session = await client.sessions.create("t")
    with pytest.raises(errors.UnexpectedAnswer):
        async for _ in session.stream("work"):
            pass


async def test_a_detached_command_is_begun_once_waited_for_and_killed(
    server: ScriptedAgent, client: AsyncClient
) -> None:
    server.script += [
        created(),
        breaks,
        refuses("not_found", 404),
        says({"id": "e", "detached": True}, 202),
        refuses("not_ready", 409),
        breaks,
        finished("done\n"),
        says({"id": "e", "killed": False}),
        says({"id": "e", "bytes": 2, "closed": True}),
    ]
    session = await client.sessions.create("t")
    command = await session.start(["work"], stdin_open=True)
    assert (await command.wait()).stdout == "done\n"
    await command.kill()
    await command.write("hi", close=True)
    assert server.seen[-1].body == {"data_base64": "aGk=", "close": True}
    assert (
        server.seen[1].body
        == server.seen[3].body
        == {
            "argv": ["work"],
            "id": command.id,
            "timeout_seconds": 3600.0,
            "detach": True,
            "stdin_open": True,
        }
    )


async def test_input_whose_answer_is_lost_is_not_given_twice(
    server: ScriptedAgent, client: AsyncClient
) -> None:
    server.script += [created(), breaks]
    session = await client.sessions.create("t")
    with pytest.raises(errors.AnswerLost):
        await session.attach("e").write(b"x")
    assert len(server.seen) == 2


async def test_who_waits_no_longer_is_told_that_it_still_runs(
    server: ScriptedAgent, client: AsyncClient
) -> None:
    server.script += [created(), refuses("not_ready", 409, "command e still runs")]
    session = await client.sessions.create("t")
    with pytest.raises(errors.NotReady, match="still runs"):
        await session.attach("e").wait(timeout=0)


async def test_the_sync_client_follows_as_well(server: ScriptedAgent) -> None:
    server.script += [created(), lines(STARTED, out(0, "one "), cut=True), lines(out(4, "two"), END)]

    def work() -> str:
        with server.sync_client() as client:
            session = client.sessions.create("t")
            return "".join(event.text for event in session.stream("work") if isinstance(event, Output))

    assert await asyncio.to_thread(work) == "one two"
