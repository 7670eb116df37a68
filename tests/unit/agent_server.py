"""An agent's HTTP API that answers as a test scripts it: real TLS, real sockets, no agent."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self
from urllib.parse import unquote_plus

from aiohttp import web
from aiohttp.test_utils import TestServer

from forktree import AsyncClient, Client, Retries
from forktree_agent.http.certificates import self_signed
from unit.api_server import Answer, says

SOON = Retries(most=4, first_seconds=0.001)


@dataclass(frozen=True)
class Seen:
    """A request as it came."""

    method: str
    path: str
    key: str | None
    token: str
    body: Any

    @property
    def plain_path(self) -> str:
        """Unescaped, as people read it."""
        return unquote_plus(self.path)


@dataclass
class ScriptedAgent:
    """Answers each request with the next of `script`; once that is used up, requests hang."""

    url: str
    ca: Path
    script: list[Answer] = field(default_factory=list[Answer])
    seen: list[Seen] = field(default_factory=list[Seen])
    _asked: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        self.seen.append(
            Seen(
                request.method,
                request.path_qs,
                request.headers.get("Idempotency-Key"),
                request.headers.get("Authorization", "").removeprefix("Bearer "),
                json.loads(raw) if raw and request.content_type == "application/json" else raw or None,
            )
        )
        async with self._asked:
            self._asked.notify_all()
        if not self.script:
            await asyncio.Event().wait()
        return await self.script.pop(0)(request)

    async def asked(self, times: int) -> None:
        """Wait until so many requests have come."""
        async with asyncio.timeout(20), self._asked:
            await self._asked.wait_for(lambda: len(self.seen) >= times)

    def client(self) -> AsyncClient:
        return AsyncClient(self.url, token="t", ca=self.ca, namespace="ns", retries=SOON)

    def sync_client(self) -> Client:
        return Client(self.url, token="t", ca=self.ca, namespace="ns", retries=SOON)

    @classmethod
    @asynccontextmanager
    async def running(cls, folder: Path) -> AsyncGenerator[Self]:
        identity = await asyncio.to_thread(self_signed, folder, ["127.0.0.1"])
        assert identity.authority is not None
        agent = cls("", identity.authority)
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", agent.answer)
        server = TestServer(app, scheme="https", shutdown_timeout=0.1)
        await server.start_server(ssl=identity.context)
        try:
            agent.url = str(server.make_url("")).rstrip("/")
            yield agent
        finally:
            await server.close()


def refuses(code: str, status: int, message: str = "no", headers: dict[str, str] | None = None) -> Answer:
    body = {"error": message, "error_code": code, "code": code, "message": message}
    return says(body, status, headers)


async def breaks(request: web.Request) -> web.StreamResponse:
    """The answer is lost: the connection is cut when the work is done."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


def breaks_after(sent: bytes) -> Answer:
    """The connection is cut in mid-answer."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        response.enable_chunked_encoding()
        await response.prepare(request)
        await response.write(sent)
        return await breaks(request)

    return answer


def info(name: str, **more: object) -> dict[str, object]:
    return {
        "session_id": name,
        "template_id": "t",
        "phase": "Running",
        "ready": True,
        "age_secs": 1.0,
        "depth": 0,
        **more,
    }


def created(name: str = "s") -> Answer:
    return says({"session_id": name, "template_id": "t", "create_time_ms": 1.0}, 201)


def forked(*children: str, parent: str = "s", fork: str = "f") -> Answer:
    body = {
        "session_id": children[0] if children else None,
        "parent_session_id": parent,
        "template_id": "t",
        "fork_id": fork,
        "recorded": False,
        "total_time_ms": 9.0,
        "fork_time_ms": 5.0,
        "pause_time_ms": 2.0,
        "children": [{"session_id": name, "index": index} for index, name in enumerate(children)],
    }
    return says({key: value for key, value in body.items() if value is not None}, 201)


def finished(stdout: str = "", exit_code: int = 0, **more: object) -> Answer:
    body = {
        "id": "e",
        "stdout": stdout,
        "stderr": "",
        "exit_code": exit_code,
        "timed_out": False,
        "truncated": False,
        "exec_time_ms": 1.0,
        **more,
    }
    return says(body)
