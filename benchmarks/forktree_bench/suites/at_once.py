"""Many callers at once, one to a session: how long each waits for its answer. A part of the suite `tree`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

from forktree.models import Fork
from forktree_bench.figures import Figure, Params
from forktree_bench.forks_seen import Milestone
from forktree_bench.report import Report
from forktree_bench.stand import NAMESPACE, Stand
from forktree_bench.suite import Scope

EXEC = Figure(
    name="exec_at_once", clock="POST …/exec sent, all in one moment → answer of each read; client's"
)
FORKS = Figure(
    name="forks_at_once", clock="POST …/fork sent, all in one moment → answer of each read; client's"
)
FORKS_SERVER = Figure(name="forks_at_once_total", clock="POST …/fork seen → its answer written; server's")

PARENTS = 64
EXECS = 200
EXEC_SESSIONS = 32
CREATES_AT_ONCE = 8
GUEST_MB = 128
TEMPLATE = "small"


async def run(stand: Stand, report: Report, scope: Scope) -> None:
    """Sessions of a template of their own: one command in the background of each is all that they run."""
    parents = 8 if scope.quick else PARENTS
    await stand.template(TEMPLATE, {"image": "builtin:tiny", "machine": {"memory": f"{GUEST_MB}Mi"}})
    async with _sessions(stand, parents) as sessions:
        await _execs(stand, report, scope, sessions[: max(1, parents * EXEC_SESSIONS // PARENTS)])
        await _forks(stand, report, sessions)


@asynccontextmanager
async def _sessions(stand: Stand, many: int) -> AsyncGenerator[list[str]]:
    """So many roots that run; deleted again with the block."""
    room = asyncio.Semaphore(CREATES_AT_ONCE)

    async def create() -> str:
        async with room:
            return (await stand.api.create(TEMPLATE)).session_id

    sessions = [await create()]  # It has the template made ready.
    sessions += await _all([create for _ in range(many - 1)])
    try:
        yield sessions
    finally:
        for each in sessions:
            await stand.api.delete(each)


async def _execs(stand: Stand, report: Report, scope: Scope, sessions: list[str]) -> None:
    execs = 20 if scope.quick else EXECS
    params: Params = {"execs": execs, "sessions": len(sessions), "guest_mb": GUEST_MB}
    async with report.part(f"{execs} commands at once", EXEC, **params):
        await stand.api.run_in_all(sessions, "echo", "hello")  # Each guest's first program costs more.
        loop = asyncio.get_running_loop()
        began = loop.time()

        async def ask(session: str) -> float:
            await stand.api.run(session, "echo", "hello")
            return (loop.time() - began) * 1000

        turns = [sessions[turn % len(sessions)] for turn in range(execs)]
        report.add(EXEC, await asyncio.gather(*map(ask, turns)), **params)


async def _forks(stand: Stand, report: Report, sessions: list[str]) -> None:
    params: Params = {"parents": len(sessions), "children": 1, "guest_mb": GUEST_MB}
    async with report.part(f"{len(sessions)} forks at once", FORKS, **params):
        await stand.settled()
        loop = asyncio.get_running_loop()
        began = loop.time()

        async def ask(session: str) -> tuple[str, float, float]:
            forked = await stand.api.fork(session, 1)
            return forked.fork_id, (loop.time() - began) * 1000, forked.total_time_ms

        made = await asyncio.gather(*map(ask, sessions))
        report.add(FORKS, [wall for _, wall, _ in made], **params)
        report.add(FORKS_SERVER, [total for _, _, total in made], **params)
        for fork_id, _, _ in made:
            await stand.forks.when(fork_id, Milestone.RECORDED, deadline=stand.soon())
            await stand.kube.delete(Fork, NAMESPACE, fork_id)


async def _all(makers: list[Callable[[], Awaitable[str]]]) -> list[str]:
    return list(await asyncio.gather(*(make() for make in makers)))
