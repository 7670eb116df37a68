"""A terminal in a real machine over a WebSocket: typed at, resized, left and come back to."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from e2e.http_stage import rights
from e2e.whole import SECONDS, Whole
from forktree_agent.http.sockets import MAX_MESSAGE_BYTES
from forktree_dev.provisioning import user_token
from forktree_dev.system import System

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest_asyncio.fixture(loop_scope="session")
async def whole(whole: Whole) -> Whole:
    """With a small template, and a session of it."""
    await whole.template()
    await whole.session("work")
    return whole


class Terminal:
    """One connection, and what came over it."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.socket = socket
        self.screen = bytearray()
        self.told: list[dict[str, Any]] = []

    async def read(self, *, until: bytes | None = None) -> None:
        """Until the screen has had this, or to the end."""
        async with asyncio.timeout(SECONDS):
            while until is None or until not in self.screen:
                message = await self.socket.receive()
                if message.type is aiohttp.WSMsgType.BINARY:
                    self.screen += message.data
                elif message.type is aiohttp.WSMsgType.TEXT:
                    self.told.append(json.loads(message.data))
                else:
                    return

    async def type(self, text: str) -> None:
        await self.socket.send_bytes(text.encode())

    async def resize(self, rows: int, cols: int) -> None:
        await self.socket.send_str(json.dumps({"type": "resize", "rows": rows, "cols": cols}))


@asynccontextmanager
async def terminal(whole: Whole, session: str = "work", query: str = "") -> AsyncGenerator[Terminal]:
    url = f"{whole.node.url}/ns/{whole.namespace}/v1/sessions/{session}/terminal?{query}"
    async with whole.http.ws_connect(url) as socket:
        yield Terminal(socket)


async def test_a_shell_is_typed_at_and_sees_its_window_change(whole: Whole) -> None:
    async with terminal(whole, query="rows=30&cols=100&term=dumb") as shell:
        await shell.type("echo $TERM; stty size\n")
        await shell.read(until=b"dumb\r\n30 100\r\n")
        await shell.resize(50, 132)
        await shell.type("stty size; exit 6\n")
        await shell.read(until=b"50 132\r\n")
        await shell.read()
    assert [each["type"] for each in shell.told] == ["started", "end"]
    assert shell.told[1]["exit_code"] == 6


async def test_a_terminal_ends_with_its_connection_unless_it_has_an_id(whole: Whole) -> None:
    async with terminal(whole, query="argv=sh&argv=-c&argv=echo+up%3B+sleep+600") as shell:
        await shell.read(until=b"up\r\n")
        exec_id = shell.told[0]["id"]
    async with asyncio.timeout(SECONDS):
        while True:
            _, listed = await whole.get("sessions/work/execs")
            if [each["state"] for each in listed["execs"] if each["id"] == exec_id] == ["ended"]:
                break
    named = "id=shell&argv=sh&argv=-c&argv=echo+up%3B+read+x%3B+echo+got+$x"
    async with terminal(whole, query=named) as shell:
        await shell.read(until=b"up\r\n")
    async with terminal(whole, query=named) as shell:
        await shell.type("it\n")
        await shell.read()
    assert bytes(shell.screen) == b"up\r\nit\r\ngot it\r\n"
    assert shell.told[-1]["exit_code"] == 0


async def test_what_is_wrong_is_told_over_the_socket_or_before_it(whole: Whole) -> None:
    async with terminal(whole, query="argv=/no/such") as shell:
        await shell.read()
    (told,) = shell.told
    assert (told["type"], told["code"]) == ("error", "bad_request")
    async with terminal(whole, "none") as shell:
        await shell.read()
    assert [each["code"] for each in shell.told] == ["no_such_session"]
    async with terminal(whole, query="argv=cat") as shell:
        await shell.socket.send_str('{"type":"resize","rows":0,"cols":1}')
        await shell.read()
    assert shell.told[-1]["code"] == "bad_request"
    for query in ("rows=0", "id=%2F"):
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            async with terminal(whole, query=query):
                pass
        assert refused.value.status == 400
    status, answer = await whole.get("sessions/work/terminal")
    assert (status, answer["code"]) == (400, "bad_request")
    with pytest.raises(aiohttp.WSServerHandshakeError) as unknown:
        url = f"{whole.node.url}/ns/{whole.namespace}/v1/sessions/work/terminal"
        await whole.http.ws_connect(url, headers={"Authorization": "Bearer nobody"})
    assert unknown.value.status == 401


async def test_a_terminal_ends_with_the_right_to_it(whole: Whole, system: System) -> None:
    kubectl = system.kubectl
    await kubectl.apply(rights(whole.namespace, "guest"))
    headers = {"Authorization": f"Bearer {await user_token(kubectl, 'guest', namespace=whole.namespace)}"}
    async with asyncio.timeout(SECONDS):  # The API server's own authorizer follows its watch.
        while True:
            async with whole.http.get(f"{whole.node.url}/v1/sessions", headers=headers) as answer:
                if answer.status == 200:
                    break
    url = f"{whole.node.url}/v1/sessions/work/terminal?argv=cat"
    async with whole.http.ws_connect(url, headers=headers) as socket:
        shell = Terminal(socket)
        await shell.type("here\n")
        await shell.read(until=b"here\r\nhere\r\n")
        await kubectl.run("delete", "rolebinding", "guest-all", f"--namespace={whole.namespace}")
        await shell.read()
    assert shell.told[-1]["code"] == "forbidden"


async def test_a_message_that_is_too_long_ends_it(whole: Whole) -> None:
    async with terminal(whole, query="argv=cat") as shell:
        await shell.socket.send_bytes(bytes(MAX_MESSAGE_BYTES + 1))
        await shell.read()
        exec_id = shell.told[0]["id"]
    # Told or cut off, as it comes: the rest of the message may still be on its way.
    assert shell.socket.close_code in {
        aiohttp.WSCloseCode.MESSAGE_TOO_BIG,
        aiohttp.WSCloseCode.ABNORMAL_CLOSURE,
    }
    assert not any(shell.screen)
    async with asyncio.timeout(SECONDS):
        while True:
            _, listed = await whole.get("sessions/work/execs")
            if [each["state"] for each in listed["execs"] if each["id"] == exec_id] == ["ended"]:
                break
