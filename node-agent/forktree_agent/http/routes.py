"""Every route of the HTTP API, one table of all.

A path stands under `/ns/{namespace}/v1` and, for the namespace of the caller's own service account, under
`/v1`. What needs no token stands under `/v1` alone.
"""

from __future__ import annotations

from typing import Final

from aiohttp import web

from forktree.kube.client import KubeClient
from forktree_agent.control.facade import Facade
from forktree_agent.http.auth import Gate
from forktree_agent.http.handlers import commands, forks, health, sessions
from forktree_agent.http.proxying import Proxy
from forktree_agent.http.table import OpenRoute, Parts, Route, checked

OPEN: Final[tuple[OpenRoute, ...]] = health.ROUTES

ROUTES: Final[tuple[Route, ...]] = (*sessions.ROUTES, *commands.ROUTES, *forks.ROUTES)


class Api:
    """All handlers. It holds nothing but what it was given, and the gate's short memory."""

    def __init__(self, client: KubeClient, facade: Facade, proxy: Proxy) -> None:
        self._parts = Parts(client=client, facade=facade, proxy=proxy, gate=Gate(client))

    def routes(self) -> list[web.RouteDef]:
        """Every path, under each prefix that it has."""
        return [
            *(web.get(f"/v1{route.path}", route.handler) for route in OPEN),
            *(
                web.route(route.method, f"{prefix}/v1{route.path}", checked(route, self._parts))
                for route in ROUTES
                for prefix in ("", "/ns/{namespace}")
            ),
        ]
