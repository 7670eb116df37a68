"""Request bodies in, one clear sentence out where they are wrong; answers as JSON."""

from __future__ import annotations

import asyncio
import io
import json
import zlib
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, TypeVar

from aiohttp import web
from pydantic import BaseModel, TypeAdapter, ValidationError

from forktree.wire import MAX_BODY_BYTES, Answer, ErrorBody, Request
from forktree_agent.http.errors import Code, Refusal, shown
from forktree_agent.http.requests import BODY_HELD, HELD

RequestT = TypeVar("RequestT", bound=Request)

BODY_SECONDS = 15.0
"""A body of the greatest size allowed takes well under a second; a client that drips it holds memory."""

_PLAIN = ("", "identity")
_ENCODINGS = (*_PLAIN, "gzip", "deflate")
"""Others need libraries that a node may not have."""

_COPIES = 3
"""Of a body are held while its request is answered: as it came, decoded, and on its way to a guest."""

PIECE_BYTES = 1 << 16
"""Longer answers are sent in pieces of about this size, each when there is room for it."""

LARGE_ANSWER_BYTES = 1 << 20
"""Encoding takes about 5 ms a MiB, so larger answers are encoded beside the loop that times forks."""


async def read(request: web.Request, model: type[RequestT]) -> RequestT:
    """The body as `model`. An empty body counts as `{}`. Raises `Refusal` with the first thing wrong."""
    return decode(await raw(request), model)


async def raw(request: web.Request) -> bytes:
    """The body, unpacked; the same again where it was read before. Raises `Refusal`."""
    encoding = request.headers.get("Content-Encoding", "").strip().lower()
    if encoding not in _ENCODINGS:
        sentence = "the body's Content-Encoding is not known here: send it plain, or as gzip or deflate"
        raise Refusal(Code.BAD_REQUEST, sentence)
    if request.can_read_body and BODY_HELD not in request:
        known = request.content_length if encoding in _PLAIN else None
        longest = MAX_BODY_BYTES if known is None else min(known, MAX_BODY_BYTES)
        request[HELD].hold(_COPIES * longest, "a body")
        request[BODY_HELD] = True
    try:
        async with asyncio.timeout(BODY_SECONDS):
            sent = await request.read()
    except TimeoutError as err:
        raise Refusal(Code.BAD_REQUEST, f"the body did not arrive within {BODY_SECONDS:g} seconds") from err
    except web.HTTPRequestEntityTooLarge as err:
        raise _too_large() from err
    except web.RequestPayloadError as err:
        sentence = "the body does not end as its Content-Length or its chunks say"
        raise Refusal(Code.BAD_REQUEST, sentence) from err
    return sent if encoding in _PLAIN else unpacked(sent, encoding)


def unpacked(packed: bytes, encoding: str) -> bytes:
    """Never more than the limit is unpacked, however small it was packed."""
    window = 31 if encoding == "gzip" else 15
    if encoding == "deflate" and packed and packed[0] & 0x0F != 8:
        window = -15  # Many clients send no zlib header, whose first byte would end in 8 (RFC 1950).
    unpacking = zlib.decompressobj(window)
    try:
        unpacked = unpacking.decompress(packed, MAX_BODY_BYTES + 1)
    except zlib.error as err:
        raise Refusal(Code.BAD_REQUEST, f"the body is not {encoding}, as its Content-Encoding says") from err
    if len(unpacked) > MAX_BODY_BYTES:
        raise _too_large()
    if not unpacking.eof or unpacking.unused_data:
        raise Refusal(Code.BAD_REQUEST, f"the body is not one whole piece of {encoding}")
    return unpacked


def _too_large() -> Refusal:
    return Refusal(Code.BODY_TOO_LARGE, f"the body is larger than {MAX_BODY_BYTES} bytes")


def decode(raw: bytes, model: type[RequestT]) -> RequestT:
    """`raw` as `model`, or a `Refusal` whose sentence names the key and never repeats a value."""
    raw = raw or b"{}"
    try:
        body = model.model_validate_json(raw)
    except ValidationError as err:
        # Only the sentence goes on: the exception itself holds the input, which may hold secrets.
        refusal = refusal_of(err)
    else:
        json.loads(raw, object_pairs_hook=_each_once)  # Pydantic takes the last of two and says nothing.
        return body
    raise refusal


def _each_once(pairs: list[tuple[str, object]]) -> None:
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            raise Refusal(Code.BAD_REQUEST, f"`{shown(key)}` is given twice")
        seen.add(key)


def refusal_of(error: ValidationError) -> Refusal:
    """The first thing wrong in what was sent, without any value of it."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    key = shown(".".join(str(part) for part in first["loc"]))
    code = Code.BAD_REQUEST
    match first["type"]:
        case "json_invalid":
            sentence = f"the body is not JSON: {first['msg'].removeprefix('Invalid JSON: ')}"
        case "model_type":
            sentence = "the body must be a JSON object"
        case "extra_forbidden":
            sentence = f"unknown key `{key}`"
        case "missing":
            sentence = f"`{key}` is missing"
            if key == "template_id":
                code = Code.TEMPLATE_ID_REQUIRED
        case "value_error":
            text = first["msg"].removeprefix("Value error, ")
            sentence = f"`{key}` {text}" if key else text
        case _:
            sentence = f"`{key}`: {first['msg'][0].lower()}{first['msg'][1:]}"
    return Refusal(code, sentence)


async def answer(body: Answer, status: HTTPStatus = HTTPStatus.OK, *, about_bytes: int = 0) -> web.Response:
    """`body` as JSON without its unset keys. `about_bytes`: the size to expect, where it may be large."""
    if about_bytes < LARGE_ANSWER_BYTES:
        return whole(encode(body), status)
    return whole(await asyncio.to_thread(encode, body), status)


def array(bodies: list[Any], *, headers: Mapping[str, str] | None = None) -> web.Response:
    """A JSON array of answers."""
    return whole(TypeAdapter(list[Any]).dump_json(bodies, exclude_none=True), HTTPStatus.OK, headers)


def refused(refusal: Refusal, headers: Mapping[str, str] | None = None) -> web.Response:
    """The answer that says no."""
    body = ErrorBody(
        error=refusal.sentence, error_code=refusal.code, code=refusal.code, message=refusal.sentence
    )
    return whole(encode(body), refusal.status, headers)


def encode(body: BaseModel, *, exclude: set[str] | None = None) -> bytes:
    return body.model_dump_json(exclude_none=True, exclude=exclude).encode()


def whole(raw: bytes, status: int = HTTPStatus.OK, headers: Mapping[str, str] | None = None) -> web.Response:
    """The answer that is this JSON, sent at the pace at which its reader takes it.

    Written at once it would lie in the buffers of TLS, which tell nobody that the reader is slow: aiohttp
    would hold the answer for sent and the connection for idle, and cut it.
    """
    body = raw if len(raw) <= PIECE_BYTES else io.BytesIO(raw)
    return web.Response(body=body, status=status, content_type="application/json", headers=headers)
