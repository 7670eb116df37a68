"""Requests handed on to another node's agent: to that agent alone, once, and answered whatever it does."""

from __future__ import annotations

import asyncio
import gzip
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest
from aiohttp import web

from forktree.tracing.spans import Tracer
from forktree_agent.http import bodies, certificates, proxying
from forktree_agent.http.connections import Bounds
from forktree_agent.http.holding import HELD_BYTES
from forktree_agent.http.proxying import HOP_HEADER, Errand, Proxy, agent_origin
from forktree_agent.http.routes import Api
from forktree_agent.http.server import Listener, serving
from forktree_agent.metrics import Metrics
from unit.api_server import ScriptedServer, refuses, says

PATH = "/ns/team/v1/sessions/far/exec?wait_seconds=7.5"
SECONDS = 20.0

Answering = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class Owner:
    """The other agent: TLS of its own, and an answer that the test chooses."""

    ca_bundle: str
    url: str = ""
    answering: Answering | None = None
    seen: list[tuple[str, str, dict[str, str], str]] = field(
        default_factory=list[tuple[str, str, dict[str, str], str]]
    )

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.seen.append((request.method, request.path_qs, dict(request.headers), await request.text()))
        assert self.answering is not None
        return await self.answering(request)

    def node(self, **status: object) -> dict[str, object]:
        return {
            "metadata": {"name": "far-node"},
            "status": {"endpoint": self.url, "caBundle": self.ca_bundle, **status},
        }

    @classmethod
    @asynccontextmanager
    async def running(cls, folder: Path, *names: str) -> AsyncGenerator[Owner]:
        identity = certificates.self_signed(folder, [*(names or ("127.0.0.1",))])
        owner = cls(identity.ca_bundle)
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", owner.answer)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=identity.context).start()
            owner.url = f"https://127.0.0.1:{runner.addresses[0][1]}"
            yield owner
        finally:
            await runner.cleanup()


@dataclass(frozen=True)
class Front:
    """The agent that is asked, for a session that `owner` has."""

    url: str
    client: aiohttp.ClientSession
    kube: ScriptedServer

    async def ask(
        self, *nodes: object, headers: dict[str, str] | None = None, body: bytes = b'{"argv": ["x"]}'
    ) -> tuple[int, dict[str, Any]]:
        """Ask once for each of `nodes`, which the API server gives as the ForkNode. Returns the last."""
        answers: list[tuple[int, dict[str, Any]]] = []
        sent = {"Authorization": "Bearer the-callers", **(headers or {})}
        for node in nodes:
            self.kube.script.append(says(node) if node is not None else refuses(404, "NotFound"))
            async with self.client.post(
                f"{self.url}/v1/x?wait_seconds=1000&other=1", data=body, headers=sent
            ) as got:
                answers.append((got.status, await got.json()))
        return answers[-1]


class FarApi:
    """Stands for the routes: every request is about a session of the other node."""

    def __init__(self, proxy: Proxy, seconds: float) -> None:
        self._proxy, self._seconds = proxy, seconds

    def routes(self) -> list[web.RouteDef]:
        return [web.post("/v1/x", self._handle), web.get("/v1/x", self._handle)]

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        deadline = asyncio.get_running_loop().time() + self._seconds
        errand = Errand(node="far-node", path=PATH, subject="session far", deadline=deadline)
        return await self._proxy.relay(request, errand)


@asynccontextmanager
async def front_running(
    folder: Path, *, seconds: float = SECONDS, held_bytes: int = HELD_BYTES, tracer: Tracer | None = None
) -> AsyncGenerator[Front]:
    listener = Listener(
        host="127.0.0.1", port=0, names=("127.0.0.1",), tls_directory=folder, held_bytes=held_bytes
    )
    async with (
        ScriptedServer.running() as kube,
        kube.client() as client,
        Proxy.running(client, "near-node") as proxy,
        serving(listener, cast("Api", FarApi(proxy, seconds)), Metrics().answered, tracer=tracer) as served,
    ):
        trust = ssl.create_default_context(cadata=served.ca_bundle)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=trust)) as asking:
            yield Front(f"https://127.0.0.1:{served.port}", asking, kube)


@pytest.fixture
async def owner(tmp_path: Path) -> AsyncIterator[Owner]:
    async with Owner.running(tmp_path / "owner") as running:
        running.answering = says({"stdout": "far"})
        yield running


@pytest.fixture
async def front(tmp_path: Path) -> AsyncIterator[Front]:
    async with front_running(tmp_path / "front") as running:
        yield running


async def test_the_owner_gets_the_callers_request_and_the_caller_its_answer(
    front: Front, owner: Owner
) -> None:
    assert await front.ask(owner.node()) == (200, {"stdout": "far"})
    ((method, path, headers, body),) = owner.seen
    assert (method, path, body) == ("POST", PATH, '{"argv": ["x"]}')
    assert headers["Authorization"] == "Bearer the-callers"
    assert headers[HOP_HEADER] == "near-node"


