"""A small API server that answers as a test scripts it: real HTTP, real sockets, no Kubernetes."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web
from aiohttp.test_utils import TestServer

from forktree.kube.access import ClusterAccess
from forktree.kube.client import KubeClient

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class ScriptedServer:
    """Answers each request with the next entry of `script`; once that is used up, requests hang."""

    script: deque[Answer] = field(default_factory=deque[Answer])
    seen: list[web.Request] = field(default_factory=list[web.Request])
    tokens: deque[str] = field(default_factory=lambda: deque(["token"]))
    """What reading the credentials gives, one after the other; the last one for ever."""
    url: str = ""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.seen.append(request)
        if not self.script:
            await asyncio.Event().wait()
        return await self.script.popleft()(request)

    def read_token(self) -> str:
        return self.tokens.popleft() if len(self.tokens) > 1 else self.tokens[0]

    @asynccontextmanager
    async def client(self, *, timeout_seconds: float = 5.0) -> AsyncGenerator[KubeClient]:
        access = ClusterAccess(self.url, None, self.read_token)
        async with KubeClient.connected(access, timeout_seconds=timeout_seconds) as client:
            yield client

    @classmethod
    @asynccontextmanager
    async def running(cls) -> AsyncGenerator[ScriptedServer]:
        scripted = cls()
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", scripted.answer)
        async with TestServer(app, shutdown_timeout=0.1) as server:
            scripted.url = str(server.make_url(""))
            yield scripted


def says(body: object, code: int = 200, headers: dict[str, str] | None = None) -> Answer:
    """A whole answer, as JSON."""

    async def answer(_: web.Request) -> web.StreamResponse:
        return web.json_response(body, status=code, headers=headers)

    return answer


def refuses(
    code: int, reason: str = "", message: str = "no", headers: dict[str, str] | None = None
) -> Answer:
    return says({"kind": "Status", "code": code, "reason": reason, "message": message}, code, headers)


def streams(*events: object, then: str = "hang", cut: bytes = b"") -> Answer:
    """A watch with these events; then it hangs, ends, or breaks off after the bytes of `cut`."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        response.enable_chunked_encoding()
        await response.prepare(request)
        for event in events:
            await response.write(json.dumps(event).encode() + b"\n")
        if cut:
            await response.write(cut)
        if then == "hang":
            await asyncio.Event().wait()
        if then == "break":
            assert request.transport is not None
            request.transport.abort()
        return response

    return answer


def session(name: str, version: int, **status: object) -> dict[str, object]:
    return {
        "apiVersion": "forktree.dev/v1alpha1",
        "kind": "Session",
        "metadata": {
            "name": name,
            "namespace": "default",
            "uid": f"uid-{name}",
            "resourceVersion": str(version),
        },
        "spec": {"templateRef": {"name": "t"}},
        "status": status,
    }


def event(kind: str, obj: object) -> dict[str, object]:
    return {"type": kind, "object": obj}


def bookmark(version: int) -> dict[str, object]:
    return event("BOOKMARK", {"kind": "Session", "metadata": {"resourceVersion": str(version)}})


def listing(version: int, *items: object, more: str = "") -> Answer:
    return says({"metadata": {"resourceVersion": str(version), "continue": more}, "items": list(items)})
