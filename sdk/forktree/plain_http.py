"""A small page over plain HTTP, at an address of its own: for machines that look after this program."""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import ClassVar

from aiohttp import web

from forktree.errors import ForktreeError
from forktree.models.reasons import Reason

log = logging.getLogger(__name__)

IDLE_SECONDS = 75.0
"""A connection is kept so long: as long as two questions are usually apart, at most."""


class CannotListen(ForktreeError):
    """The address of a page cannot be had."""

    reason: ClassVar[Reason] = Reason.INVALID


@asynccontextmanager
async def serving_plainly(
    app: web.Application, address: tuple[str, int] | None, what: str
) -> AsyncGenerator[int]:
    """Serve `app` inside the block, at the port that is yielded. None: do not; then it is 0.

    `what` is its name in the log and in the sentence of `CannotListen`, which this raises.
    """
    if address is None:
        yield 0
        return
    host, port = address
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
            raise CannotListen(f"{what} cannot be served at {host}:{port}: {why}") from err
        bound: int = runner.addresses[0][1]
        log.info("%s_serving host=%s port=%d", what, host, bound)
        yield bound
    finally:
        await runner.cleanup()
