"""Whose share a request takes from: the caller's until it is known to be allowed something, then the
namespace's. And what it was allowed is asked for again, all of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, cast

import aiohttp
import pytest
from aiohttp import web

from forktree_agent.commons import Commons
from forktree_agent.http import server
from forktree_agent.http.auth import AUDIENCE, KEPT_SECONDS, Gate
from forktree_agent.http.errors import Code, Refusal
from forktree_agent.http.handlers.ports import LOOK, USE
from forktree_agent.http.holding import Held, Holdings
from forktree_agent.http.server import Listener, serving
from forktree_agent.http.table import Asked, Parts, Raw, Route, checked
from forktree_agent.http.tree_watching import Watchers
from forktree_agent.http.tunnels import Tunnels
from forktree_agent.metrics import Metrics
from unit.api_server import ScriptedServer

if TYPE_CHECKING:
    from forktree_agent.control.facade import Facade
    from forktree_agent.http.proxying import Proxy
    from forktree_agent.http.routes import Api

SECONDS = 60.0
AT_ONCE = 64
STRANGER = "system:serviceaccount:evil:stranger"
USER = "system:serviceaccount:victim:user"


@dataclass
class Authorizer(ScriptedServer):
    """A token is its owner's name. Users may what `verbs` says; about others it never makes up its mind."""

    verbs: set[str] = field(default_factory=lambda: {"get", "create"})

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        spec = body["spec"]
        if "token" in spec:
            user = {"username": spec["token"]}
            status = {"authenticated": True, "user": user, "audiences": [AUDIENCE]}
            return web.json_response({"status": status})
        if spec["user"] != USER:
            await asyncio.Event().wait()
        return web.json_response({"status": {"allowed": spec["resourceAttributes"]["verb"] in self.verbs}})


@dataclass
class Standing:
    """A server with one route, and all that is needed to ask it."""

    url: str
    client: aiohttp.ClientSession
    authorizer: Authorizer
    now: float = 0.0
    waiting: asyncio.Event = field(default_factory=asyncio.Event)
    go_on: asyncio.Event = field(default_factory=asyncio.Event)

    def routes(self, parts: Parts) -> list[web.RouteDef]:
        route = Route(
            method="GET",
            path="/sessions/{session_id}",
            summary="Waits where that is asked for",
            handler=self._answer,
            rights=(LOOK,),
            answers={HTTPStatus.OK: (Raw("text/plain"),)},
        )
        return [web.get("/ns/{namespace}/v1/sessions/{session_id}", checked(route, parts))]

    async def _answer(self, asked: Asked) -> web.StreamResponse:
        """As an HTTP WebSocket's handler does: it takes a right that its route does not say."""
        await asked.permit(USE.verb, USE.resource, asked.session_id)
        if asked.session_id == "long":
            self.waiting.set()
            await self.go_on.wait()
            await asked.still_may()
        return web.Response(text="well")

    async def ask(self, who: str, namespace: str, session: str = "a") -> int:
        url, headers = f"{self.url}/ns/{namespace}/v1/sessions/{session}", {"Authorization": f"Bearer {who}"}
        async with self.client.get(url, headers=headers) as answer:
            await answer.read()
            return answer.status


@dataclass
class _OneRoute:
    """Stands for the routes."""

    standing: Standing
    parts: Parts

    def routes(self) -> list[web.RouteDef]:
        return self.standing.routes(self.parts)


@asynccontextmanager
async def standing(folder: Path) -> AsyncGenerator[Standing]:
    listener = Listener(host="127.0.0.1", port=0, names=("127.0.0.1",), tls_directory=folder)
    connector = aiohttp.TCPConnector(limit=0, ssl=False)
    async with (
        Authorizer.running() as authorizer,
        authorizer.client(timeout_seconds=SECONDS) as kube,
        aiohttp.ClientSession(connector=connector) as client,
    ):
        assert isinstance(authorizer, Authorizer)
        made = Standing("", client, authorizer)
        parts = Parts(
            client=kube,
            facade=cast("Facade", None),
            proxy=cast("Proxy", None),
            gate=Gate(kube, now=lambda: made.now),
            watchers=Watchers(),
            tunnels=Tunnels(),
        )
        async with serving(listener, cast("Api", _OneRoute(made, parts)), Metrics().answered) as served:
            made.url = f"https://127.0.0.1:{served.port}"
            yield made


