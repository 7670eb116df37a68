"""Answers that come line by line, one JSON object each."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any, cast

from forktree._async.transport import AsyncTransport, Call
from forktree.errors import AnswerLost, UnexpectedAnswer

LINE_BYTES = 8 << 20
"""A longer line is none of this API."""


async def lines_of(
    transport: AsyncTransport, call: Call, *, silence_seconds: float
) -> AsyncGenerator[dict[str, Any]]:
    """Each line as soon as it is whole; one that a broken connection cut off is dropped. Raises
    `ClientError`."""
    rest = bytearray()
    async with transport.streamed(call, silence_seconds=silence_seconds) as response:
        if response.headers.get("Content-Type", "").partition(";")[0] != "application/x-ndjson":
            raise UnexpectedAnswer(f"{call.path} did not answer with lines: the agent is of an older version")
        async for piece in response.aiter_bytes():
            rest += piece
            *lines, tail = rest.split(b"\n")
            rest = tail
            if len(rest) > LINE_BYTES:
                raise UnexpectedAnswer(f"a line of {call.path} has no end within {LINE_BYTES} bytes")
            for line in lines:
                if line.strip():
                    yield _object(line, call)
    if rest:
        raise AnswerLost(f"{call.path} ended in mid-line")


def _object(line: bytes | bytearray, call: Call) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError as err:
        raise UnexpectedAnswer(f"a line of {call.path} is not JSON: {err}") from err
    if not isinstance(found, dict):
        raise UnexpectedAnswer(f"a line of {call.path} is no JSON object")
    return cast("dict[str, Any]", found)
