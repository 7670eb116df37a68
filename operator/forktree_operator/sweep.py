"""The sweep: lists what is not decided, asks again, and so repairs what a lost event left behind.

Everything that may let a waiting object go on only calls `soon`. So there is one way in which an object that
had to wait is asked again, and it works just the same when nobody called.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from contextlib import aclosing, suppress
from datetime import UTC, datetime
from typing import Final, TypeVar

from forktree.kube.client import KubeClient
from forktree.kube.errors import KubeError
from forktree.kube.events import Announcer
from forktree.kube.watching import Changed, Deleted, Listed, watch
from forktree.models.fork import Fork
from forktree.models.fork_node import ForkNode
from forktree.models.names import agent_lease_name
from forktree.models.session import Session
from forktree_operator.assigning import AgainSeconds, Assigning
from forktree_operator.cluster import Lease
from forktree_operator.health import Health
from forktree_operator.lifesigns import Lifesigns
from forktree_operator.losses import Losses
from forktree_operator.metrics import Metrics
from forktree_operator.nodes import Nodes
from forktree_operator.reading import readable
from forktree_operator.settings import Settings

log = logging.getLogger(__name__)

UNPLACED: Final = "spec.nodeName="
"""Field selector of the sessions that no node has yet."""
UNROUTED: Final = "status.node="
"""Field selector of the forks that no node has yet."""

_REST_SECONDS: Final = 0.2
"""Shortest rest between two rounds: many events in a row cost one round."""
_REST_SHARE: Final = 4.0
"""And a rest of four times the round's length, so that calls never take over a fifth of one processor."""

AskedT = TypeVar("AskedT", Session, Fork)


class Sweep:
    """One round after the other, each when it is due. All methods belong to one event loop."""

    def __init__(
        self,
        client: KubeClient,
        nodes: Nodes,
        lifesigns: Lifesigns,
        assigning: Assigning,
        settings: Settings,
        *,
        announcer: Announcer,
        metrics: Metrics,
        health: Health,
    ) -> None:
        self._client, self._nodes, self._lifesigns, self._assigning = client, nodes, lifesigns, assigning
        self._losses = Losses(client, nodes, lifesigns, announcer, health)
        self._settings, self._metrics, self._health = settings, metrics, health
        self._called = asyncio.Event()
        self._due = float("-inf")
        self._rested = float("-inf")

    def soon(self, seconds: float = 0.0) -> None:
        """Let the next round begin `seconds` from now, or before if it is due before."""
        due = asyncio.get_running_loop().time() + seconds
        if due < self._due:
            self._due = due
            self._called.set()

    async def run(self) -> None:
        """Rounds for ever."""
        loop = asyncio.get_running_loop()
        while True:
            await self._until_due()
            started = loop.time()
            self._due = started + self._settings.sweep_seconds
            try:
                with self._health.round():
                    again_seconds = await self._round()
            except KubeError as err:
                log.warning("sweep_failed error=%s", err)
                again_seconds = 1.0
            self._metrics.swept(loop.time() - started)
            self._rested = loop.time() + max(_REST_SECONDS, _REST_SHARE * (loop.time() - started))
            if again_seconds is not None:
                self.soon(again_seconds)

    async def look(self) -> None:
        """Take note of all ForkNodes and agents' Leases there are. Raises `KubeError`."""
        self._nodes.relist(await readable(self._client, ForkNode))
        leases = await self._client.list(Lease, self._settings.namespace)
        self._note_leases(leases.items)

    async def follow_leases(self) -> None:
        """Take note of every change of an agent's Lease, for ever."""
        async with aclosing(watch(self._client, Lease, namespace=self._settings.namespace)) as events:
            async for event in events:
                match event:
                    case Listed(objects):
                        if self._note_leases(objects):
                            self.soon()  # As below: a watch that begins again sees it by its list.
                    case Changed(lease) if lease.metadata.name.startswith(agent_lease_name("")):
                        now = asyncio.get_running_loop().time()
                        if self._lifesigns.observe(lease, now, datetime.now(UTC)):
                            self.soon()  # The agent is back: there may be room now.
                    case Changed() | Deleted():
                        pass  # A deletion is silence like any other, and the next round sees it.

    def _note_leases(self, leases: Iterable[Lease]) -> bool:
        """Whether an agent that was silent until now is heard."""
        now = asyncio.get_running_loop().time()
        return self._lifesigns.relist(leases, self._nodes.names(), now, datetime.now(UTC))

    async def _until_due(self) -> None:
        loop = asyncio.get_running_loop()
        while (left_seconds := max(self._due, self._rested) - loop.time()) > 0:
            self._called.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(left_seconds):
                    await self._called.wait()

    async def _round(self) -> AgainSeconds:
        await self.look()
        sessions = await readable(self._client, Session, field_selector=UNPLACED)
        forks = await readable(self._client, Fork, field_selector=UNROUTED)
        first = await self._ask_all(sessions, self._assigning.place_session)
        second = await self._ask_all(forks, self._assigning.route_fork)
        await self._losses.settle()  # Last: a lost node may have a thousand sessions to tell.
        return min((each for each in (first, second) if each is not None), default=None)

    async def _ask_all(
        self, objects: Iterable[AskedT], ask: Callable[[AskedT], Awaitable[AgainSeconds]]
    ) -> AgainSeconds:
        """Ask for each in order, some together. Returns when the first of them wants to be asked again."""
        rest = iter(objects)
        again_seconds: list[float] = []

        async def work() -> None:
            for each in rest:  # Shared: every worker takes the next one.
                try:
                    answer = await ask(each)
                except KubeError as err:
                    name = f"{each.metadata.namespace}/{each.metadata.name}"
                    log.warning("decision_delayed kind=%s name=%s error=%s", each.kind, name, err)
                    answer = 1.0
                self._health.progressed()
                if answer is not None:
                    again_seconds.append(answer)

        async with asyncio.TaskGroup() as workers:
            for number in range(self._settings.requests_in_flight):
                workers.create_task(work(), name=f"sweep-{number}")
        return min(again_seconds, default=None)
