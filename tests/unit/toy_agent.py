"""An agent whose sessions are a text each: forks copy it, commands append to it. Real HTTP, no machines."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from unit.agent_server import ScriptedAgent, created, finished, forked, refuses
from unit.api_server import Answer, says


@dataclass
class ToyAgent(ScriptedAgent):
    """`add X` appends to a session's text, `show` prints it, `fail` fails."""

    texts: dict[str, str] = field(default_factory=dict[str, str])
    """Of all sessions that live."""
    parents: dict[str, str | None] = field(default_factory=dict[str, str | None])
    most: int = 0
    """Sessions that lived at the same time, at most."""
    numbers: itertools.count[int] = field(default_factory=itertools.count)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        parts = request.path.removeprefix("/ns/ns/v1/sessions").strip("/").split("/")
        body: dict[str, Any] = await request.json() if request.can_read_body else {}
        session = parts[0]
        if session and session not in self.texts:
            return await refuses("no_such_session", 404)(request)
        match request.method, parts[1:]:
            case "POST", [] if not session:
                return await created(self._born("", None))(request)
            case "POST", ["fork"]:
                children = [self._born(self.texts[session], session) for _ in range(body["replicas"])]
                return await forked(*children, parent=session)(request)
            case "POST", ["exec"]:
                return await self._run(session, body["argv"])(request)
            case "DELETE", []:
                self._end(session)
                return await says({"deleted": True, "session_id": session})(request)
            case _:
                return await refuses("not_found", 404)(request)

    def _born(self, text: str, parent: str | None) -> str:
        name = f"s{next(self.numbers)}"
        self.texts[name], self.parents[name] = text, parent
        self.most = max(self.most, len(self.texts))
        return name

    def _run(self, session: str, argv: list[str]) -> Answer:
        match argv:
            case ["add", text]:
                self.texts[session] += text
                return finished()
            case ["show"]:
                return finished(self.texts[session])
            case _:
                return finished(exit_code=1)

    def _end(self, session: str) -> None:
        del self.texts[session]
        for child in [name for name, parent in self.parents.items() if parent == session]:
            if child in self.texts:
                self._end(child)
