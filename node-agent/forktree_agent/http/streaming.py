"""Answers that are sent piece by piece, lines of JSON or bytes, at the pace at which their reader takes them.

Once such an answer has begun its status is out, so whatever goes wrong later is told in the answer itself:
as a last line, or by an end that is none, which every client of HTTP notices.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus

from aiohttp import web
from multidict import CIMultiDict

from forktree.errors import ForktreeError
from forktree.wire import Answer
from forktree.wire_exec import StreamError
from forktree_agent.http import bodies
from forktree_agent.http.errors import Refusal, place_of, refusal_of
from forktree_agent.http.requests import LAST, REQUEST_ID

log = logging.getLogger(__name__)

NDJSON = "application/x-ndjson"

TAKEN_SECONDS = 30.0
"""A reader that takes nothing of a piece for so long is gone, whatever its connection says."""


class Pieces:
    """The answer, once its head is sent."""

    def __init__(self, response: web.StreamResponse) -> None:
        self._response = response

    async def send(self, data: bytes) -> None:
        """Waits while the reader is behind. Raises `ConnectionError` once it is gone."""
        try:
            async with asyncio.timeout(TAKEN_SECONDS):
                await self._response.write(data)
        except TimeoutError as err:
            raise ConnectionError("the reader takes nothing") from err

    async def line(self, body: Answer) -> None:
        await self.send(bodies.encode(body) + b"\n")


async def lines(request: web.Request, tell: Callable[[Pieces], Awaitable[None]]) -> web.StreamResponse:
    """An answer of lines, all of which `tell` sends. What it raises becomes the last one."""

    async def told(pieces: Pieces) -> None:
        try:
            await tell(pieces)
        except (Refusal, ForktreeError) as err:
            await pieces.line(error_of(err))

    return await pieces(request, told, {"Content-Type": NDJSON})


async def pieces(
    request: web.Request,
    tell: Callable[[Pieces], Awaitable[None]],
    headers: Mapping[str, str],
    status: int = HTTPStatus.OK,
) -> web.StreamResponse:
    """An answer of bytes, all of which `tell` sends. What it raises breaks the answer off."""
    # A name may be there several times.
    response = web.StreamResponse(status=status, headers=CIMultiDict(headers))
    response.headers["X-Request-Id"] = request[REQUEST_ID]
    if LAST in request:
        response.force_close()
    await response.prepare(request)
    try:
        await tell(Pieces(response))
        await response.write_eof()
    except (ConnectionError, Refusal, ForktreeError) as err:
        log.info("answer_broken_off id=%s error=%s", request[REQUEST_ID], type(err).__name__)
        _break_off(request, response)
    except Exception as err:
        log.error(  # noqa: TRY400  # Its message may quote what was sent.
            "request_crashed id=%s error=%s\n%s", request[REQUEST_ID], type(err).__name__, place_of(err)
        )
        _break_off(request, response)
    return response


def _break_off(request: web.Request, response: web.StreamResponse) -> None:
    response.force_close()
    if request.transport is not None:
        request.transport.abort()


def error_of(err: Refusal | ForktreeError) -> StreamError:
    """The same as the last thing that a stream tells."""
    refusal = refusal_of(err)
    return StreamError(
        error=refusal.sentence, error_code=refusal.code, code=refusal.code, message=refusal.sentence
    )
