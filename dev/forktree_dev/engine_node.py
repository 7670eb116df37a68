"""A node's machines without a cluster: a real engine over a real keeper, for tests and benchmarks."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Literal

from forktree_agent.engine.contract import Engine
from forktree_agent.engine.microvm.engine import MicroVmEngine
from forktree_agent.engine.microvm.settings import EngineSettings
from forktree_agent.journal import Journal
from forktree_agent.keeper_client import Keeper, KeeperGone
from forktree_dev import native
from forktree_dev.images import guest_directory
from forktree_dev.processes import Service
from forktree_dev.system import memory_dir, name_of, stop

_KEEPER_SECONDS = 30.0
"""For a keeper to answer."""


def engine_settings(
    images: Sequence[str], *, capacity_bytes: int, accelerator: Literal["auto", "kvm", "tcg"] = "tcg"
) -> EngineSettings:
    """Of an engine with these images. Builds them and the native parts where the cache has none: minutes."""
    return EngineSettings(
        guest_directory=guest_directory(images),
        shim_library=native.shim(),
        memory_limit_bytes=capacity_bytes,
        accelerator=accelerator,
    )


@asynccontextmanager
async def engine_over(
    keeper: Keeper, journal_path: Path, settings: EngineSettings, *, deadline: float
) -> AsyncGenerator[MicroVmEngine]:
    """An engine as a restarted agent would make one: what another left is adopted, the canary has passed."""
    journal = Journal.opened(journal_path, keeper.boot_id)
    async with MicroVmEngine.running(settings, keeper=keeper, journal=journal) as engine:
        await engine.adopt(deadline=deadline)
        found = await engine.probe(deadline=deadline)
        if not found.passed:
            raise RuntimeError(f"this machine cannot run guests: {found.message}")
        yield engine


@asynccontextmanager
async def running_node(
    folder: Path, settings: EngineSettings, *, deadline: float
) -> AsyncGenerator[tuple[Engine, Keeper, Service]]:
    """A keeper of its own, told to end when we do, and an engine. On leaving all machines are ended.

    `folder` gets the keeper's log. `deadline` (loop time) is for the start.
    """
    name = name_of(folder)
    state = memory_dir(name)
    state.mkdir(mode=0o711, parents=True, exist_ok=True)
    command = [sys.executable, "-m", "forktree_keeper", f"--state-dir={state}", f"--cgroup-root={name}"]
    service = Service("keeper", command, folder)
    service.start()
    try:
        async with (
            _connected(service, state / "keeper.sock") as keeper,
            engine_over(keeper, state / "journal", settings, deadline=deadline) as engine,
        ):
            yield engine, keeper, service
    finally:
        await stop(folder)


@asynccontextmanager
async def _connected(service: Service, socket_path: Path) -> AsyncGenerator[Keeper]:
    """The keeper, which is still starting."""
    deadline = asyncio.get_running_loop().time() + _KEEPER_SECONDS
    async with AsyncExitStack() as stack:
        while True:
            try:
                keeper = await stack.enter_async_context(Keeper.connected(socket_path, deadline=deadline))
                break
            except KeeperGone as err:
                if service.pid is None:
                    raise service.failure() from err
                if asyncio.get_running_loop().time() > deadline:
                    raise
            await asyncio.sleep(0.02)  # Whether somebody listens can only be tried.
        yield keeper
