"""Answers that hold the output of commands: encoded as they are sent, so that nothing else is held.

As one piece of JSON it would be there several times over: decoded, escaped to six times its size at worst,
and as bytes again, for as long as its reader takes.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator, Mapping

import msgspec
from aiohttp import web

from forktree.wire import Answer
from forktree_agent.http import bodies, streaming
from forktree_agent.http.bodies import PIECE_BYTES
from forktree_agent.http.streaming import Pieces

Texts = Mapping[str, tuple[bytes, ...]]
"""By the key that they are the value of: UTF-8, one after the other, where what is none is replaced."""


def encoded(body: Answer, texts: Texts) -> Iterator[bytes]:
    """`body` as JSON, with `texts` in place of what it says for their keys. It has other keys too."""
    yield bodies.encode(body, exclude=set(texts))[:-1]
    for key, parts in texts.items():
        yield b',%b:"' % msgspec.json.encode(key)
        for part in parts:
            yield from _escaped(part)
        yield b'"'
    yield b"}"


def _escaped(part: bytes) -> Iterator[bytes]:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    view = memoryview(part)
    for at in range(0, len(part), PIECE_BYTES):
        piece = view[at : at + PIECE_BYTES]
        text = decoder.decode(piece, final=at + PIECE_BYTES >= len(part))
        yield msgspec.json.encode(text)[1:-1]


async def answer(request: web.Request, pieces: Iterable[bytes], *, about_bytes: int) -> web.StreamResponse:
    """All of `pieces`, at once where `about_bytes` of output are few."""
    if about_bytes <= PIECE_BYTES:
        return bodies.whole(b"".join(pieces))

    async def tell(out: Pieces) -> None:
        for piece in pieces:
            await out.send(piece)

    return await streaming.pieces(request, tell, {"Content-Type": "application/json"})
