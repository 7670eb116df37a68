"""A create whose caller goes away leaves nothing, at whatever moment that is."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web

from forktree.wire import CreateSession
from forktree_agent.http.opening import open_session
from unit.api_server import ScriptedServer, says, session

SECONDS = 20.0


async def test_a_caller_that_goes_away_before_the_api_server_answers_leaves_no_object() -> None:
    made, answered = asyncio.Event(), asyncio.Event()

    async def make(_: web.Request) -> web.StreamResponse:
        made.set()
        await answered.wait()
        return web.json_response(session("sess", 7), status=201)

    async with asyncio.timeout(SECONDS), ScriptedServer.running() as server, server.client() as client:
        template = {"metadata": {"name": "t", "namespace": "default"}, "spec": {"image": "builtin:tiny"}}
        server.script += [says(template), make, says({})]
        seen = asyncio.get_running_loop().time()
        opening = asyncio.create_task(
            open_session(client, "default", CreateSession(template_id="t"), seen=seen), name="open"
        )
        await made.wait()
        opening.cancel()
        answered.set()
        with pytest.raises(asyncio.CancelledError):
            await opening
        assert [request.method for request in server.seen] == ["GET", "POST", "DELETE"]
        assert server.seen[-1].path.endswith("/namespaces/default/sessions/sess")
