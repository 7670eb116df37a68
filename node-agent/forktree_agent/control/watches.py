"""Following this node's objects: each event goes into the stores and the tree, and on to a worker."""

from __future__ import annotations

import logging
from contextlib import aclosing

from forktree.kube.watching import Changed, Deleted, Listed, watch
from forktree.models import Fork, Session, SessionTemplate
from forktree_agent.control.bakes import Bakes
from forktree_agent.control.prune import Pruner
from forktree_agent.control.sweep import Sweep
from forktree_agent.control.world import World

log = logging.getLogger(__name__)


class Watches:
    """One watch for each kind. Once each has listed, the world counts as synced."""

    def __init__(self, world: World, bakes: Bakes, pruner: Pruner, sweep: Sweep) -> None:
        self._world = world
        self._bakes = bakes
        self._pruner = pruner
        self._sweep = sweep
        self._unlisted: set[type[Session] | type[Fork] | type[SessionTemplate]] = {
            Session,
            Fork,
            SessionTemplate,
        }

    async def sessions(self) -> None:
        """Follow this node's sessions. Never ends by itself."""
        await self._follow(Session, f"spec.nodeName={self._world.node}")

    async def forks(self) -> None:
        """Follow this node's forks. Never ends by itself."""
        await self._follow(Fork, f"status.node={self._world.node}")

    async def templates(self) -> None:
        """Follow all templates: few, and each may be asked for here. Never ends by itself."""
        async with aclosing(watch(self._world.client, SessionTemplate)) as events:
            async for event in events:
                match event:
                    case Listed(objects=objects, unreadable=unreadable):
                        await self._bakes.listed(objects, complete=unreadable == 0)
                        self._listed(SessionTemplate)
                    case Changed(obj=template):
                        self._bakes.observed(template)
                    case Deleted(obj=template):
                        self._bakes.deleted(template)

    async def _follow(self, kind: type[Session] | type[Fork], field_selector: str) -> None:
        async with aclosing(watch(self._world.client, kind, field_selector=field_selector)) as events:
            async for event in events:
                match event:
                    case Listed(objects=objects):
                        for item in objects:
                            self._sweep.take_in(item)
                        self._listed(kind)
                        # What is not in the list has gone, or never was: the sweep asks by name.
                        self._world.sweep_wanted.set()
                    case Changed(obj=item):
                        self._sweep.take_in(item)
                    case Deleted(obj=item):
                        self._pruner.left(item)

    def _listed(self, kind: type[Session] | type[Fork] | type[SessionTemplate]) -> None:
        self._unlisted.discard(kind)
        if not self._unlisted and not self._world.synced.is_set():
            log.info(
                "synced sessions=%d forks=%d templates=%d",
                len(self._world.sessions.all()), len(self._world.forks.all()),
                len(self._bakes.templates.all()),
            )  # fmt: skip
            self._world.synced.set()
