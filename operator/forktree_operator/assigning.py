"""Carries out where sessions and forks go: asks for a decision, writes it, asks again after a conflict."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Final, TypeVar

from forktree.kube.client import KubeClient
from forktree.kube.errors import Conflict, NotFound
from forktree.kube.events import Announcer, Subject
from forktree.models.base import Uid
from forktree.models.fork import Fork
from forktree.models.names import BORN_ON_ANNOTATION
from forktree.models.reasons import EventReason, Reason
from forktree.models.session import Session
from forktree_operator import patches
from forktree_operator.decide.actions import Ignore, Place, Reject, Wait
from forktree_operator.decide.agents import AgentState
from forktree_operator.decide.placement import baked_on, baseline, brings_baseline, needed, place
from forktree_operator.decide.routing import Patience, route, wanted
from forktree_operator.lifesigns import Lifesigns
from forktree_operator.metrics import Metrics
from forktree_operator.nodes import BAKE_PROMISE_SECONDS, PROMISE_SECONDS, Nodes
from forktree_operator.templates import Templates
from forktree_operator.traces import Traces

log = logging.getLogger(__name__)

_TRIES: Final = 5
"""Conflicts on one object in a row, after which the next sweep goes on. Two are already rare."""

AssignedT = TypeVar("AssignedT", Session, Fork)
AgainSeconds = float | None
"""When to ask again; None: an event or the next sweep is soon enough, or nothing is left to do."""


class Assigning:
    """Decides and writes, for one object at a time each, a bounded number together.

    Both methods raise `KubeError`; the object is then as it was, or as decided if the answer was lost.
    """

    def __init__(
        self,
        client: KubeClient,
        templates: Templates,
        nodes: Nodes,
        lifesigns: Lifesigns,
        *,
        patience: Patience,
        requests_in_flight: int,
        metrics: Metrics,
        traces: Traces,
        announcer: Announcer,
    ) -> None:
        self._client, self._templates, self._nodes, self._lifesigns = client, templates, nodes, lifesigns
        self._patience = patience
        self._metrics, self._traces, self._announcer = metrics, traces, announcer
        self._slots = asyncio.Semaphore(requests_in_flight)
        self._busy: set[Uid] = set()

    async def place_session(self, session: Session) -> AgainSeconds:
        """Give a root session its node, or say in its status why it waits."""
        return await self._until_it_holds(session, self._place_once)

    async def route_fork(self, fork: Fork) -> AgainSeconds:
        """Give a fork the node of its source, fail it, or say in its status why it waits."""
        return await self._until_it_holds(fork, self._route_once)

    async def _until_it_holds(
        self, assigned: AssignedT, once: Callable[[AssignedT], Awaitable[AgainSeconds]]
    ) -> AgainSeconds:
        uid, namespace, name = assigned.metadata.uid, assigned.metadata.namespace, assigned.metadata.name
        if uid in self._busy:  # An event and a sweep met. Whoever came first knows as much.
            return None
        async with self._slot(uid):
            for _ in range(_TRIES):
                try:
                    return await once(assigned)
                except Conflict:
                    log.debug("conflict kind=%s name=%s/%s", assigned.kind, namespace, name)
                except NotFound:
                    return None
                try:
                    assigned = await self._client.get(type(assigned), namespace, name)
                except NotFound:
                    return None
        return 1.0

    @asynccontextmanager
    async def _slot(self, uid: Uid) -> AsyncGenerator[None]:
        self._busy.add(uid)
        try:
            async with self._slots:
                yield
        finally:
            self._busy.discard(uid)

    async def _place_once(self, session: Session) -> AgainSeconds:
        if session.spec.template_ref is None:
            return None
        metadata, began_at = session.metadata, time.monotonic()
        template = await self._templates.get(metadata.namespace or "", session.spec.template_ref.name)
        now = asyncio.get_running_loop().time()
        rooms = self._nodes.rooms(now)
        match place(session, template, rooms):
            case Place(node):
                assert template is not None  # There is no place for what has no known size.
                # Promised before the write is sent: the next decision is made while this one is under way.
                promises = {metadata.uid: needed(template)}
                if any(room.name == node and brings_baseline(room, template) for room in rooms):
                    # First, as the agent counts it first.
                    promises = {template.metadata.uid: baseline(template), **promises}
                until = now + (PROMISE_SECONDS if baked_on(node, template) else BAKE_PROMISE_SECONDS)
                for holder, memory_bytes in promises.items():
                    self._nodes.promise(node, holder, memory_bytes, until=until)
                try:
                    patch = patches.place(session, node)
                    await self._client.merge_patch(Session, metadata.namespace, metadata.name, patch)
                except BaseException:
                    self._nodes.withdraw(node, *promises)
                    raise
                self._metrics.placed(metadata)
                self._traces.decided(session, began_at, node=node)
                self._announcer.say(Subject.of(session), EventReason.SCHEDULED, f"it goes to node {node}")
                log.info("placed session=%s/%s node=%s", metadata.namespace, metadata.name, node)
            case Wait(reason, message, again_seconds):
                await self._wait(session, reason, message)
                return again_seconds
            case Ignore():
                pass
        return None

    async def _route_once(self, fork: Fork) -> AgainSeconds:
        began_at, born_on = time.monotonic(), fork.metadata.annotations.get(BORN_ON_ANNOTATION)
        source = await self._source(fork) if born_on is None else None
        agent = self._agent_of(source) if born_on is None else self._agent_state(born_on)
        match route(fork, source, agent, _now(), self._patience):
            case Place(node):
                await self._write_status(fork, patches.route(fork, node))
                self._metrics.routed(fork.metadata)
                self._traces.decided(fork, began_at, node=node)
                log.info("routed fork=%s/%s node=%s", fork.metadata.namespace, fork.metadata.name, node)
            case Reject(reason, message):
                await self._write_status(fork, patches.fail_fork(fork, reason, message, _now()))
                self._metrics.rejected(reason)
                self._traces.decided(fork, began_at, rejected=(reason, message))
                self._announcer.say(Subject.of(fork), EventReason.FAILED, f"{reason}: {message}")
                name = f"{fork.metadata.namespace}/{fork.metadata.name}"
                log.info("rejected fork=%s reason=%s message=%s", name, reason, message)
            case Wait(reason, message, again_seconds):
                await self._wait(fork, reason, message)
                return again_seconds
            case Ignore():
                pass
        return None

    async def _wait(self, waiting: Session | Fork, reason: Reason | None, message: str) -> None:
        """Say why it waits. In an Event once for each reason: a sentence may have numbers that change."""
        await self._write_status(waiting, patches.wait(waiting, reason, message))
        if reason is not None and waiting.status.reason is not reason:
            note = message if reason is Reason.UNSCHEDULED else f"{reason}: {message}"
            self._announcer.say(Subject.of(waiting), EventReason.UNSCHEDULED, note)

    async def _source(self, fork: Fork) -> Session | Fork | None:
        source = wanted(fork)
        try:
            return await self._client.get(source.kind, fork.metadata.namespace, source.name)
        except NotFound:
            return None

    def _agent_of(self, source: Session | Fork | None) -> AgentState:
        node = (
            source.spec.node_name if isinstance(source, Session) else source.status.node if source else None
        )
        return self._agent_state(node) if node else AgentState.STALE

    def _agent_state(self, node: str) -> AgentState:
        return self._lifesigns.state(node, asyncio.get_running_loop().time())

    async def _write_status(self, written: Session | Fork, patch: patches.Patch | None) -> None:
        if patch is not None:
            metadata = written.metadata
            await self._client.merge_patch(
                type(written), metadata.namespace, metadata.name, patch, subresource="status"
            )


def _now() -> datetime:
    return datetime.now(UTC)