@pytest.mark.parametrize("namespaces", [1, AT_ONCE * 2], ids=["one namespace", "as many as there are"])
async def test_who_may_nothing_in_a_namespace_takes_nothing_of_its_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, namespaces: int
) -> None:
    """Nor of everybody's, by asking about namespaces that it invents or as one of many accounts."""
    monkeypatch.setattr(server, "REQUESTS_AT_ONCE", AT_ONCE)
    names = ["victim", *(f"n-{number}" for number in range(1, namespaces))]
    async with standing(tmp_path) as stage, asyncio.timeout(SECONDS):
        assert await stage.ask(USER, "victim") == 200
        crowd = [
            asyncio.create_task(stage.ask(f"{STRANGER}-{number % 3}", names[number % namespaces]))
            for number in range(AT_ONCE * 5 // 4)
        ]
        try:
            done, _ = await asyncio.wait(crowd, return_when=asyncio.FIRST_COMPLETED)
            assert {each.result() for each in done} == {503}
            # Three quarters of what the crowd leaves.
            many = AT_ONCE // 4 * 3 // 4
            assert await asyncio.gather(*(stage.ask(USER, "victim") for _ in range(many))) == [200] * many
        finally:
            for each in crowd:
                each.cancel()
            await asyncio.gather(*crowd, return_exceptions=True)


@pytest.mark.parametrize(("left", "status"), [({"get", "create"}, 200), ({"get"}, 403), ({"create"}, 403)])
async def test_a_long_answer_needs_all_rights_that_it_took(
    tmp_path: Path, left: set[str], status: int
) -> None:
    async with standing(tmp_path) as stage, asyncio.timeout(SECONDS):
        asking = asyncio.create_task(stage.ask(USER, "victim", "long"))
        await stage.waiting.wait()
        stage.authorizer.verbs = left
        stage.now += KEPT_SECONDS + 1
        stage.go_on.set()
        assert await asking == status


@pytest.fixture
def holdings() -> Iterator[Holdings]:
    """All is given back in the end."""
    made = Holdings(memory=Commons(1 << 20), requests=Commons(8))
    yield made
    assert (made.memory.held, made.requests.held) == (0, 0)


def test_what_a_request_holds_goes_with_it(holdings: Holdings) -> None:
    held = Held(holdings)
    held.asked_by("stranger")
    held.hold(1000, "a body")
    assert (holdings.memory.held_by("victim"), holdings.requests.held_by("victim")) == (0, 0)
    held.belongs_to("victim")
    held.belongs_to("victim")
    assert (holdings.memory.held_by("victim"), holdings.requests.held_by("victim")) == (1000, 1)
    assert (holdings.memory.held, holdings.requests.held) == (1000, 1)
    held.let_go(400)
    assert holdings.memory.held_by("victim") == 600
    held.close()
    held.close()


def test_a_request_for_which_its_namespace_has_no_room_is_refused_and_holds_nothing(
    holdings: Holdings,
) -> None:
    others = [Held(holdings) for _ in range(6)]
    for each in others:
        each.belongs_to("victim")
    late = Held(holdings)
    late.asked_by("somebody")
    with pytest.raises(Refusal, match="6 requests about namespace victim are") as refused:
        late.belongs_to("victim")
    assert refused.value.code is Code.OVERLOADED
    assert holdings.requests.held == 6
    for each in [*others, late]:
        each.close()


def test_what_a_request_holds_needs_room_in_the_share_of_its_namespace(holdings: Holdings) -> None:
    first, second = Held(holdings), Held(holdings)
    first.belongs_to("victim")
    first.hold(500 << 10, "a body")
    second.asked_by("somebody")
    second.hold(100 << 10, "a body")
    with pytest.raises(Refusal, match="hold as much as there is room for"):
        second.belongs_to("victim")
    first.close()
    second.close()
