"""Servers inside machines, reached through the agent: HTTP, WebSockets, connections as such, forked ones."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from yarl import URL

from e2e.whole import SECONDS, Whole
from forktree_agent.http.guest_headers import FROM_SESSION, SANDBOX
from forktree_agent.http.tunnels import OF_A_SESSION
from forktree_dev import provisioning

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]

SERVER = (Path(__file__).parent / "guest_server.py").read_text()
SPEC = {
    "image": "builtin:python",
    "machine": {"memory": "256Mi"},
    "command": ["python3", "-c", SERVER],
    "ports": [{"name": "web", "port": 8000}, {"name": "count", "port": 9000}, {"name": "none", "port": 9999}],
    "readinessProbe": {"httpGet": {"port": 8000}, "timeoutSeconds": 20},
}


@pytest_asyncio.fixture(loop_scope="session")
async def whole(whole: Whole) -> AsyncIterator[Whole]:
    """With a session `root` in which the servers run."""
    await whole.template("server", **SPEC)
    await whole.session("root", "server")
    yield whole


class Asked:
    """What came back."""

    def __init__(self, answer: aiohttp.ClientResponse, body: bytes) -> None:
        self.status, self.headers, self.body = answer.status, answer.headers, body

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def refusal(self) -> tuple[int, str, str]:
        assert FROM_SESSION not in self.headers
        return self.status, self.json["code"], self.json["message"]


async def ask(
    whole: Whole,
    path: str = "",
    *,
    session: str = "root",
    port: str = "web",
    method: str = "GET",
    headers: dict[str, str] | None = None,
    data: Any = None,
) -> Asked:
    url = f"{whole.node.url}/ns/{whole.namespace}/v1/sessions/{session}/ports/{port}/{path}"
    async with whole.http.request(
        method, URL(url, encoded=True), headers=headers, data=data, allow_redirects=False
    ) as answer:
        return Asked(answer, await answer.read())


@asynccontextmanager
async def connection(
    whole: Whole, session: str = "root", port: str = "count"
) -> AsyncGenerator[aiohttp.ClientWebSocketResponse]:
    url = f"{whole.node.url}/ns/{whole.namespace}/v1/sessions/{session}/ports/{port}"
    async with whole.http.ws_connect(url) as socket:
        yield socket


async def received(socket: aiohttp.ClientWebSocketResponse, *, until: bytes | None = None) -> bytes:
    """All up to the end that the server makes, or up to this."""
    got = b""
    async with asyncio.timeout(SECONDS):
        while until is None or until not in got:
            message = await socket.receive()
            if message.type is not aiohttp.WSMsgType.BINARY:
                raise ConnectionError(f"closed with {socket.close_code} after {got[-100:]!r}")
            if not message.data:
                return got
            got += message.data
    return got


async def test_a_server_is_reached_and_no_token_reaches_it(whole: Whole) -> None:
    said = await ask(
        whole,
        "a%2Fb/../c?x=1&y=%20",
        headers={
            "Cookie": "a=b",
            "X-Forwarded-Host": "liar",
            "Forktree-Handed": "1",
            "X-Own": "kept",
            "Proxy-Authorization": "Bearer x",
        },
    )
    assert said.status == 200
    assert said.json["path"] == "/a%2Fb/../c?x=1&y=%20"
    seen = {name.lower(): value for name, value in said.json["headers"]}
    assert whole.token not in str(said.json)
    assert not seen.keys() & {"authorization", "proxy-authorization", "cookie", "forktree-handed"}
    assert seen["x-own"] == "kept"
    assert seen["host"] == "localhost:8000"
    assert seen["x-forwarded-prefix"] == f"/ns/{whole.namespace}/v1/sessions/root/ports/web"
    assert seen["x-forwarded-host"] == URL(whole.node.url).authority
    assert (await ask(whole, port="8000")).status == 200, "by its number"
    head = await ask(whole, "big?bytes=7", method="HEAD")
    assert (head.status, head.headers["Content-Length"], head.body) == (200, "7", b"")


async def test_an_answer_of_a_guest_is_marked_as_one_and_sets_nothing(whole: Whole) -> None:
    said = await ask(whole, "evil")
    assert (said.status, said.body) == (401, b"evil")
    assert said.headers.getall(FROM_SESSION) == ["root"]
    assert said.headers["X-Kept"] == "yes"
    assert said.headers["X-Request-Id"] != "req_of_the_guest"
    assert SANDBOX in said.headers.getall("Content-Security-Policy")
    for name in ("Set-Cookie", "WWW-Authenticate", "Strict-Transport-Security", "X-Hop"):
        assert name not in said.headers
    prefix = f"/ns/{whole.namespace}/v1/sessions/root/ports/web"
    for to, where in {
        "/next": f"{prefix}/next",
        "http://localhost:8000/a": f"{prefix}/a",
        "/../../exec": f"{prefix}/exec",
        "https://elsewhere.example/": "https://elsewhere.example/",
    }.items():
        assert (await ask(whole, f"redirect?to={to}")).headers["Location"] == where
    assert "Location" not in (await ask(whole, f"redirect?to={whole.node.url}/ns/x")).headers


async def test_what_cannot_be_reached_is_said_in_one_sentence(whole: Whole) -> None:
    where = "port 9999 (none) of session root cannot be reached: nobody listens there"
    assert (await ask(whole, port="none")).refusal == (502, "upstream_error", where)
    status, code, sentence = (await ask(whole, port="22")).refusal
    assert (status, code) == (409, "port_not_exposed")
    assert sentence == (
        "port 22 of session root is not exposed: "
        "its template's ports are web (8000), count (9000), none (9999)"
    )
    assert (await ask(whole, port="UP")).refusal[:2] == (404, "not_found")
    assert (await ask(whole, session="nobody")).refusal[:2] == (404, "no_such_session")
    assert (await ask(whole, "noise")).refusal[:2] == (502, "upstream_error")
    with pytest.raises(aiohttp.ClientPayloadError):
        await ask(whole, "short")
    status, code, sentence = (await ask(whole, headers={"Authorization": "Bearer no"})).refusal
    assert (status, code) == (401, "unauthorized")
    await whole.template("closed")
    await whole.session("closed", "closed")
    assert (await ask(whole, session="closed")).refusal[2].endswith("its template's ports are none")
    assert "endpoint" not in await whole.status("session", "closed")


async def test_rights_are_those_of_the_method(whole: Whole) -> None:
    kubectl = whole.system.kubectl
    await whole.kubectl("create", "serviceaccount", "looker")
    await whole.kubectl("create", "role", "look", "--verb=get", "--resource=sessions.forktree.dev/proxy")
    await whole.kubectl(
        "create", "rolebinding", "look", "--role=look", f"--serviceaccount={whole.namespace}:looker"
    )
    token = await provisioning.user_token(kubectl, "looker", namespace=whole.namespace)
    looks = {"Authorization": f"Bearer {token}"}
    assert (await ask(whole, "who", headers=looks)).status == 200
    for method, path, more in (
        ("POST", "", {}),
        ("DELETE", "", {}),
        ("GET", "echo", {"Connection": "Upgrade", "Upgrade": "websocket"}),
    ):
        refused = await ask(whole, path, method=method, headers={**looks, **more})
        assert refused.refusal[:2] == (403, "forbidden"), method


async def test_large_bodies_pass_both_ways_in_bounded_memory(whole: Whole) -> None:
    count, piece = 16 << 20, bytes(1 << 20)

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(count // len(piece)):
            yield piece

    digest = hashlib.sha256(bytes(count)).hexdigest()
    before = peak_bytes(whole)
    chunked = await ask(whole, method="POST", data=pieces())
    assert chunked.json == {"bytes": count, "sha256": digest}
    assert (await ask(whole, method="POST", data=bytes(1 << 20))).json["bytes"] == 1 << 20
    big = await ask(whole, f"big?bytes={count}")
    assert len(big.body) == count
    assert big.body[:1024] == bytes(range(256)) * 4
    assert peak_bytes(whole) - before < count // 2


def peak_bytes(whole: Whole) -> int:
    status = Path(f"/proc/{whole.node.agent.pid}/status").read_text()
    (line,) = (each for each in status.splitlines() if each.startswith("VmHWM"))
    return int(line.split()[1]) << 10


async def test_a_websocket_is_carried_as_it_is(whole: Whole) -> None:
    url = f"{whole.node.url}/ns/{whole.namespace}/v1/sessions/root/ports/web/echo"
    async with whole.http.ws_connect(url, protocols=["own"], max_msg_size=0) as socket:
        assert socket.protocol == "own"
        for message in ("text", "x" * 100_000):
            await socket.send_str(message)
            assert (await socket.receive_str(timeout=SECONDS)) == message
        await socket.send_bytes(bytes(3 << 20))
        assert (await socket.receive_bytes(timeout=SECONDS)) == bytes(3 << 20)


async def test_a_websocket_ends_with_the_right_to_use_it(whole: Whole) -> None:
    """Which is one more than that to the GET that it began with."""
    await whole.kubectl("create", "serviceaccount", "talker")
    for verb in ("get", "create"):
        await whole.kubectl(
            "create", "role", verb, f"--verb={verb}", "--resource=sessions.forktree.dev/proxy"
        )
        account = f"--serviceaccount={whole.namespace}:talker"
        await whole.kubectl("create", "rolebinding", verb, f"--role={verb}", account)
    token = await provisioning.user_token(whole.system.kubectl, "talker", namespace=whole.namespace)
    url = f"{whole.node.url}/ns/{whole.namespace}/v1/sessions/root/ports/web/echo"
    async with whole.http.ws_connect(url, headers={"Authorization": f"Bearer {token}"}) as socket:
        await socket.send_str("heard")
        assert (await socket.receive_str(timeout=SECONDS)) == "heard"
        await whole.kubectl("delete", "rolebinding", "create")
        message = await socket.receive(timeout=SECONDS)
        assert message.type in {aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSED, aiohttp.WSMsgType.ERROR}


async def test_a_connection_ends_one_side_at_a_time(whole: Whole) -> None:
    async with connection(whole) as socket:
        await socket.send_bytes(b"hello")
        assert await received(socket, until=b"hello") == b"hello"
        await socket.send_bytes(b"")
        assert await received(socket) == b"5 bytes"
    assert await whole.sh("root", "cat /tmp/noted") == "ended 5\n"
    async with connection(whole) as socket:
        await socket.send_bytes(b"half")
        await received(socket, until=b"half")
    await noted(whole, "root", "reset 4")


async def noted(whole: Whole, session: str, line: str) -> None:
    """Wait until the server there has noted this."""
    await whole.sh(session, f"until grep -qx '{line}' /tmp/noted; do sleep 0.1; done")


async def test_as_many_connections_as_are_allowed_carry_their_own(whole: Whole) -> None:
    async def one(number: int) -> None:
        async with connection(whole) as socket:
            said = b"%d-" % number * 1000
            await socket.send_bytes(said)
            assert await received(socket, until=said) == said
            ready.release()
            await go.wait()
            await socket.send_bytes(b"")
            assert await received(socket) == b"%d bytes" % len(said)

    ready, go = asyncio.Semaphore(0), asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        for number in range(OF_A_SESSION):
            tasks.create_task(one(number))
        for _ in range(OF_A_SESSION):
            await ready.acquire()
        status, code, sentence = (await ask(whole, "who")).refusal
        assert (status, code) == (503, "overloaded")
        assert sentence == f"{OF_A_SESSION} connections into session root are open already: close one"
        assert await whole.sh("root", "echo still") == "still\n"
        go.set()
    assert (await ask(whole, "who")).status == 200


async def test_children_are_reached_each_as_itself_and_connections_stay_with_the_parent(whole: Whole) -> None:
    async with connection(whole) as socket:
        await socket.send_bytes(b"before")
        await received(socket, until=b"before")
        children = await whole.forked("twins", replicas=2)
        for child in children:
            await noted(whole, child, "reset 6")
            assert "/proc/1/exe" not in await whole.sh(child, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
            _, known = await whole.get(f"sessions/{child}/execs")
            assert known["ids"] == []
        await socket.send_bytes(b" after")
        assert await received(socket, until=b"after") == b" after"
        await socket.send_bytes(b"")
        assert await received(socket) == b"12 bytes"
    said = await whole.status("fork", "twins")
    for child, told in zip(children, said["children"], strict=True):
        status = await whole.status("session", child)
        assert told["endpoint"] == status["endpoint"]
        url = f"{whole.node.url}/ns/{whole.namespace}/v1/sessions/{child}/ports/"
        assert status["endpoint"] == f"{url}web/"
        _, info = await whole.get(f"sessions/{child}")
        assert info["endpoints"] == {name: f"{url}{name}/" for name in ("web", "count", "none")}
        async with whole.http.get(f"{status['endpoint']}who") as answer:
            assert status["vmGenerationID"] in await answer.text()
    await whole.kubectl(
        "patch", "session", children[0], "--type=merge", "-p", '{"spec":{"state":"Released"}}'
    )
    await whole.wait("session", children[0], "jsonpath={.status.phase}=Released")
    assert "endpoint" not in await whole.status("session", children[0])
    assert (await ask(whole, session=children[0])).refusal[:2] == (410, "session_gone")


async def test_an_agent_that_dies_takes_its_connections_along_and_nothing_else(whole: Whole) -> None:
    async with connection(whole) as socket:
        await socket.send_bytes(b"cut")
        await received(socket, until=b"cut")
        await whole.crash_agent()
        with pytest.raises((ConnectionError, aiohttp.ClientError)):
            await received(socket)
    await noted(whole, "root", "reset 3")
    assert (await ask(whole, "who")).status == 200
