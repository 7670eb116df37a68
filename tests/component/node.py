"""A node for tests: a real keeper, shim and QEMU under a real engine, in a private state directory."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

from component.keeper_fixtures import running_keeper
from forktree_agent.engine.contract import (
    NO_HOOKS,
    Baseline,
    ChildOrder,
    Command,
    ExecResult,
    ForkResult,
    Hooks,
    Machine,
    Owner,
    Shape,
    TreeId,
    TreeLimits,
)
from forktree_agent.engine.microvm.engine import MicroVmEngine
from forktree_agent.engine.microvm.settings import Egress, EngineSettings
from forktree_agent.keeper_client import Keeper
from forktree_dev.engine_node import engine_over, engine_settings

Thing = TypeVar("Thing")

SECONDS = 120.0
"""How long a test waits for anything before it fails. Emulation on a shared machine is slow."""
CAPACITY_BYTES = 16 << 30
TINY = Shape(image="builtin:tiny", vcpus=1, memory_bytes=128 << 20, overlay_bytes=32 << 20)


def soon() -> float:
    return asyncio.get_running_loop().time() + SECONDS


@dataclass(slots=True)
class Node:
    """An engine and shorthands for what tests ask of it most."""

    engine: MicroVmEngine
    keeper: Keeper
    journal: Path
    keeper_root: str = ""
    """Name of the control group above all of the node's."""
    tree: TreeLimits = field(default_factory=lambda: TreeLimits(tree=TreeId(secrets.token_hex(4))))

    async def baseline(self, shape: Shape = TINY) -> Baseline:
        return await self.engine.bake(shape, deadline=soon())

    async def root(self, shape: Shape = TINY, *, name: str = "root") -> Machine:
        baseline = await self.baseline(shape)
        born = await self.engine.branch(baseline.point, [order(name)], self.tree, deadline=soon())
        return born.children[0]

    async def fork(
        self,
        parent: Machine,
        replicas: int = 1,
        *,
        prefix: str = "child",
        hooks: Hooks = NO_HOOKS,
        answered: bool = True,
    ) -> ForkResult:
        orders = [order(f"{prefix}-{i}") for i in range(replicas)]
        return await self.engine.fork(
            parent.id, owner(), orders, self.tree, hooks=hooks, answered=answered, deadline=soon()
        )

    async def run(self, machine: Machine, *argv: str, timeout_seconds: float = 60) -> ExecResult:
        command = Command(argv=argv, timeout_seconds=timeout_seconds)
        return await self.engine.exec(machine.id, command, deadline=soon())

    async def sh(self, machine: Machine, script: str) -> str:
        """What the script prints. Fails when it fails."""
        result = await self.run(machine, "/bin/sh", "-c", script)
        assert result.exit_code == 0, (result.exit_code, result.stdout, result.stderr)
        return result.stdout.decode()

    async def pid(self, machine: Machine) -> int:
        listing = await self.keeper.listing(deadline=soon())
        return next(entry.pid for entry in listing.machines if entry.machine == machine.id)


def owner() -> Owner:
    return Owner(f"test/{secrets.token_hex(6)}")


def order(hostname: str) -> ChildOrder:
    return ChildOrder(owner=owner(), hostname=hostname, env={"FORKTREE_SESSION": hostname})


def settings(
    *,
    capacity_bytes: int = CAPACITY_BYTES,
    write_tracking: Literal["auto", "pagemap"] = "auto",
    answer_seconds: float = 10.0,
    uid_count: int = 4096,
    ahead: bool = False,
    images: Sequence[str] = ("tiny", "python", "atari"),
    egress: Egress | None = None,
) -> EngineSettings:
    """Without `ahead` nothing is made ahead of forks: whatever the keeper holds is somebody's then."""
    made = engine_settings(images, capacity_bytes=capacity_bytes)
    return dataclasses.replace(
        made,
        write_tracking=write_tracking,
        answer_seconds=answer_seconds,
        uid_count=uid_count,
        egress=egress,
        standbys_per_parent=made.standbys_per_parent if ahead else 0,
        prepared_bytes=made.prepared_bytes if ahead else 0,
    )


@asynccontextmanager
async def engine_on(
    socket_path: Path, journal_path: Path, config: EngineSettings | None = None
) -> AsyncGenerator[Node]:
    """An engine over a keeper that runs already, as a restarted agent would make one: adopted and probed."""
    async with (
        Keeper.connected(socket_path, deadline=soon()) as keeper,
        engine_over(keeper, journal_path, config or settings(), deadline=soon()) as engine,
    ):
        yield Node(engine, keeper, journal_path)


@asynccontextmanager
async def running_node(state_dir: Path, config: EngineSettings | None = None) -> AsyncGenerator[Node]:
    """A keeper and an engine. The keeper's end proves that no process and no control group is left."""
    root = f"forktree-test-{secrets.token_hex(4)}"
    async with (
        running_keeper(state_dir, root) as socket_path,
        engine_on(socket_path, state_dir / "journal", config) as node,
    ):
        node.keeper_root = root
        yield node


async def newcomer(node: Node, before: set[str]) -> int:
    """The process id of the first machine that was not there before. Asks the keeper until there is one."""
    async with asyncio.timeout_at(soon()):
        while True:
            for entry in (await node.keeper.listing(deadline=soon())).machines:
                if entry.machine not in before and entry.exit is None:
                    return entry.pid


@asynccontextmanager
async def held(thing: AbstractAsyncContextManager[Thing]) -> AsyncGenerator[Thing]:
    """Keep `thing` open in a task of its own.

    A fixture's two halves run in different tasks, and a task group must be left in the one that entered it.
    """
    ready: asyncio.Future[Thing] = asyncio.get_running_loop().create_future()
    over = asyncio.Event()

    async def hold() -> None:
        try:
            async with thing as value:
                ready.set_result(value)
                await over.wait()
        except BaseException as err:
            if not ready.done():
                ready.set_exception(err)
            raise

    task = asyncio.create_task(hold(), name="held")
    try:
        yield await ready
    finally:
        over.set()
        await task


async def all_sh(node: Node, machines: Sequence[Machine], script: str) -> list[str]:
    """The same script in several machines at once."""
    return list(await asyncio.gather(*(node.sh(machine, script) for machine in machines)))
