"""Every route of the HTTP API, one table of all.

A path stands under `/ns/{namespace}/v1` and, for the namespace of the caller's own service account, under
`/v1`. What needs no token stands under `/v1` alone.
"""

from __future__ import annotations

from functools import cache
from http import HTTPStatus
from typing import Final

import msgspec
from aiohttp import web

from forktree.kube.client import KubeClient
from forktree_agent.control.facade import Facade
from forktree_agent.http import bodies, openapi
from forktree_agent.http.auth import Gate
from forktree_agent.http.collimate.daemon import DAEMON
from forktree_agent.http.collimate.gateway import GATEWAY
from forktree_agent.http.handlers import (
    batches,
    checkpoints,
    commands,
    files,
    forks,
    health,
    ports,
    sessions,
    states,
    templates,
    terminal,
    trees,
)
from forktree_agent.http.proxying import Proxy
from forktree_agent.http.table import OpenRoute, Parts, Raw, Route, checked
from forktree_agent.http.tree_watching import Watchers
from forktree_agent.http.tunnels import Tunnels

ROUTES: Final[tuple[Route, ...]] = (
    *sessions.ROUTES,
    *commands.ROUTES,
    *terminal.ROUTES,
    *files.ROUTES,
    *ports.ROUTES,
    *forks.ROUTES,
    *trees.ROUTES,
    *states.ROUTES,
    *checkpoints.ROUTES,
    *batches.ROUTES,
    *templates.ROUTES,
)


EXISTING_CLIENTS: Final = openapi.Section(
    tag="existing clients",
    about="What clients of another protocol ask for; docs/existing-clients.md says which. A few paths that it"
    " has in common with this API have further keys in their answers, for both.",
    routes=tuple(
        route
        for route in GATEWAY.routes
        if (route.method, route.path) not in {(each.method, each.path) for each in ROUTES}
    ),
)
"""The daemon's surface is in no document: below a path of its own it has paths of this API that mean
something else there, and most of its callers use a socket."""


async def _openapi(_: web.Request) -> web.Response:
    return bodies.whole(_encoded())


OPEN: Final[tuple[OpenRoute, ...]] = (
    *health.ROUTES,
    OpenRoute(
        path="/openapi.json",
        summary="This document",
        handler=_openapi,
        answers={HTTPStatus.OK: (Raw("application/json"),)},
    ),
)


def document() -> openapi.Json:
    """The OpenAPI document of all that is served."""
    return openapi.document(ROUTES, OPEN, (EXISTING_CLIENTS,))


@cache
def _encoded() -> bytes:
    return msgspec.json.encode(document())


PREFIXES: Final = ("", "/ns/{namespace}")


class Api:
    """All handlers. It holds nothing but what it was given, and the gate's short memory."""

    def __init__(self, client: KubeClient, facade: Facade, proxy: Proxy) -> None:
        self._parts = Parts(
            client=client,
            facade=facade,
            proxy=proxy,
            gate=Gate(client),
            watchers=Watchers(),
            tunnels=Tunnels(),
        )

    def routes(self) -> list[web.RouteDef]:
        """Every path, under each prefix that it has."""
        return [
            # Also below a namespace: existing clients know no other address.
            *(web.get(f"{prefix}/v1{route.path}", route.handler) for route in OPEN for prefix in PREFIXES),
            *(
                web.route(route.method, f"{prefix}/v1{route.served}", checked(route, self._parts))
                for route in ROUTES
                for prefix in PREFIXES
                # The gateway's answer to the same is the native one with further keys.
                if (route.method, route.path) not in GATEWAY.paths
            ),
            *(route for surface in (GATEWAY, DAEMON) for route in surface.declared(self._parts)),
        ]
