"""WebSockets: open ones joined, and what goes over them within bounds."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Final

import aiohttp
from aiohttp import web

MAX_MESSAGE_BYTES: Final = 1 << 20

HEARTBEAT_SECONDS: Final = 20.0
"""Between two pings. A peer that does not answer one in half the time is gone."""

TAKEN_SECONDS: Final = 30.0
"""A peer that takes nothing for so long is gone, whatever its connection says."""

Socket = web.WebSocketResponse | aiohttp.ClientWebSocketResponse


async def joined(one: Socket, other: Socket) -> None:
    """Hand on what comes from either to the other, until one of them ends; then end the other too."""
    await first_of(_pump(one, other), _pump(other, one))
    await one.close()
    await other.close()


async def first_of(*works: Coroutine[Any, Any, None]) -> None:
    """Until one of them is done. The others are cancelled then. Raises what that one did."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()


async def _pump(source: Socket, sink: Socket) -> None:
    async for message in source:
        match message.type:
            case aiohttp.WSMsgType.BINARY:
                await send(sink, message.data)
            case aiohttp.WSMsgType.TEXT:
                await send(sink, message.data)
            case _:
                return


async def send(sink: Socket, data: bytes | str) -> None:
    """Waits while the peer is behind. Raises `ConnectionError` once it is gone."""
    try:
        async with asyncio.timeout(TAKEN_SECONDS):
            if isinstance(data, bytes):
                await sink.send_bytes(data)
            else:
                await sink.send_str(data)
    except TimeoutError as err:
        raise ConnectionError("the peer takes nothing") from err
