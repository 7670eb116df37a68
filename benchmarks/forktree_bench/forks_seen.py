"""When a watcher saw what of each Fork: the only clock on which objects can be measured from outside."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar, Literal, Self

from forktree.kube.client import KubeClient
from forktree.kube.watching import Changed, Deleted, Listed, watch
from forktree.models import Fork, ForkPhase
from forktree.models.base import ApiModel, ApiObject
from forktree.models.conditions import Condition, ConditionType, holds
from forktree.models.schema import Resource


class Milestone(StrEnum):
    FORKED = "forked"
    """Every child runs."""
    READY = "ready"
    """Every child answered."""
    RECORDED = "recorded"
    """Every child has its object."""


class ForkLost(Exception):
    """A fork failed or was deleted before it came to where it was awaited."""


class _Spec(ApiModel):
    replicas: int = 1


class _Status(ApiModel):
    phase: ForkPhase = ForkPhase.PENDING
    message: str | None = None
    recorded: int | None = None
    pause_ms: float | None = None
    fork_ms: float | None = None
    ready_ms: float | None = None
    total_ms: float | None = None
    conditions: Sequence[Condition] = ()


class SeenFork(ApiObject):
    """As much of a Fork as is looked at: reading all of it would take time from what is measured."""

    resource: ClassVar[Resource] = Fork.resource
    kind: Literal["Fork"] = "Fork"
    spec: _Spec = _Spec()
    status: _Status = _Status()

    @property
    def reached(self) -> set[Milestone]:
        found: set[Milestone] = set()
        if holds(self.status.conditions, ConditionType.FORKED):
            found.add(Milestone.FORKED)
        if holds(self.status.conditions, ConditionType.READY):
            found.add(Milestone.READY)
        if (self.status.recorded or 0) >= self.spec.replicas:
            found.add(Milestone.RECORDED)
        return found


@dataclass(slots=True)
class _Known:
    last: SeenFork | None = None
    at: dict[Milestone, float] = field(default_factory=dict[Milestone, float])
    waiting: dict[Milestone, asyncio.Future[float]] = field(
        default_factory=dict[Milestone, asyncio.Future[float]]
    )


class ForksSeen:
    """One watch of all Forks of a namespace. Times are loop time, when the event had been read."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}
        self._alive: set[str] = set()
        self._none_left = asyncio.Event()
        self._none_left.set()
        self.recorded_children = 0
        """Of all Forks seen so far."""

    @classmethod
    @asynccontextmanager
    async def watching(cls, client: KubeClient, namespace: str) -> AsyncGenerator[Self]:
        """Watches from when the block begins until it ends."""
        seen, listed = cls(), asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(seen._follow(client, namespace, listed), name="forks-seen")
            try:
                await listed.wait()
                yield seen
            finally:
                task.cancel()

    async def when(self, name: str, milestone: Milestone, *, deadline: float) -> float:
        """When the Fork was first seen to be there. Raises `ForkLost`, `TimeoutError`."""
        known = self._known.setdefault(name, _Known())
        if milestone in known.at:
            return known.at[milestone]
        if known.last is not None and known.last.status.phase is ForkPhase.FAILED:
            raise _lost(known.last)
        future = known.waiting.setdefault(milestone, asyncio.get_running_loop().create_future())
        async with asyncio.timeout_at(deadline):
            return await asyncio.shield(future)

    def last(self, name: str) -> SeenFork:
        """As it was last seen. Raises `KeyError` when it never was."""
        known = self._known[name]
        if known.last is None:
            raise KeyError(name)
        return known.last

    async def none_left(self, *, deadline: float) -> None:
        """Wait until every Fork that was seen is deleted. Raises `TimeoutError`."""
        async with asyncio.timeout_at(deadline):
            await self._none_left.wait()

    async def _follow(self, client: KubeClient, namespace: str, listed: asyncio.Event) -> None:
        async with aclosing(watch(client, SeenFork, namespace=namespace)) as changes:
            async for change in changes:
                match change:
                    case Listed(objects=objects):
                        for each in objects:
                            self._observe(each)
                        listed.set()
                    case Changed(obj=obj):
                        self._observe(obj)
                    case Deleted(obj=obj):
                        self._alive.discard(obj.metadata.name)
                        if not self._alive:
                            self._none_left.set()
                        self._fail(obj, ForkLost(f"fork {obj.metadata.name} was deleted"))

    def _observe(self, fork: SeenFork) -> None:
        now = asyncio.get_running_loop().time()
        self._alive.add(fork.metadata.name)
        self._none_left.clear()
        known = self._known.setdefault(fork.metadata.name, _Known())
        before = 0 if known.last is None else known.last.status.recorded or 0
        self.recorded_children += (fork.status.recorded or 0) - before
        known.last = fork
        for milestone in fork.reached - known.at.keys():
            known.at[milestone] = now
            future = known.waiting.pop(milestone, None)
            if future is not None and not future.done():
                future.set_result(now)
        if fork.status.phase is ForkPhase.FAILED:
            self._fail(fork, _lost(fork))

    def _fail(self, fork: SeenFork, why: ForkLost) -> None:
        known = self._known.get(fork.metadata.name)
        if known is not None:
            for future in known.waiting.values():
                if not future.done():
                    future.set_exception(why)
            known.waiting.clear()


def _lost(fork: SeenFork) -> ForkLost:
    return ForkLost(f"fork {fork.metadata.name} has failed: {fork.status.message or 'it does not say why'}")
