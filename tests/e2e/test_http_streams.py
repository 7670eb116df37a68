"""Commands that outlive their callers, over HTTP: whoever re-attaches gets the rest, and the exit code."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from e2e.whole import SECONDS, Whole

pytestmark = pytest.mark.asyncio(loop_scope="session")

COUNTING = "i=0; while [ $i -lt 400 ]; do i=$((i+1)); echo line $i; usleep 20000; done; echo err >&2; exit 7"
COUNTED = "".join(f"line {number}\n" for number in range(1, 401)).encode()


@pytest_asyncio.fixture(loop_scope="session")
async def whole(whole: Whole) -> Whole:
    """With a small template, and a session of it."""
    await whole.template()
    await whole.session("work")
    return whole


class Stream:
    """One answer of lines, and what came of each stream in it."""

    def __init__(self, answer: aiohttp.ClientResponse) -> None:
        self.answer = answer
        self.out: dict[str, bytearray] = {"stdout": bytearray(), "stderr": bytearray()}
        self.starts: dict[str, int] = {}
        self.last: dict[str, Any] = {}

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        while line := await self.answer.content.readline():
            event = self.last = json.loads(line)
            if event["type"] == "output":
                out = self.out[event["stream"]]
                start = self.starts.setdefault(event["stream"], event["offset"])
                assert event["offset"] == start + len(out)
                out += base64.b64decode(event["data_base64"])
            yield event

    async def read(self, *, until: bytes | None = None) -> None:
        async with asyncio.timeout(SECONDS):
            async for _ in self.events():
                if until is not None and until in self.out["stdout"]:
                    return


async def post(whole: Whole, session: str, body: dict[str, object]) -> aiohttp.ClientResponse:
    url = f"{whole.node.url}/ns/{whole.namespace}/v1/sessions/{session}/exec"
    return await whole.http.post(url, json={"timeout_seconds": 120} | body)


async def again(whole: Whole, session: str, exec_id: str, stdout: int = 0) -> Stream:
    path = f"sessions/{session}/execs/{exec_id}?stream=1&stdout_offset={stdout}"
    answer = await whole.http.get(f"{whole.node.url}/ns/{whole.namespace}/v1/{path}")
    assert answer.status == 200, await answer.text()
    return Stream(answer)


async def test_a_stream_tells_begin_output_and_end(whole: Whole) -> None:
    async with await post(
        whole, "work", {"command": "echo out; echo err >&2; exit 3", "stream": True, "id": "one"}
    ) as answer:
        assert (answer.status, answer.content_type) == (200, "application/x-ndjson")
        stream = Stream(answer)
        kinds = [event["type"] async for event in stream.events()]
    assert (kinds[0], kinds[-1], set(kinds[1:-1])) == ("started", "end", {"output"})
    assert (bytes(stream.out["stdout"]), bytes(stream.out["stderr"])) == (b"out\n", b"err\n")
    assert stream.last.pop("exec_time_ms") > 0
    assert stream.last == {
        "type": "end",
        "id": "one",
        "exit_code": 3,
        "timed_out": False,
        "truncated": False,
    }
    status, ended = await whole.get("sessions/work/execs/one")
    assert (status, ended["stdout"], ended["exit_code"]) == (200, "out\n", 3)
    status, listed = await whole.get("sessions/work/execs")
    (info,) = [each for each in listed["execs"] if each["id"] == "one"]
    assert (info["state"], info["exit_code"], info["stdout_bytes"]) == ("ended", 3, 4)


async def test_what_cannot_be_started_is_refused_before_the_stream(whole: Whole) -> None:
    for more in ({"stream": True}, {"detach": True}):
        async with await post(whole, "work", {"argv": ["/no/such"], **more}) as answer:
            assert answer.status == 400
            assert "/no/such" in (await answer.json())["message"]
    for wrong in (
        {"stream": True, "detach": True},
        {"stdin_open": True},
        {"stdin": "a", "stdin_base64": "YQ=="},
        {"stdin_base64": "?"},
    ):
        async with await post(whole, "work", {"command": "true", **wrong}) as answer:
            assert answer.status == 400, wrong


async def test_a_client_that_dies_mid_stream_comes_back_for_the_rest_and_the_exit_code(whole: Whole) -> None:
    answer = await post(whole, "work", {"command": COUNTING, "stream": True, "id": "counting"})
    stream = Stream(answer)
    await stream.read(until=b"line 20\n")
    answer.close()  # The connection is cut, not ended.
    got = len(stream.out["stdout"])
    rest = await again(whole, "work", "counting", got)
    await rest.read()
    rest.answer.close()
    assert bytes(stream.out["stdout"] + rest.out["stdout"]) == COUNTED
    assert (rest.last["type"], rest.last["exit_code"]) == ("end", 7)
    assert bytes(rest.out["stderr"]) == b"err\n"


async def test_an_agent_that_dies_mid_stream_is_no_loss_either(whole: Whole) -> None:
    answer = await post(whole, "work", {"command": COUNTING, "stream": True, "id": "restarted"})
    stream = Stream(answer)
    await stream.read(until=b"line 20\n")
    reading = asyncio.create_task(stream.read())
    await whole.crash_agent()
    with pytest.raises(aiohttp.ClientError):
        await reading
    rest = await again(whole, "work", "restarted", len(stream.out["stdout"]))
    await rest.read()
    rest.answer.close()
    assert bytes(stream.out["stdout"] + rest.out["stdout"]) == COUNTED
    assert (rest.last["type"], rest.last["exit_code"]) == ("end", 7)


async def test_a_command_that_ended_while_no_agent_ran_tells_how(whole: Whole) -> None:
    command = "cat; echo over; usleep 1000000; exit 9"
    async with await post(
        whole, "work", {"command": command, "detach": True, "stdin_open": True, "id": "alone"}
    ) as answer:
        assert (answer.status, await answer.json()) == (202, {"id": "alone", "detached": True})
    wanted: dict[str, object] = {"data_base64": "YQo=", "close": True}
    taken = await whole.post("sessions/work/execs/alone/stdin", wanted)
    assert taken == (200, {"id": "alone", "bytes": 2, "closed": True})
    await whole.node.agent.kill()
    await asyncio.sleep(3)  # Nobody is there to say when it has ended. If it has not, this shows less.
    await whole.revive_agent()
    stream = await again(whole, "work", "alone")
    await stream.read()
    stream.answer.close()
    assert (bytes(stream.out["stdout"]), stream.last["exit_code"]) == (b"a\nover\n", 9)
    assert (await whole.post("sessions/work/execs/alone/stdin", wanted))[0] == 400


async def test_a_child_forked_mid_stream_has_the_stream_too(whole: Whole) -> None:
    command = "echo first; while [ ! -e /tmp/go ]; do usleep 20000; done; cat /tmp/go; exit 4"
    async with await post(whole, "work", {"command": command, "stream": True, "id": "forked"}) as answer:
        stream = Stream(answer)
        await stream.read(until=b"first\n")
        status, forked = await whole.post("sessions/work/fork", {"replicas": 1})
        assert status == 201, forked
        child = forked["session_id"]
        await whole.sh(child, "echo child > /tmp/go_; mv /tmp/go_ /tmp/go")
        carried = await again(whole, child, "forked")
        await carried.read()
        carried.answer.close()
        assert (bytes(carried.out["stdout"]), carried.last["exit_code"]) == (b"first\nchild\n", 4)
        await whole.sh("work", "echo parent > /tmp/go_; mv /tmp/go_ /tmp/go")
        await stream.read()
    assert (bytes(stream.out["stdout"]), stream.last["exit_code"]) == (b"first\nparent\n", 4)
    await whole.sh("work", "rm /tmp/go")


async def test_a_command_is_killed_by_whoever_knows_its_id(whole: Whole) -> None:
    async with await post(whole, "work", {"command": "sleep 600", "stream": True, "id": "long"}) as answer:
        url = f"{whole.node.url}/ns/{whole.namespace}/v1/sessions/work/execs/long"
        async with whole.http.delete(url) as killed:
            assert (killed.status, await killed.json()) == (200, {"id": "long", "killed": True})
        stream = Stream(answer)
        await stream.read()
        assert (stream.last["type"], stream.last["exit_code"]) == ("end", 137)
        async with whole.http.delete(url) as killed:
            assert await killed.json() == {"id": "long", "killed": False}
    async with whole.http.delete(f"{url}er") as killed:
        assert killed.status == 404


async def test_a_reader_that_takes_nothing_holds_the_command_and_not_the_agent(whole: Whole) -> None:
    async with await post(
        whole, "work", {"command": "yes | head -c 30000000", "stream": True, "id": "slow"}
    ) as answer:
        stream = Stream(answer)
        await asyncio.sleep(2)  # Nothing is read meanwhile: what fits into buffers has come, and no more.
        _, listed = await whole.get("sessions/work/execs")
        (info,) = [each for each in listed["execs"] if each["id"] == "slow"]
        assert info["state"] == "running"
        assert info["stdout_bytes"] < 20_000_000
        await stream.read()
    assert len(stream.out["stdout"]) == 30_000_000
    assert stream.last["exit_code"] == 0


async def test_the_end_of_a_session_ends_its_streams_with_a_reason(whole: Whole) -> None:
    await whole.session("brief")
    async with await post(whole, "brief", {"command": "echo up; sleep 600", "stream": True}) as answer:
        stream = Stream(answer)
        await stream.read(until=b"up\n")
        await whole.delete("session", "brief", "--wait=false")
        await stream.read()
    assert (stream.last["type"], stream.last["code"]) == ("error", "session_gone")
    assert stream.last["message"]
