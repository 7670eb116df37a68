"""Answers that go on as things happen: one JSON object a line, and a sign of life where nothing does."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from aiohttp import web

from forktree.errors import ForktreeError
from forktree.wire import Answer
from forktree.wire_trees import Alive, Broken
from forktree_agent.http.bodies import encode
from forktree_agent.http.errors import Refusal, refusal_of
from forktree_agent.http.requests import REQUEST_ID
from forktree_agent.http.streaming import NDJSON

log = logging.getLogger(__name__)

ALIVE_SECONDS = 10.0
"""Between two lines at most, so that a reader, and whatever stands between, can tell silence from the end."""

Say = Callable[[Answer], Awaitable[None]]


class _Writer:
    """Sends lines one after the other, each when there is room for it."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self.response = web.StreamResponse(headers={"X-Request-Id": request[REQUEST_ID]})
        self.response.content_type = NDJSON
        self._turn = asyncio.Lock()

    async def say(self, line: Answer) -> None:
        async with self._turn:
            if not self.response.prepared:
                await self.response.prepare(self._request)
            await self.response.write(encode(line) + b"\n")


async def answer(
    request: web.Request,
    tell: Callable[[Say], Awaitable[None]],
    *,
    still: Callable[[], Awaitable[None]],
    alive_seconds: float = ALIVE_SECONDS,
) -> web.StreamResponse:
    """All that `tell` says, until it returns.

    `still` is asked at every sign of life whether the caller may go on. What that refuses, or `tell`, is the
    last line; before the first line it is an answer like any other.
    """
    writer = _Writer(request)
    telling = asyncio.ensure_future(tell(writer.say))
    try:
        while not (await asyncio.wait([telling], timeout=alive_seconds))[0]:
            await still()
            await writer.say(Alive())
        await telling
    except (Refusal, ForktreeError) as err:
        refusal = refusal_of(err)
        if not writer.response.prepared:
            raise refusal from err
        await writer.say(Broken(error=refusal.sentence, code=refusal.code))
    except ConnectionResetError:
        log.debug("reader_gone id=%s", request[REQUEST_ID])
        return writer.response
    finally:
        telling.cancel()
        await asyncio.gather(telling, return_exceptions=True)
    if not writer.response.prepared:
        await writer.response.prepare(request)
    await writer.response.write_eof()
    return writer.response
