"""A command on a terminal in a session, joined to the terminal that we are on."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
import termios
import tty
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import Final
from urllib.parse import quote

import aiohttp
from yarl import URL

from forktree import Reach
from forktree._websockets import opened
from forktree.errors import AnswerLost, BadSettings, UnexpectedAnswer, refused

_TERM: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,63}")
_LARGEST = 1000
_PIECE_BYTES = 1 << 14
_AHEAD = 64


async def interact(reach: Reach, session: str, argv: list[str]) -> int:
    """The exit code of the command, or of a shell where none is given.

    Our terminal is raw meanwhile, so that Ctrl-C and the like go to the command.
    Raises `BadSettings` where standard input is no terminal, and `ClientError`.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise BadSettings("-t needs a terminal on both sides: leave it out where input or output is a pipe")
    rows, columns = _size()
    query = [("argv", each) for each in argv] + [("rows", str(rows)), ("cols", str(columns))]
    if _TERM.fullmatch(kind := os.environ.get("TERM", "")):
        query.append(("term", kind))
    url = URL(f"{reach.url}/sessions/{quote(session, safe='')}/terminal", encoded=True).with_query(query)
    async with aiohttp.ClientSession(trust_env=False) as http:
        socket = await opened(http, reach, url, "terminal")
        async with socket:
            with _raw():
                return await _joined(socket)


class _Keys:
    """What is typed and how large our terminal is, in order.

    Reads no further ahead than a few pieces: what is pasted waits in the terminal until it goes.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting: asyncio.Queue[bytes | str] = asyncio.Queue()
        self._ended = False

    def start(self) -> None:
        self._loop.add_reader(0, self._read)
        self._loop.add_signal_handler(signal.SIGWINCH, self._resized)

    def stop(self) -> None:
        self._ended = True
        self._loop.remove_reader(0)
        self._loop.remove_signal_handler(signal.SIGWINCH)

    async def send(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        """Until it is cancelled."""
        while True:
            each = await self._waiting.get()
            if isinstance(each, str):
                await socket.send_str(each)
                continue
            await socket.send_bytes(each)
            if not self._ended and self._waiting.empty():
                self._loop.add_reader(0, self._read)

    def _read(self) -> None:
        piece = os.read(0, _PIECE_BYTES)
        self._ended = not piece
        self._waiting.put_nowait(piece or b"\x04")  # Nobody types any more: Ctrl-D says so to the command.
        if self._ended or self._waiting.qsize() >= _AHEAD:
            self._loop.remove_reader(0)

    def _resized(self) -> None:
        rows, columns = _size()
        self._waiting.put_nowait(json.dumps({"type": "resize", "rows": rows, "cols": columns}))


def _size() -> tuple[int, int]:
    """Rows and columns of our terminal. One that has no size says 0."""
    size = os.get_terminal_size()
    return min(size.lines or 24, _LARGEST), min(size.columns or 80, _LARGEST)


async def _joined(socket: aiohttp.ClientWebSocketResponse) -> int:
    keys = _Keys()
    keys.start()
    sending = asyncio.create_task(keys.send(socket), name="terminal-input")
    try:
        return await _shown(socket)
    finally:
        keys.stop()
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)


async def _shown(socket: aiohttp.ClientWebSocketResponse) -> int:
    """Write what comes to our terminal until the command has ended."""
    async for message in socket:
        if message.type is aiohttp.WSMsgType.BINARY:
            data = memoryview(message.data)
            while data:
                data = data[os.write(1, data) :]
        elif message.type is aiohttp.WSMsgType.TEXT:
            try:
                said = json.loads(message.data)
                kind = said["type"]
                if kind == "end":
                    return int(said["exit_code"]) & 0xFF
                if kind == "error":
                    raise refused(str(said["error"]), code=str(said["code"]), status=0)
            except (ValueError, KeyError, TypeError) as err:
                raise UnexpectedAnswer(f"what the agent says of the terminal cannot be read: {err}") from err
    raise AnswerLost("the connection to the terminal broke before its command ended")


@contextmanager
def _raw() -> Generator[None]:
    """In the block, our terminal passes on each key as it is."""
    before = termios.tcgetattr(0)
    tty.setraw(0, termios.TCSADRAIN)  # What was typed ahead stays: by custom it is dropped.
    try:
        yield
    finally:
        with suppress(termios.error):  # It may be gone: that is why we end, then.
            termios.tcsetattr(0, termios.TCSADRAIN, before)
