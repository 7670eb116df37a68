"""Two-way streams of bytes whose ends are known one by one: into a guest, or to another node's agent."""

from __future__ import annotations

import asyncio
from typing import Final, Protocol

READ_BYTES: Final = 64 << 10

IDLE_SECONDS: Final = 600.0
"""Without a byte in either direction: nobody needs it any more. A WebSocket's pings are bytes too."""


class Pipe(Protocol):
    """Not for several readers at once, nor for several writers."""

    async def read(self) -> bytes:
        """What comes next; empty once its other side has ended. Raises `ConnectionError` where it broke."""
        ...

    async def write(self, data: bytes) -> None:
        """Returns when there is room for more. Raises `ConnectionError`."""
        ...

    async def end(self) -> None:
        """Nothing more is going to be written. Reading goes on."""
        ...


class StreamPipe:
    """Over a connection of ours."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def read(self) -> bytes:
        try:
            async with asyncio.timeout(IDLE_SECONDS):
                return await self._reader.read(READ_BYTES)
        except (OSError, TimeoutError) as err:
            raise ConnectionError("the connection broke") from err

    async def write(self, data: bytes) -> None:
        try:
            async with asyncio.timeout(IDLE_SECONDS):
                self._writer.write(data)
                await self._writer.drain()
        except (OSError, TimeoutError) as err:
            raise ConnectionError("the connection broke") from err

    async def end(self) -> None:
        if self._writer.can_write_eof():  # Not over TLS: what is said there ends by itself.
            self._writer.write_eof()
