"""Every request as a span, below that of its caller if the caller says so."""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Final

from aiohttp import web
from aiohttp.typedefs import Middleware

from forktree.tracing.context import TRACEPARENT, TRACESTATE, TraceContext, sent, within
from forktree.tracing.spans import Attribute, Clock, Span, SpanKind, Tracer, Value
from forktree_agent.http.requests import REQUEST_ID
from forktree_agent.http.table import NAMESPACE, PARAMETERS, Parameter

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_UNFOLLOWED: Final = "/health"
"""Asked every few seconds by machines, for nobody to look at."""
_ABANDONED: Final = "abandoned"
"""The error of a request whose caller went away."""
_NAMES: Final[tuple[tuple[str, Attribute, Parameter], ...]] = (
    ("namespace", Attribute.NAMESPACE, NAMESPACE),
    ("session_id", Attribute.SESSION, PARAMETERS["session_id"]),
    ("fork_id", Attribute.FORK, PARAMETERS["fork_id"]),
)


def following(tracer: Tracer) -> Middleware:
    """The outermost middleware of a server whose requests are followed."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        route = _route(request)
        if route is None:
            return await handler(request)
        began_at, clock = time.monotonic(), Clock()
        asking = sent(request.headers.getall(TRACEPARENT, ()), request.headers.getall(TRACESTATE, ()))
        context = TraceContext.begun() if asking is None else asking.below()
        status: int | None = None
        try:
            with within(context):
                response = await handler(request)
            status = response.status
        finally:
            tracer.record(
                Span(
                    name=f"{request.method} {route}",
                    context=context,
                    parent=asking,
                    began_ns=clock.at(began_at),
                    ended_ns=clock.at(time.monotonic()),
                    kind=SpanKind.SERVER,
                    attributes=_attributes(request, route, status),
                    error=None if status is not None and status < HTTPStatus.INTERNAL_SERVER_ERROR else "",
                )
            )
        return response

    return middleware


def _route(request: web.Request) -> str | None:
    """The pattern of its path. None: nobody follows it."""
    resource = request.match_info.route.resource
    if resource is None or resource.canonical.endswith(_UNFOLLOWED):
        return None
    return resource.canonical


def _attributes(request: web.Request, route: str, status: int | None) -> dict[Attribute, Value]:
    found: dict[Attribute, Value] = {Attribute.HTTP_METHOD: request.method, Attribute.HTTP_ROUTE: route}
    if REQUEST_ID in request:
        found[Attribute.REQUEST] = request[REQUEST_ID]
    for name, attribute, parameter in _NAMES:
        given = request.match_info.get(name, "")
        if re.fullmatch(parameter.pattern, given):  # What was refused for its name is not repeated here.
            found[attribute] = given
    if status is None:
        found[Attribute.ERROR_TYPE] = _ABANDONED
    else:
        found[Attribute.HTTP_STATUS] = status
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            found[Attribute.ERROR_TYPE] = str(status)
    return found
