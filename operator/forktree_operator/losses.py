"""Tells the sessions and forks of a silent agent or a lost node what became of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from datetime import UTC, datetime

from forktree.kube.client import KubeClient
from forktree.kube.errors import Conflict, KubeError, NotFound
from forktree.kube.events import Announcer, Subject
from forktree.models.fork import Fork
from forktree.models.reasons import EventReason, Reason
from forktree.models.session import Session
from forktree_operator import patches
from forktree_operator.cluster import Node
from forktree_operator.decide.agents import AgentState
from forktree_operator.decide.node_loss import (
    Doubt,
    Fail,
    LosePoint,
    NodeFacts,
    Verdict,
    for_fork,
    for_session,
    sentence,
    verdict,
)
from forktree_operator.health import Health
from forktree_operator.lifesigns import Lifesigns
from forktree_operator.nodes import Nodes
from forktree_operator.reading import readable

log = logging.getLogger(__name__)


class Losses:
    """Asks what became of the nodes whose agents are lost, and writes what that means. Holds nothing."""

    def __init__(
        self,
        client: KubeClient,
        nodes: Nodes,
        lifesigns: Lifesigns,
        announcer: Announcer,
        health: Health,
    ) -> None:
        self._client, self._nodes, self._lifesigns = client, nodes, lifesigns
        self._announcer, self._health = announcer, health

    async def settle(self) -> None:
        """One look at all nodes. What could not be written is written the next time. Raises `KubeError`."""
        now = asyncio.get_running_loop().time()
        for name in self._nodes.names():
            if self._lifesigns.state(name, now) is AgentState.LOST:
                await self._settle_node(name)

    async def _settle_node(self, name: str) -> None:
        facts = await self._facts(name)
        reached = verdict(AgentState.LOST, facts, self._nodes.boot_id(name))
        message = sentence(reached, name, facts)
        sessions = await readable(self._client, Session, field_selector=f"spec.nodeName={name}")
        written = await self._write_all(sessions, reached, message)
        if reached is Verdict.NODE_LOST:
            forks = await readable(self._client, Fork, field_selector=f"status.node={name}")
            written += await self._write_all(forks, reached, message)
            if not written:
                self._nodes.bury(name)
        if written:
            log.warning("node_unreachable node=%s verdict=%s objects=%d", name, reached, written)

    async def _facts(self, name: str) -> NodeFacts | None:
        try:
            node = await self._client.get(Node, None, name)
        except NotFound:
            return None
        return NodeFacts(node.status.node_info.boot_id)

    async def _write_all(self, objects: Iterable[Session | Fork], reached: Verdict, message: str) -> int:
        """Returns how many were not yet told."""
        untold = 0
        for each in objects:
            self._health.progressed()
            patch = _patch(each, reached, message)
            if patch is not None:
                untold += 1
                written = await self._write(each, patch)
                lost = written and reached is Verdict.NODE_LOST
                if lost and isinstance(each, Session) and each.spec.is_root:
                    # One for a tree: it may have a thousand sessions.
                    self._announcer.say(Subject.of(each), EventReason.NODE_LOST, message)
        return untold

    async def _write(self, told: Session | Fork, patch: patches.Patch) -> bool:
        metadata = told.metadata
        try:
            await self._client.merge_patch(
                type(told), metadata.namespace, metadata.name, patch, subresource="status"
            )
        except (Conflict, NotFound):
            return False  # The agent wrote, so it lives; or the object is gone. The next sweep looks again.
        except KubeError as err:
            if err.retryable:
                raise
            # One object that cannot be told, by a policy say, must not keep the others from being told.
            log.warning(
                "not_told kind=%s name=%s/%s error=%s", told.kind, metadata.namespace, metadata.name, err
            )
            return False
        return True


def _patch(told: Session | Fork, reached: Verdict, message: str) -> patches.Patch | None:
    now = datetime.now(UTC)
    if isinstance(told, Fork):
        match for_fork(told, reached):
            case None:
                return None
            case Fail():
                return patches.fail_fork(told, Reason.NODE_LOST, message, now)
            case LosePoint():
                return patches.lose_point(told, message, now)
    match for_session(told, reached):
        case None:
            return None
        case Doubt():
            return patches.doubt(told, message, now)
        case Fail():
            return patches.fail_session(told, Reason.NODE_LOST, message, now)
