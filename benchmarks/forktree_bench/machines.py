"""A node's machines, for the suites that measure the engine itself: by its contract, without a cluster."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from forktree_agent.engine.contract import (
    Capability,
    ChildOrder,
    Command,
    Engine,
    ExecResult,
    ForkResult,
    Machine,
    Owner,
    Probe,
    Shape,
    TreeId,
    TreeLimits,
)
from forktree_agent.keeper_client import Keeper
from forktree_bench import guest, host
from forktree_dev.engine_node import engine_settings, running_node

SECONDS = 120.0
"""For any one thing asked of a machine: a hundred emulated ones take half a minute to say a first word."""
CAPACITY_BYTES = 512 << 30
"""Worst case over all machines. More than there is: what they really take is a small part of it."""


class GuestFailed(Exception):
    """A machine's program refused, or its command did not succeed."""


@dataclass(frozen=True, slots=True)
class Node:
    """An engine, and what is asked of it most."""

    engine: Engine
    keeper: Keeper
    keeper_pid: int
    capability: Capability
    folder: Path
    """On a tmpfs."""

    async def root(self, memory_mb: int) -> Machine:
        """A machine whose worker answers. The first of each size boots, which takes seconds."""
        baseline = await self.engine.bake(_shape(memory_mb), deadline=_soon())
        tree = TreeLimits(tree=TreeId(secrets.token_hex(4)))
        born = await self.engine.branch(baseline.point, [_order("root")], tree, deadline=_soon())
        return born.children[0]

    async def fork(self, parent: Machine, replicas: int) -> ForkResult:
        orders = [_order(f"child-{index}") for index in range(replicas)]
        limits = TreeLimits(tree=parent.tree)
        return await self.engine.fork(parent.id, _owner(), orders, limits, deadline=_soon())

    async def run(self, machine: Machine, *argv: str) -> ExecResult:
        """Raises `GuestFailed` unless it exits with 0."""
        command = Command(argv=argv, timeout_seconds=SECONDS)
        result = await self.engine.exec(machine.id, command, deadline=_soon())
        if result.exit_code != 0:
            raise GuestFailed(f"{argv[0]} in {machine.id}: {result.told()}")
        return result

    async def run_in_all(self, machines: Sequence[Machine], *argv: str) -> None:
        """At once. Returns when the last has ended."""
        async with asyncio.TaskGroup() as tasks:
            for machine in machines:
                tasks.create_task(self.run(machine, *argv))

    async def ask(self, machine: Machine, *words: str) -> str:
        """What the worker in `machine` answers."""
        return (await self.run(machine, *guest.ask(*words))).stdout.decode()

    async def steps(self, machine: Machine) -> dict[str, list[float]]:
        """Milliseconds by the guest's clock: what its steps `took`, and how `late` each began."""
        told: dict[str, list[float]] = json.loads(await self.ask(machine, "steps"))
        return told

    async def end(self, *forks: ForkResult) -> None:
        """Release all children and let go of the instants."""
        async with asyncio.TaskGroup() as tasks:
            for forked in forks:
                for child in forked.children:
                    tasks.create_task(self.engine.release(child.id))
        for forked in forks:
            await self.engine.drop_point(forked.point.id)

    async def release(self, machine: Machine) -> None:
        await self.engine.release(machine.id)

    async def pids(self) -> dict[str, int]:
        """Of every process that the keeper holds, by its name there; a machine's is its id."""
        return {entry.machine: entry.pid for entry in (await self.keeper.listing(deadline=_soon())).machines}

    async def pid(self, machine: Machine) -> int:
        return (await self.pids())[machine.id]

    async def settled(self) -> None:
        await host.settled(self.keeper_pid)


@asynccontextmanager
async def running(folder: Path) -> AsyncGenerator[Node]:
    """A keeper and an engine of our own; all machines end with the block. `folder` must be on a tmpfs."""
    # Looking up what is built, and building what is not, blocks for as long as it takes.
    settings = await asyncio.to_thread(
        engine_settings, ("tiny", "python"), capacity_bytes=CAPACITY_BYTES, accelerator="auto"
    )
    async with running_node(folder, settings, deadline=_soon()) as (engine, keeper, service):
        if service.pid is None:
            raise service.failure()
        capability = await engine.probe(deadline=_soon())
        yield Node(engine, keeper, service.pid, capability, folder)


def _shape(memory_mb: int) -> Shape:
    return Shape(
        image="builtin:python",
        vcpus=1,
        memory_bytes=memory_mb << 20,
        overlay_bytes=32 << 20,
        command=("python3", "-c", guest.WORKER),
        probe=Probe(ask=guest.ask("steps"), timeout_seconds=30.0, failure_threshold=120),
    )


def _owner() -> Owner:
    return Owner(f"bench/{secrets.token_hex(6)}")


def _order(hostname: str) -> ChildOrder:
    return ChildOrder(owner=_owner(), hostname=hostname)


def _soon() -> float:
    return asyncio.get_running_loop().time() + SECONDS
