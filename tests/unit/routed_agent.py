"""An agent whose answers go by what is asked, and the command line as a user runs it against one."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import pty
import re
import struct
import sys
import termios
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from unit.agent_server import ScriptedAgent, Seen, info, refuses
from unit.api_server import Answer, says

PREFIX = "/ns/ns/v1"
SECONDS = 60.0
_OWN_ID = re.compile(r"/execs/cli-[0-9a-f]+")


@dataclass
class RoutedAgent(ScriptedAgent):
    """What no answer is given for is not there."""

    answers: dict[str, Answer] = field(default_factory=dict[str, Answer])
    """By `METHOD /path`, below the namespace's prefix. An id that the program chose is `ID`."""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read() if not request.path.endswith("/terminal") else b""
        body = json.loads(raw) if raw and request.content_type == "application/json" else raw or None
        path = _OWN_ID.sub("/execs/ID", request.path.removeprefix(PREFIX))
        self.seen.append(Seen(request.method, path, None, "", body))
        known = self.answers.get(f"{request.method} {path}")
        if known is not None:
            return await known(request)
        code = "no_such_session" if path.startswith("/sessions") else "not_found"
        return await refuses(code, 404, f"there is nothing at {path}")(request)

    def bodies(self, what: str) -> list[Any]:
        """Of all requests of this method and path."""
        return [each.body for each in self.seen if f"{each.method} {each.path}" == what]

    def environment(self) -> dict[str, str]:
        """What a program needs to know to find this agent and no other."""
        kept = {name: value for name, value in os.environ.items() if name in {"PATH", "HOME", "LANG"}}
        return kept | {
            "FORKTREE_URL": self.url,
            "FORKTREE_CA": str(self.ca),
            "FORKTREE_TOKEN": "t",
            "FORKTREE_NAMESPACE": "ns",
            "COLUMNS": "200",
        }


@dataclass(frozen=True)
class Ran:
    """How a run of `forktree` ended."""

    exit_code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        assert self.exit_code == 0, self.err
        return json.loads(self.out)


class Terminal:
    """The side of a terminal at which a person sits; `theirs` is the program's."""

    def __init__(self) -> None:
        self._ours, self.theirs = pty.openpty()
        os.set_blocking(self._ours, False)
        self.shown = b""
        self._more = asyncio.Event()

    def __enter__(self) -> Terminal:
        asyncio.get_running_loop().add_reader(self._ours, self._read)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.get_running_loop().remove_reader(self._ours)
        os.close(self._ours)
        os.close(self.theirs)

    def type(self, keys: bytes) -> None:
        os.write(self._ours, keys)

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    async def shows(self, wanted: bytes) -> None:
        """Wait until it does; what came up to there counts no more."""
        try:
            async with asyncio.timeout(SECONDS):
                while wanted not in self.shown:
                    self._more.clear()
                    await self._more.wait()
            self.shown = self.shown.partition(wanted)[2]
        except TimeoutError as err:
            raise AssertionError(f"the terminal does not show {wanted!r} but {self.shown!r}") from err

    def _read(self) -> None:
        with contextlib.suppress(OSError):
            self.shown += os.read(self._ours, 4096)
        self._more.set()


PROGRAM = (sys.executable, "-m", "forktree_cli")


@asynccontextmanager
async def started(
    environment: dict[str, str], *arguments: str, terminal: Terminal | None = None, stderr: int | None = None
) -> AsyncGenerator[asyncio.subprocess.Process]:
    """It runs in the block, and is gone after it. Without a terminal its output is for the test to read."""
    way = asyncio.subprocess.PIPE if terminal is None else terminal.theirs
    process = await asyncio.create_subprocess_exec(
        *PROGRAM,
        *arguments,
        env=environment,
        stdin=asyncio.subprocess.DEVNULL if terminal is None else way,
        stdout=way,
        stderr=way if stderr is None else stderr,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def forktree(environment: dict[str, str], *arguments: str | Path, stdin: bytes = b"") -> Ran:
    """Run it to its end, with no terminal."""
    process = await asyncio.create_subprocess_exec(
        *PROGRAM,
        *map(str, arguments),
        env=environment,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(SECONDS):
        out, err = await process.communicate(stdin)
    assert process.returncode is not None
    assert b"Traceback" not in err, err.decode()
    return Ran(process.returncode, out.decode(), err.decode())


def lines(*events: dict[str, object]) -> Answer:
    """A stream of these, as NDJSON."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        await response.prepare(request)
        for event in events:
            await response.write(json.dumps(event).encode() + b"\n")
        return response

    return answer


def tree_body(*, names: str = "") -> dict[str, object]:
    """A tree of six sessions: three branches with scores, one pruned by release, a checkpoint, one deeper."""
    sessions = [
        info("root", root="root", baseline_id="base-1", unique_bytes=3 << 20, shared_bytes=90 << 20),
        info("ways-0", parent_session_id="root", depth=1, fork_id="ways", score=0.25, seed="s0",
             unique_bytes=1 << 20, shared_bytes=92 << 20),
        info("ways-1", parent_session_id="root", depth=1, fork_id="ways", score=0.75, seed="s1",
             rewards={"tests": 3.0}, unique_bytes=1536, shared_bytes=92 << 20),
        info("ways-2", parent_session_id="root", depth=1, fork_id="ways", phase="Failed", ready=False,
             reason="ForkFailed"),
        info("deep-0", parent_session_id="ways-0", depth=2, fork_id="deep", phase="Released", ready=False),
        info("deep-1", parent_session_id="ways-0", depth=2, fork_id="deep", score=0.5, phase="Paused"),
    ]  # fmt: skip
    ways = _fork(
        "ways",
        "root",
        [
            _child("ways", 0, branch="greedy", exit_code=0, score=0.25),
            _child("ways", 1, branch="bold", exit_code=3, score=0.75),
            _child("ways", 2, phase="Failed", reason="ForkFailed"),
        ],
    )  # fmt: skip
    deep = _fork("deep", "ways-0", [_child("deep", at) for at in range(2)])
    kept = _fork("kept", "root", []) | {"checkpoint": f"before{names}", "point_bytes": 2 << 20}
    return {
        "root_session_id": "root",
        "sessions": sessions,
        "forks": [ways, deep, kept],
        "totals": {"sessions": 6, "live": 4, "depth": 2, "point_bytes": 2 << 20},
    }


def _child(fork: str, index: int, **more: object) -> dict[str, object]:
    return {"session_id": f"{fork}-{index}", "index": index, "phase": "Running", **more}


def _fork(name: str, parent: str, children: list[dict[str, object]]) -> dict[str, object]:
    return {
        "fork_id": name,
        "parent_session_id": parent,
        "phase": "Complete",
        "ready": True,
        "complete": True,
        "age_secs": 60.0,
        "replicas": len(children),
        "recorded": len(children),
        "point_available": True,
        "children": children,
    }


def tree(**more: str) -> Answer:
    return says(tree_body(**more))