async def test_nothing_but_the_token_and_the_plain_body_of_a_caller_goes_on(
    front: Front, owner: Owner
) -> None:
    sent = {
        "Content-Encoding": "gzip",
        "Content-Type": "text/html",
        "Cookie": "a=b",
        "Connection": "keep-alive, Authorization",
        "X-Forwarded-For": "10.0.0.1",
        "Impersonate-User": "system:admin",
    }
    assert await front.ask(owner.node(), headers=sent, body=gzip.compress(b"{}")) == (200, {"stdout": "far"})
    ((_, _, headers, body),) = owner.seen
    assert body == "{}"
    assert {name for name in headers if name not in {"Host", "Accept", "User-Agent", "Content-Length"}} == {
        "Accept-Encoding",
        "Authorization",
        "Content-Type",
        HOP_HEADER,
    }
    assert (headers["Content-Type"], headers["Accept-Encoding"]) == ("application/json", "identity")


async def test_the_key_that_makes_a_call_repeatable_goes_along(front: Front, owner: Owner) -> None:
    await front.ask(owner.node(), headers={"Idempotency-Key": "once"})
    ((_, _, headers, _),) = owner.seen
    assert headers["Idempotency-Key"] == "once"


async def test_the_body_of_a_request_that_takes_none_is_not_waited_for_for_ever(
    front: Front, owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "BODY_SECONDS", 0.3)

    async def never() -> AsyncGenerator[bytes]:
        yield b"{"
        await asyncio.Event().wait()

    front.kube.script.append(says(owner.node()))
    headers = {"Authorization": "Bearer the-callers"}
    async with (
        asyncio.timeout(SECONDS),
        front.client.get(f"{front.url}/v1/x", data=never(), headers=headers) as answer,
    ):
        assert (answer.status, (await answer.json())["code"]) == (400, "bad_request")
    assert owner.seen == []


@pytest.mark.parametrize("code", [400, 403, 404, 410, 503])
async def test_the_owners_refusal_is_the_answer(front: Front, owner: Owner, code: int) -> None:
    owner.answering = says({"code": "a_code", "message": "a sentence"}, code, {"Retry-After": "7"})
    assert await front.ask(owner.node()) == (code, {"code": "a_code", "message": "a sentence"})


async def test_one_connection_serves_many_requests_and_a_new_certificate_is_believed_at_once(
    front: Front, owner: Owner, tmp_path: Path
) -> None:
    ports: list[object] = []

    async def from_where(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        ports.append(request.transport.get_extra_info("peername"))
        return web.json_response({})

    owner.answering = from_where
    await front.ask(owner.node(), owner.node())
    assert ports[0] == ports[1]
    async with Owner.running(tmp_path / "another") as successor:
        successor.answering = says({"stdout": "new"})
        assert await front.ask(successor.node()) == (200, {"stdout": "new"})


async def test_a_request_is_handed_on_once(front: Front, owner: Owner) -> None:
    status, body = await front.ask(owner.node(), headers={HOP_HEADER: "third-node"})
    assert (status, body["code"]) == (421, "wrong_node")
    assert body["message"] == "session far is on node far-node, and this request was handed on before"
    assert owner.seen == []


async def test_a_server_under_another_authority_gets_nothing(
    front: Front, owner: Owner, tmp_path: Path
) -> None:
    stranger = certificates.self_signed(tmp_path / "stranger", ["127.0.0.1"]).ca_bundle
    status, body = await front.ask(owner.node(caBundle=stranger))
    assert (status, body["code"]) == (502, "upstream_error")
    assert body["message"] == (
        f"the agent of node far-node, where session far is, does not answer at {owner.url}: what is there "
        "does not show the certificate that the agent published"
    )
    assert owner.seen == []


async def test_a_server_of_another_name_gets_nothing(front: Front, tmp_path: Path) -> None:
    async with Owner.running(tmp_path / "elsewhere", "elsewhere.example") as owner:
        status, body = await front.ask(owner.node())
        assert (status, body["code"], owner.seen) == (502, "upstream_error", [])


async def test_a_given_certificate_of_an_unknown_issuer_is_believed_as_published(
    front: Front, tmp_path: Path
) -> None:
    certificates.self_signed(tmp_path, ["127.0.0.1"])
    both = tmp_path / "both.pem"
    both.write_text((tmp_path / "server.key").read_text() + (tmp_path / "server.crt").read_text())
    identity = certificates.given(both, both)
    assert "PRIVATE KEY" not in identity.ca_bundle
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", says({"stdout": "given"}))
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=identity.context).start()
        url = f"https://127.0.0.1:{runner.addresses[0][1]}"
        assert await front.ask(Owner(identity.ca_bundle, url).node()) == (200, {"stdout": "given"})
    finally:
        await runner.cleanup()


