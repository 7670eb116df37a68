"""Whether a caller may: asked of the API server as seldom as its answers allow."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from forktree_agent.http.auth import KEPT_SECONDS, Caller, Gate
from forktree_agent.http.errors import Code, Refusal
from unit.api_server import Answer, ScriptedServer

CALLER = Caller(username="system:serviceaccount:ns:user", token_hash=b"hash")


@pytest.fixture
async def server() -> AsyncIterator[ScriptedServer]:
    async with ScriptedServer.running() as running:
        yield running


def reviewing(names: set[str], asked: list[str]) -> Answer:
    """Who asks may it to sessions of these names; "" is all of them. Notes for which it is asked."""

    async def answer(request: web.Request) -> web.StreamResponse:
        name = (await request.json())["spec"]["resourceAttributes"]["name"]
        asked.append(name)
        return web.json_response({"status": {"allowed": bool({"", name} & names)}})

    return answer


async def permit(gate: Gate, name: str) -> bool:
    try:
        await gate.permit(CALLER, "create", "ns", name=name, subresource="fork")
    except Refusal as err:
        assert err.code is Code.FORBIDDEN
        return False
    return True


async def test_who_may_it_to_any_session_is_not_asked_about_for_each(server: ScriptedServer) -> None:
    asked: list[str] = []
    now = 0.0
    server.script += [reviewing({""}, asked)] * 9
    async with server.client() as client:
        gate = Gate(client, now=lambda: now)
        assert [await permit(gate, name) for name in ("a", "b", "a")] == [True] * 3
        assert asked == [""]
        now = KEPT_SECONDS + 1
        assert await permit(gate, "c")
    assert asked == ["", ""]


async def test_who_may_it_to_one_session_may_it_to_no_other(server: ScriptedServer) -> None:
    asked: list[str] = []
    server.script += [reviewing({"mine"}, asked)] * 9
    async with server.client() as client:
        gate = Gate(client, now=lambda: 0.0)
        assert [await permit(gate, name) for name in ("mine", "theirs", "mine")] == [True, False, True]
    assert asked == ["", "mine", "", "theirs"]


async def test_a_right_that_is_granted_counts_at_once(server: ScriptedServer) -> None:
    asked: list[str] = []
    names: set[str] = set()
    server.script += [reviewing(names, asked)] * 9
    async with server.client() as client:
        gate = Gate(client, now=lambda: 0.0)
        assert not await permit(gate, "a")
        names.add("")
        assert all(await asyncio.gather(permit(gate, "a"), permit(gate, "b")))
