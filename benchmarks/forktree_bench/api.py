"""The benchmarks as a client of an agent's HTTP API."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TypeVar

from forktree.wire import Answer, ErrorBody, SessionCreated, SessionDeleted, SessionForked
from forktree_dev.commands import Commands, Refused

AnswerT = TypeVar("AnswerT", bound=Answer)


class Api(Commands):
    """Sessions of one namespace, and the commands in them."""

    async def create(self, template: str) -> SessionCreated:
        return await self._ask(SessionCreated, "POST", "", {"template_id": template})

    async def fork(self, session: str, replicas: int) -> SessionForked:
        return await self._ask(SessionForked, "POST", f"/{session}/fork", {"replicas": replicas})

    async def delete(self, session: str) -> None:
        await self._ask(SessionDeleted, "DELETE", f"/{session}", None)

    async def run_in_all(self, sessions: Sequence[str], *argv: str) -> list[str]:
        """At once; in the order of the sessions."""
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(self.run(session, *argv)) for session in sessions]
        return [task.result() for task in running]

    async def _ask(
        self, kind: type[AnswerT], method: str, path: str, body: Mapping[str, object] | None
    ) -> AnswerT:
        async with self.http.request(method, f"{self.sessions_url}{path}", json=body) as answer:
            content = await answer.read()
        if answer.status >= 400:
            raise Refused(f"{method} {path}: {ErrorBody.model_validate_json(content).message}")
        return kind.model_validate_json(content)
