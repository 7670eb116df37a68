"""What anybody may ask, without a token: it says nothing of what runs here."""

from __future__ import annotations

import importlib.metadata
from http import HTTPStatus
from typing import Final

from aiohttp import web

from forktree.wire import Health
from forktree_agent.http import bodies
from forktree_agent.http.requests import LAST
from forktree_agent.http.table import OpenRoute


async def _health(request: web.Request) -> web.StreamResponse:
    request[LAST] = True  # Nobody who asks this needs a connection for long, and some break when it ends.
    return await bodies.answer(Health(status="ok", version=importlib.metadata.version("forktree")))


ROUTES: Final = (
    OpenRoute(
        path="/health",
        summary="Whether the agent serves, for probes",
        handler=_health,
        answers={HTTPStatus.OK: (Health,)},
    ),
)
