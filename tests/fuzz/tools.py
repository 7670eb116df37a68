"""What a file tool in a guest may answer: nothing comes of a lie but a refusal, or a break in the answer."""

from __future__ import annotations

import asyncio
import json
from typing import cast

from forktree.models import Session
from forktree_agent.control.facade import Facade
from forktree_agent.engine.contract import ExecChunk, ExecEnd, ExecReader, ExecStream
from forktree_agent.http.errors import Refusal
from forktree_agent.http.transferring import Readable, Tool, Unpacked, Written, listed
from fuzz.dealt import Dealt

_HEADS: tuple[object, ...] = (
    {"ok": True},
    {"ok": 3},
    {"ok": {"mode": 420, "bytes": 3}},
    {"ok": {"mode": 420, "bytes": -3}},
    {"ok": {"mode": -1, "bytes": 1 << 62}},
    {"ok": {"mode": 1 << 70, "bytes": None}},
    {"ok": {"entries": 1, "bytes": 2}},
    {"ok": None, "why": "not_found", "message": "m" * 9000},
    {"ok": None, "why": "odd", "message": None},
    {"why": 3},
)
_ENTRIES: tuple[object, ...] = (
    {"name": "a", "type": "file", "bytes": 1, "mode": 420, "mtime": 1},
    {"name": "../../etc", "type": "odd", "bytes": -1, "mode": -1, "mtime": -(1 << 62)},
    {"name": "\x1b\n", "type": "", "bytes": 1 << 70, "mode": 1 << 70, "mtime": 0},
    {"name": 1},
)


class Answered:
    """A tool that says this, in pieces, and ends so."""

    id = "tool"

    def __init__(self, dealt: Dealt) -> None:
        self._pieces = list[ExecChunk | ExecEnd]()
        self._end = ExecEnd(exit_code=dealt.byte() % 3, timed_out=False)
        said = dealt.rest() if dealt.byte() % 2 else _made(dealt)
        size = 1 + dealt.byte() if len(said) < 1000 else 1 << 16
        stream = ExecStream.STDOUT
        for at in range(0, len(said), size):
            self._pieces.append(ExecChunk(stream=stream, offset=at, data=said[at : at + size]))

    async def next(self, *, deadline: float) -> ExecChunk | ExecEnd | None:
        return self._pieces.pop(0) if self._pieces else self._end


def _made(dealt: Dealt) -> bytes:
    lines = [json.dumps(dealt.one_of(_HEADS)).encode()]
    while dealt:
        raw = dealt.byte() % 4 == 0
        lines.append(dealt.piece(64) if raw else json.dumps(dealt.one_of(_ENTRIES)).encode())
    return b"\n".join(lines)


def one_input(data: bytes) -> None:
    """Raises where anything else than a refusal or a break comes out."""
    asyncio.run(_ask(data))


async def _ask(data: bytes) -> None:
    for kind in (Readable, Written, Unpacked, bool, int, None):
        tool = Tool(
            cast("Facade", None), cast("Session", None), cast("ExecReader", Answered(Dealt(data)))
        )  # Nothing is written to it.
        try:
            if kind is None:
                assert len(json.dumps([each.model_dump() for each in await listed(tool)])) < 1 << 20
                continue
            told = await tool.told(kind)
            if isinstance(told, Readable):
                assert told.bytes is None or told.bytes >= 0
            async for _ in tool.content():
                pass
        except Refusal as err:
            assert 0 < len(err.sentence) < 600
        except ConnectionError:
            pass  # It breaks the answer off.
