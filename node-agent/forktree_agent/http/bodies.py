"""Request bodies in, one clear sentence out where they are wrong; answers as JSON."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any, TypeVar

from aiohttp import web
from pydantic import BaseModel, TypeAdapter, ValidationError

from forktree.wire import MAX_BODY_BYTES, Answer, Request
from forktree_agent.http.errors import Code, Refusal

RequestT = TypeVar("RequestT", bound=Request)

BODY_SECONDS = 15.0
"""A body of the greatest size allowed takes well under a second; a client that drips it holds memory."""

LARGE_ANSWER_BYTES = 1 << 20
"""Encoding takes about 5 ms a MiB, so larger answers are encoded beside the loop that times forks."""


async def read(request: web.Request, model: type[RequestT]) -> RequestT:
    """The body as `model`. An empty body counts as `{}`. Raises `Refusal` with the first thing wrong."""
    try:
        async with asyncio.timeout(BODY_SECONDS):
            raw = await request.read()
    except TimeoutError as err:
        raise Refusal(Code.BAD_REQUEST, f"the body did not arrive within {BODY_SECONDS:g} seconds") from err
    except web.HTTPRequestEntityTooLarge as err:
        raise Refusal(Code.BODY_TOO_LARGE, f"the body is larger than {MAX_BODY_BYTES} bytes") from err
    return decode(raw, model)


def decode(raw: bytes, model: type[RequestT]) -> RequestT:
    """`raw` as `model`, or a `Refusal` whose sentence names the key and never repeats a value."""
    try:
        return model.model_validate_json(raw or b"{}")
    except ValidationError as err:
        # Only the sentence goes on: the exception itself holds the input, which may hold secrets.
        refusal = _refusal(err)
    raise refusal


def _refusal(error: ValidationError) -> Refusal:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    key = ".".join(str(part) for part in first["loc"])
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
        return _json(encode(body), status)
    return _json(await asyncio.to_thread(encode, body), status)


def array(bodies: list[Any], status: HTTPStatus = HTTPStatus.OK) -> web.Response:
    """A JSON array of answers."""
    return _json(TypeAdapter(list[Any]).dump_json(bodies, exclude_none=True), status)


def encode(body: BaseModel) -> bytes:
    return body.model_dump_json(exclude_none=True).encode()


def _json(raw: bytes, status: HTTPStatus) -> web.Response:
    return web.Response(body=raw, status=status, content_type="application/json")
