"""Opening a WebSocket of an agent, and hearing why where it does not open."""

from __future__ import annotations

from contextlib import suppress
from typing import Final

import aiohttp
from yarl import URL

from forktree._settings import Reach
from forktree.errors import ClientError, Unreachable, refused

MESSAGE_BYTES: Final = 4 << 20
_BEAT_SECONDS = 15.0
"""A connection over which a ping is not answered so long is dead."""
_SENTENCE_SECONDS = 10.0
_HANDSHAKE: Final = {
    "Connection": "Upgrade",
    "Upgrade": "websocket",
    "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Key": "Zm9ya3RyZWUtcmVmdXNlZA==",
}


async def opened(
    http: aiohttp.ClientSession, reach: Reach, url: URL, what: str
) -> aiohttp.ClientWebSocketResponse:
    """An open one. `what` it gives, for sentences: `terminal`. Raises `ClientError`."""
    headers = {"Authorization": f"Bearer {reach.token}"}
    try:
        return await http.ws_connect(
            url, headers=headers, ssl=reach.tls, heartbeat=_BEAT_SECONDS, max_msg_size=MESSAGE_BYTES
        )
    except aiohttp.WSServerHandshakeError as err:
        raise await _refusal(http, reach, url, what, err.status) from err
    except (aiohttp.ClientError, OSError) as err:
        raise Unreachable(f"no agent can be reached at {reach.url}: {err}") from err


async def _refusal(
    http: aiohttp.ClientSession, reach: Reach, url: URL, what: str, status: int
) -> ClientError:
    """Why it does not open. A handshake that fails tells the status only: ask for the sentence."""
    timeout = aiohttp.ClientTimeout(total=_SENTENCE_SECONDS)
    headers = {"Authorization": f"Bearer {reach.token}", **_HANDSHAKE}
    with suppress(aiohttp.ClientError, OSError, TimeoutError, ValueError, KeyError, TypeError):
        async with http.get(url, headers=headers, ssl=reach.tls, timeout=timeout) as answer:
            if answer.status == status:
                said = await answer.json()
                return refused(str(said["message"]), code=str(said["code"]), status=status)
    return refused(f"the agent gives no {what} (status {status})", code="", status=status)
