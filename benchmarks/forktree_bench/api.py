"""The benchmarks as a client of an agent's HTTP API."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Self, TypeVar

import aiohttp

from forktree.wire import Answer, ErrorBody, ExecFinished, SessionCreated, SessionDeleted, SessionForked

AnswerT = TypeVar("AnswerT", bound=Answer)

_SECONDS = 120.0


class Refused(Exception):
    """The agent answered with an error, or a command did not succeed."""


class Api:
    """Sessions of one namespace. Connections are kept, so what is measured has none to make."""

    def __init__(self, http: aiohttp.ClientSession, sessions_url: str) -> None:
        self._http = http
        self._sessions_url = sessions_url

    @classmethod
    @asynccontextmanager
    async def connected(cls, url: str, authority: Path, token: str, namespace: str) -> AsyncGenerator[Self]:
        """`authority`: the PEM file to verify the agent by. `token`: for the audience `forktree.dev`."""
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=ssl.create_default_context(cafile=str(authority)), limit=0),
            headers={"Authorization": f"Bearer {token}"},
            timeout=aiohttp.ClientTimeout(total=_SECONDS),
        ) as http:
            yield cls(http, f"{url}/ns/{namespace}/v1/sessions")

    async def create(self, template: str) -> SessionCreated:
        return await self._ask(SessionCreated, "POST", "", {"template_id": template})

    async def fork(self, session: str, replicas: int) -> SessionForked:
        return await self._ask(SessionForked, "POST", f"/{session}/fork", {"replicas": replicas})

    async def delete(self, session: str) -> None:
        await self._ask(SessionDeleted, "DELETE", f"/{session}", None)

    async def run(self, session: str, *argv: str) -> str:
        """What the command printed. Raises `Refused` unless it exits with 0."""
        body = {"argv": argv, "timeout_seconds": _SECONDS / 2}
        finished = await self._ask(ExecFinished, "POST", f"/{session}/exec", body)
        if finished.exit_code != 0:
            raise Refused(f"{session}: {argv[0]} exited with {finished.exit_code}: {finished.stderr[-300:]}")
        return finished.stdout

    async def run_in_all(self, sessions: Sequence[str], *argv: str) -> list[str]:
        """At once; in the order of the sessions."""
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(self.run(session, *argv)) for session in sessions]
        return [task.result() for task in running]

    async def _ask(
        self, kind: type[AnswerT], method: str, path: str, body: Mapping[str, object] | None
    ) -> AnswerT:
        async with self._http.request(method, f"{self._sessions_url}{path}", json=body) as answer:
            content = await answer.read()
        if answer.status >= 400:
            raise Refused(f"{method} {path}: {ErrorBody.model_validate_json(content).message}")
        return kind.model_validate_json(content)
