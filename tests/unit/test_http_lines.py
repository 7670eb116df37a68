"""Answers that go on: signs of life, the end, and a caller who may not go on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from forktree.wire_trees import Alive, Broken, Gone, Synced
from forktree_agent.http import lines, streaming
from forktree_agent.http.errors import Code, Refusal
from forktree_agent.http.requests import REQUEST_ID

SECONDS = 20.0
WORDS = lines.Words(Alive(), lambda refusal: Broken(error=refusal.sentence, code=refusal.code))


class Script:
    """A handler that says what a test wants."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()
        self.over = asyncio.Event()
        self.refused: Refusal | None = None
        self.breaks: Refusal | None = None
        self.floods = False
        self.answered: web.StreamResponse | None = None

    async def handle(self, request: web.Request) -> web.StreamResponse:
        request[REQUEST_ID] = "req_1"
        try:
            self.answered = await lines.answer(
                request, self.tell, WORDS, still=self.still, alive_seconds=0.01, asked_seconds=0.01
            )
        except Refusal as err:
            return web.json_response({"code": err.code}, status=err.status)
        finally:
            self.over.set()
        return self.answered

    async def tell(self, say: lines.Say) -> None:
        if self.breaks is not None and not self.go_on.is_set():
            raise self.breaks
        await say(Synced())
        while self.floods:
            await say(Gone(kind="session", id="a" * (1 << 16)))
        await self.go_on.wait()
        if self.breaks is not None:
            raise self.breaks
        await say(Gone(kind="session", id="a"))

    async def still(self) -> None:
        if self.refused is not None:
            raise self.refused


@asynccontextmanager
async def asking(script: Script) -> AsyncGenerator[aiohttp.ClientResponse]:
    app = web.Application()
    app.router.add_get("/", script.handle)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        async with (
            asyncio.timeout(SECONDS),
            aiohttp.ClientSession() as http,
            http.get(f"http://127.0.0.1:{runner.addresses[0][1]}/") as answer,
        ):
            yield answer
    finally:
        await runner.cleanup()


async def next_of(answer: aiohttp.ClientResponse) -> dict[str, Any]:
    line: dict[str, Any] = json.loads(await answer.content.readline())
    return line


async def test_silence_is_told_from_the_end() -> None:
    script = Script()
    async with asking(script) as answer:
        assert await next_of(answer) == {"type": "synced"}
        assert await next_of(answer) == {"type": "alive"}
        script.go_on.set()
        rest = [json.loads(line) async for line in answer.content]
    assert rest[-1] == {"type": "gone", "kind": "session", "id": "a"}
    assert all(each == {"type": "alive"} for each in rest[:-1])


async def test_who_may_not_go_on_is_told_so_in_the_last_line() -> None:
    script = Script()
    async with asking(script) as answer:
        assert await next_of(answer) == {"type": "synced"}
        script.refused = Refusal(Code.FORBIDDEN, "not any more")
        rest = [json.loads(line) async for line in answer.content]
    assert rest[-1] == {"type": "error", "error": "not any more", "code": "forbidden"}


@pytest.mark.parametrize("begun", [False, True])
async def test_what_breaks_is_an_answer_of_its_own_only_before_the_first_line(begun: bool) -> None:
    script = Script()
    script.breaks = Refusal(Code.UPSTREAM_ERROR, "broke")
    if begun:
        script.go_on.set()
    async with asking(script) as answer:
        told = [json.loads(line) async for line in answer.content]
    assert answer.status == (200 if begun else 502)
    assert told[-1]["code"] == "upstream_error"


async def test_a_reader_that_goes_away_ends_it() -> None:
    script = Script()
    async with asking(script) as answer:
        await next_of(answer)
        answer.close()
        await asyncio.wait_for(script.over.wait(), SECONDS)


async def test_a_reader_that_takes_nothing_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its connection says: else it would hold what there is a bound of for as long as it likes."""
    monkeypatch.setattr(streaming, "TAKEN_SECONDS", 0.2)
    script = Script()
    script.floods = True
    async with asking(script):  # Only its head is read.
        await asyncio.wait_for(script.over.wait(), SECONDS)


async def test_who_may_not_go_on_is_told_so_also_where_there_is_always_something_to_say() -> None:
    script = Script()
    script.floods = True
    async with asking(script) as answer:
        assert await next_of(answer) == {"type": "synced"}
        script.refused = Refusal(Code.FORBIDDEN, "not any more")
        last = b""
        async for piece in answer.content.iter_any():
            last = (last + piece)[-200:]
    assert json.loads(last.splitlines()[-1]) == {
        "type": "error",
        "error": "not any more",
        "code": "forbidden",
    }
