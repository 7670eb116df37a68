"""`GET /metrics` over plain HTTP, on an address of its own: nothing else is there, and nothing secret."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import ClassVar

from aiohttp import web

from forktree.errors import ForktreeError
from forktree.metrics.instruments import CONTENT_TYPE, Instruments
from forktree.models.reasons import Reason

log = logging.getLogger(__name__)

SCRAPES_AT_ONCE = 4
"""Whoever floods this port takes no more of the program than so many answers in a row."""
IDLE_SECONDS = 75.0
"""As long as two scrapes are usually apart, at most."""


class CannotListen(ForktreeError):
    """The address for metrics cannot be had."""

    reason: ClassVar[Reason] = Reason.INVALID


@asynccontextmanager
async def serving_metrics(address: tuple[str, int] | None, instruments: Instruments) -> AsyncGenerator[int]:
    """Serve them inside the block, at the port that is yielded. None: do not; then it is 0.

    Raises `CannotListen`.
    """
    if address is None:
        yield 0
        return
    host, port = address
    app = web.Application(client_max_size=0)
    app.router.add_get("/metrics", _Page(instruments).get)
    runner = web.AppRunner(app, access_log=None, keepalive_timeout=IDLE_SECONDS, shutdown_timeout=1.0)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        try:
            await site.start()
        except OSError as err:
            # Without the address once more. Those of a name that nobody knows are below zero.
            number = err.errno or 0
            why = os.strerror(number) if number > 0 else err.strerror or str(err)
            raise CannotListen(f"metrics cannot be served at {host}:{port}: {why}") from err
        bound: int = runner.addresses[0][1]
        log.info("metrics_serving host=%s port=%d", host, bound)
        yield bound
    finally:
        await runner.cleanup()


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
