"""Demo and benchmarks as a client of an agent's HTTP API: commands in sessions."""

from __future__ import annotations

import ssl
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Self

import aiohttp

from forktree.wire import ErrorBody, ExecFinished

_SECONDS = 120.0


class Refused(Exception):
    """The agent answered with an error, or a command did not succeed."""


class Commands:
    """Runs commands in the sessions of one namespace. Connections are kept, as many as are needed at once."""

    def __init__(self, http: aiohttp.ClientSession, sessions_url: str) -> None:
        self.http = http
        self.sessions_url = sessions_url

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

    async def run(self, session: str, *argv: str) -> str:
        """What the command printed. Raises `Refused` unless it exits with 0."""
        body = {"argv": argv, "timeout_seconds": _SECONDS / 2}
        async with self.http.post(f"{self.sessions_url}/{session}/exec", json=body) as answer:
            content = await answer.read()
        if answer.status != 200:
            raise Refused(f"{session}: {ErrorBody.model_validate_json(content).message}")
        finished = ExecFinished.model_validate_json(content)
        if finished.exit_code != 0 or finished.truncated:
            ending = "took too long" if finished.timed_out else f"exited with {finished.exit_code}"
            raise Refused(f"{session}: {argv[0]} {ending}: {finished.stderr.strip()[-500:]}")
        return finished.stdout
