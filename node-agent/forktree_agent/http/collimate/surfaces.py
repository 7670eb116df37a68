"""What a surface is: routes of this protocol, in front of the handlers that all routes are checked by."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from aiohttp import web

from forktree_agent.http.collimate.sandboxes import Elsewhere, Visit
from forktree_agent.http.errors import Code, Refusal
from forktree_agent.http.proxying import HOP_SECONDS, Errand
from forktree_agent.http.requests import HELD, LAST, REQUEST_ID
from forktree_agent.http.table import Asked, Parts, Route, checked

Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Surface:
    """Some routes that callers with a token reach below one path."""

    below: str
    """Between the namespace and `/v1`."""
    routes: tuple[Route, ...]
    codes: Mapping[Code, Code]
    """What this surface calls errors that the native API calls otherwise."""
    closes: bool = False
    """Each answer is the last of its connection."""

    @property
    def paths(self) -> frozenset[tuple[str, str]]:
        """Methods and paths of its routes."""
        return frozenset((route.method, route.path) for route in self.routes)

    def declared(self, parts: Parts) -> list[web.RouteDef]:
        """Its routes for aiohttp, for a named namespace and for the caller's own."""
        return [
            web.route(
                route.method, f"{prefix}{self.below}/v1{route.path}", self._spoken(checked(route, parts))
            )
            for route in self.routes
            for prefix in ("", "/ns/{namespace}")
        ]

    def _spoken(self, handler: Handler) -> Handler:
        async def speaking(request: web.Request) -> web.StreamResponse:
            if self.closes:
                request[LAST] = True
            try:
                return await handler(request)
            except Refusal as refusal:
                if refusal.code not in self.codes:
                    raise
                raise Refusal(self.codes[refusal.code], refusal.sentence) from refusal

        return speaking


def visit(asked: Asked) -> Visit:
    """The part of a request that is the same for all surfaces."""
    return Visit(
        client=asked.client,
        facade=asked.facade,
        namespace=asked.namespace,
        request_id=asked.request[REQUEST_ID],
        seen=asked.seen,
        held=asked.request[HELD],
    )


def handed_on(
    handler: Callable[[Asked], Awaitable[web.StreamResponse]], below: str = ""
) -> Callable[[Asked], Awaitable[web.StreamResponse]]:
    """`handler`, or the answer of the node that has the session, to the same request."""

    async def handing_on(asked: Asked) -> web.StreamResponse:
        try:
            return await handler(asked)
        except Elsewhere as there:
            return await forwarded(asked, there, below)

    return handing_on


async def forwarded(asked: Asked, there: Elsewhere, below: str = "") -> web.StreamResponse:
    """The answer of another node's agent to the same request. Raises `Refusal`."""
    path = asked.route.path.replace("{session_id}", asked.session_id)
    errand = Errand(
        node=there.node,
        path=f"/ns/{asked.namespace}{below}/v1{path}",
        subject=f"session {asked.session_id}",
        deadline=there.end_by + HOP_SECONDS,
    )
    return await asked.parts.proxy.relay(asked.request, errand)
