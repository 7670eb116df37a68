"""Answers that go on as things happen: one JSON object a line, and a sign of life where nothing does.

Of all of them it holds that they end when their reader takes nothing, or when it may not have them any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from aiohttp import web

from forktree.errors import ForktreeError
from forktree.wire import Answer
from forktree_agent.http import allowing, streaming
from forktree_agent.http.bodies import encode
from forktree_agent.http.errors import Refusal, refusal_of
from forktree_agent.http.streaming import NDJSON, Pieces

ALIVE_SECONDS = 8.0
"""Of silence at most, so that a reader, and whatever stands between, can tell it from the end. Ten are
promised."""

Say = Callable[[Answer], Awaitable[None]]
Still = Callable[[], Awaitable[None]]
"""Returns if the caller still may. Raises `Refusal`."""


@dataclass(frozen=True, slots=True)
class Words:
    """How an answer says what is said in all of them."""

    alive: Answer
    broken: Callable[[Refusal], Answer]
    """Its last line, where it does not end well."""


class _Lines:
    """Sends them one after the other, whoever says them."""

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces
        self._turn = asyncio.Lock()
        self.count = 0

    async def say(self, line: Answer) -> None:
        async with self._turn:
            await self._pieces.send(encode(line) + b"\n")
            self.count += 1


async def answer(
    request: web.Request,
    tell: Callable[[Say], Awaitable[None]],
    words: Words,
    *,
    still: Still,
    alive_seconds: float = ALIVE_SECONDS,
    asked_seconds: float = allowing.ASKED_SECONDS,
) -> web.StreamResponse:
    """All that `tell` says, until it returns.

    `still` is asked all the while whether the caller may go on. What that refuses, or `tell`, is the last
    line; before the first line it is an answer like any other.
    """

    async def told(pieces: Pieces) -> None:
        lines = _Lines(pieces)
        try:
            async with allowing.while_allowed(still, seconds=asked_seconds):
                await _with_signs_of_life(tell, lines, words.alive, alive_seconds)
        except (Refusal, ForktreeError) as err:
            if not pieces.begun:
                raise
            await lines.say(words.broken(refusal_of(err)))

    return await streaming.pieces(request, told, {"Content-Type": NDJSON})


async def _with_signs_of_life(
    tell: Callable[[Say], Awaitable[None]], lines: _Lines, alive: Answer, seconds: float
) -> None:
    telling = asyncio.ensure_future(tell(lines.say))
    try:
        before = 0
        while not (await asyncio.wait([telling], timeout=seconds))[0]:
            if lines.count == before:
                await lines.say(alive)
            before = lines.count
        await telling
    finally:
        telling.cancel()
        await asyncio.gather(telling, return_exceptions=True)
