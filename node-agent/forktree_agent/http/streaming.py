"""Answers that are sent piece by piece, at the pace at which their reader takes them.

Once such an answer has begun its status is out, so whatever goes wrong later is told in the answer itself: as
a last line (`lines.py`), or by an end that is none, which every client of HTTP notices.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus

from aiohttp import web
from multidict import CIMultiDict

from forktree.errors import ForktreeError
from forktree.wire_exec import StreamError
from forktree_agent.http.errors import Refusal, place_of, refusal_of
from forktree_agent.http.requests import LAST, REQUEST_ID

log = logging.getLogger(__name__)

NDJSON = "application/x-ndjson"

TAKEN_SECONDS = 30.0
"""A reader that takes nothing of a piece for so long is gone, whatever its connection says."""


class Pieces:
    """The answer. Its head is sent with the first of them."""

    def __init__(self, request: web.Request, headers: Mapping[str, str], status: int) -> None:
        self._request = request
        # A name may be there several times.
        self._response = web.StreamResponse(status=status, headers=CIMultiDict(headers))
        self._response.headers["X-Request-Id"] = request[REQUEST_ID]
        if LAST in request:
            self._response.force_close()
        self._is_stuck = False

    @property
    def begun(self) -> bool:
        return self._response.prepared

    async def send(self, data: bytes) -> None:
        """Waits while the reader is behind. Raises `ConnectionError` once it is gone."""
        if self._is_stuck:
            raise ConnectionError("the reader takes nothing")
        try:
            async with asyncio.timeout(TAKEN_SECONDS):
                await self.begin()
                await self._response.write(data)
        except TimeoutError as err:
            self._is_stuck = True
            raise ConnectionError("the reader takes nothing") from err

    async def end(self) -> web.StreamResponse:
        """That was all."""
        await self.begin()
        await self._response.write_eof()
        return self._response

    def break_off(self) -> web.StreamResponse:
        """An end that is none."""
        self._response.force_close()
        if self._request.transport is not None:
            self._request.transport.abort()
        return self._response

    async def begin(self) -> None:
        """Send its head, also where nothing follows for a while."""
        if not self.begun:
            await self._response.prepare(self._request)


async def pieces(
    request: web.Request,
    tell: Callable[[Pieces], Awaitable[None]],
    headers: Mapping[str, str],
    status: int = HTTPStatus.OK,
) -> web.StreamResponse:
    """An answer of bytes, all of which `tell` sends. What it raises is raised before the first of them, and
    breaks the answer off afterwards."""
    out = Pieces(request, headers, status)
    try:
        await tell(out)
        return await out.end()
    except ConnectionError as err:
        log.info("answer_broken_off id=%s error=%s", request[REQUEST_ID], type(err).__name__)
        return out.break_off()
    except Exception as err:
        if not out.begun:
            raise
        if isinstance(err, Refusal | ForktreeError):
            log.info("answer_broken_off id=%s error=%s", request[REQUEST_ID], type(err).__name__)
        else:
            log.error(  # noqa: TRY400  # Its message may quote what was sent.
                "request_crashed id=%s error=%s\n%s", request[REQUEST_ID], type(err).__name__, place_of(err)
            )
        return out.break_off()


def error_of(err: Refusal | ForktreeError) -> StreamError:
    """The same as the last thing that a stream tells."""
    refusal = refusal_of(err)
    return StreamError(
        error=refusal.sentence, error_code=refusal.code, code=refusal.code, message=refusal.sentence
    )
