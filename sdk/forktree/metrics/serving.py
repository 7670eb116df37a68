"""`GET /metrics` over plain HTTP, on an address of its own: nothing else is there, and nothing secret."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager

from aiohttp import web

from forktree.metrics.instruments import CONTENT_TYPE, Instruments
from forktree.plain_http import serving_plainly

SCRAPES_AT_ONCE = 4
"""Whoever floods this port takes no more of the program than so many answers in a row."""


def serving_metrics(
    address: tuple[str, int] | None, instruments: Instruments
) -> AbstractAsyncContextManager[int]:
    """Serve them inside the block, at the port that is yielded. None: do not; then it is 0.

    Raises `CannotListen`.
    """
    app = web.Application(client_max_size=0)
    app.router.add_get("/metrics", _Page(instruments).get)
    return serving_plainly(app, address, "metrics")


class _Page:
    def __init__(self, instruments: Instruments) -> None:
        self._instruments = instruments
        self._turn = asyncio.Lock()
        self._asked = 0

    async def get(self, _: web.Request) -> web.Response:
        if self._asked >= SCRAPES_AT_ONCE:
            raise web.HTTPServiceUnavailable(text="others are being answered already; ask again later\n")
        self._asked += 1
        try:
            async with self._turn:
                self._instruments.read()
                # Some milliseconds, in which the loop has better to do.
                body = await asyncio.to_thread(self._instruments.text)
        finally:
            self._asked -= 1
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE})