@pytest.mark.parametrize(
    ("status", "sentence"),
    [
        ({"endpoint": None}, "has published no address"),
        ({"endpoint": "http://127.0.0.1:1"}, "has published no address"),
        ({"caBundle": None}, "cannot be verified"),
        ({"caBundle": "no certificate"}, "cannot be verified"),
    ],
    ids=["no-endpoint", "not-https", "no-certificate", "not-pem"],
)
async def test_a_node_that_did_not_publish_what_is_needed_is_not_asked(
    front: Front, owner: Owner, status: dict[str, object], sentence: str
) -> None:
    code, body = await front.ask(owner.node(**status))
    assert (code, body["code"], sentence in body["message"]) == (421, "wrong_node", True), body
    assert owner.seen == []


async def test_the_address_of_another_node_is_not_taken(front: Front, owner: Owner) -> None:
    status, body = await front.ask({**owner.node(), "metadata": {"name": "other-node"}})
    assert (status, body["code"], owner.seen) == (421, "wrong_node", [])


async def test_a_node_without_an_agent_is_said_to_be_so(front: Front) -> None:
    status, body = await front.ask(None)
    assert (status, body["code"]) == (421, "wrong_node")
    assert body["message"] == "session far is on node far-node: the address of its agent is not known"


async def test_an_owner_that_is_not_there_is_an_error_at_once(front: Front, tmp_path: Path) -> None:
    async with Owner.running(tmp_path / "gone") as gone:
        pass
    status, body = await front.ask(gone.node())
    assert (status, body["code"]) == (502, "upstream_error")
    assert body["message"] == (
        f"the agent of node far-node, where session far is, does not answer at {gone.url}: connection refused"
    )


async def test_an_owner_that_hangs_is_an_error_at_the_deadline(owner: Owner, tmp_path: Path) -> None:
    async def hang(_: web.Request) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError

    owner.answering = hang
    async with front_running(tmp_path / "front", seconds=0.5) as front:
        status, body = await front.ask(owner.node())
    assert (status, body["code"], body["message"].endswith("its time was over")) == (
        502,
        "upstream_error",
        True,
    )


async def test_an_owner_that_breaks_off_is_an_error(front: Front, owner: Owner) -> None:
    async def break_off(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    owner.answering = break_off
    status, body = await front.ask(owner.node())
    assert (status, body["code"]) == (502, "upstream_error")
    assert body["message"].endswith("the connection broke")


@pytest.mark.parametrize("code", [200, 409])
async def test_a_long_answer_is_passed_on_as_it_comes_and_not_held(
    owner: Owner, tmp_path: Path, code: int
) -> None:
    owner.answering = says({"stdout": "x" * (5 << 20)}, code)
    async with front_running(tmp_path / "front", held_bytes=1 << 20) as front:
        status, body = await front.ask(owner.node())
    assert (status, len(body["stdout"])) == (code, 5 << 20)


async def test_what_is_no_answer_of_this_api_is_not_passed_on(front: Front, owner: Owner) -> None:
    owner.answering = says({}, 302, {"Location": "https://127.0.0.1:1/elsewhere"})
    status, body = await front.ask(owner.node())
    assert (status, body["code"]) == (502, "upstream_error")
    assert body["message"].endswith("gave no answer of this API")


async def test_a_packed_answer_is_not_passed_on(front: Front, owner: Owner) -> None:
    async def packed(_: web.Request) -> web.StreamResponse:
        body, headers = gzip.compress(b"{}"), {"Content-Encoding": "gzip"}
        return web.Response(body=body, headers=headers, content_type="application/json")

    owner.answering = packed
    status, body = await front.ask(owner.node())
    assert (status, body["message"].endswith("gave no answer of this API")) == (502, True)


def test_a_connection_to_another_agent_is_given_up_before_that_agent_closes_it() -> None:
    assert Bounds().idle_seconds > proxying.IDLE_SECONDS


async def test_a_page_for_people_is_not_passed_on(front: Front, owner: Owner) -> None:
    async def page(_: web.Request) -> web.StreamResponse:
        return web.Response(text="<h1>gateway</h1>", content_type="text/html")

    owner.answering = page
    assert (await front.ask(owner.node()))[0] == 502


async def test_a_caller_that_goes_away_ends_the_request_there_too(front: Front, owner: Owner) -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def hang(_: web.Request) -> web.StreamResponse:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        raise AssertionError

    owner.answering = hang
    asking = asyncio.create_task(front.ask(owner.node()), name="ask")
    async with asyncio.timeout(SECONDS):
        await begun.wait()
        asking.cancel()
        await ended.wait()


@pytest.mark.parametrize(
    ("endpoint", "origin"),
    [
        ("https://node-a:7443", "https://node-a:7443"),
        ("https://node-a/", "https://node-a:443"),
        ("https://[fd00::1]:7443", "https://[fd00::1]:7443"),
        ("http://node-a:7443", None),
        ("https://user@node-a:7443", None),
        ("https://node-a:7443/a/path", None),
        ("https://node-a:7443?a=b", None),
        ("https://node-a:7443#part", None),
        ("https://node-a:port", None),
        ("https://[node-a", None),
        ("file:///etc/passwd", None),
        ("node-a:7443", None),
        ("", None),
    ],
)
def test_only_an_https_address_is_an_endpoint(endpoint: str, origin: str | None) -> None:
    assert agent_origin(endpoint) == origin
