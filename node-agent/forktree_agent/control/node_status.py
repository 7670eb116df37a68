"""What this node says of itself: its ForkNode, and the Lease that shows its agent to be alive."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime

from forktree.errors import ForktreeError
from forktree.kube.client import KubeClient
from forktree.kube.errors import AlreadyExists, NotFound
from forktree.models import Condition, ForkNode, ForkNodeStatus
from forktree.models.conditions import ConditionStatus, ConditionType, replaced
from forktree.models.fork_node import Accelerator, Canary
from forktree.models.names import agent_lease_name
from forktree_agent.control.world import loop_now, wall_now
from forktree_agent.engine.contract import Capability, Engine, Usage
from forktree_agent.settings import Settings

log = logging.getLogger(__name__)

RETRY_SECONDS = 1.0
MATERIAL_SHARE = 1 / 64
"""Of the capacity: a smaller change of what is reserved is not worth a write."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """What does not change while the agent runs."""

    capability: Capability
    probed_at: datetime
    boot_id: str
    version: str
    endpoint: str
    ca_bundle: str


def node_status(facts: NodeFacts, usage: Usage, old: ForkNodeStatus, now: datetime) -> ForkNodeStatus:
    """The status that these facts give. Pure."""
    found = facts.capability
    return ForkNodeStatus(
        ready=found.passed,
        engine=found.engine,
        accelerator=Accelerator(found.accelerator) if found.accelerator else None,
        canary=Canary(
            passed=found.passed,
            reason=found.reason,
            message=found.message,
            at=facts.probed_at,
            boot_ms=round(found.boot_ms, 3),
            fork_ms=round(found.fork_ms, 3),
        ),
        egress=found.egress,
        capacity_bytes=usage.capacity_bytes,
        reserved_bytes=usage.reserved_bytes,
        boot_id=facts.boot_id,
        agent_version=facts.version,
        endpoint=facts.endpoint,
        ca_bundle=facts.ca_bundle,
        conditions=replaced(
            old.conditions,
            Condition(
                type=ConditionType.READY,
                status=ConditionStatus.TRUE if found.passed else ConditionStatus.FALSE,
                reason=found.reason,
                message=found.message,
                last_transition_time=now,
            ),
        ),
    )


def material(told: Usage, usage: Usage) -> bool:
    """Whether a change of use is worth a write: a good part of the node, or to or from nothing at all."""
    if told == usage:
        return False
    if told.capacity_bytes != usage.capacity_bytes or 0 in {told.reserved_bytes, usage.reserved_bytes}:
        return True
    change = abs(told.reserved_bytes - usage.reserved_bytes)
    return change >= usage.capacity_bytes * MATERIAL_SHARE


class NodeReport:
    """Keeps this node's ForkNode true."""

    def __init__(
        self,
        settings: Settings,
        client: KubeClient,
        engine: Engine,
        facts: NodeFacts,
        use_changed: asyncio.Event,
    ) -> None:
        self._settings = settings
        self._client = client
        self._engine = engine
        self._facts = facts
        self._use_changed = use_changed
        self._status = ForkNodeStatus()

    async def run(self) -> None:
        """Report now, and again when the use of memory has changed. Never ends by itself."""
        told: Usage | None = None
        while True:
            self._use_changed.clear()
            usage = self._engine.usage()
            if told is None or material(told, usage):
                try:
                    await self._write(usage)
                    told = usage
                except ForktreeError as err:
                    log.warning("node_not_reported reason=%s error=%r", err.reason, err.message)
                    await asyncio.sleep(RETRY_SECONDS)
                    continue
                await asyncio.sleep(self._settings.usage_report_seconds)
            await self._use_changed.wait()

    async def _write(self, usage: Usage) -> None:
        name, manager = self._settings.node_name, self._settings.field_manager
        status = node_status(self._facts, usage, self._status, wall_now())
        body = {"status": status.to_json()}
        try:
            written = await self._client.apply(
                ForkNode, None, name, body, manager=manager, subresource="status", force=True
            )
        except NotFound:
            await self._client.apply(ForkNode, None, name, {}, manager=manager, force=True)
            written = await self._client.apply(
                ForkNode, None, name, body, manager=manager, subresource="status", force=True
            )
        self._status = written.status
        log.info(
            "node_reported ready=%s accelerator=%s reserved=%d", status.ready, status.accelerator,
            usage.reserved_bytes,
        )  # fmt: skip


class AgentLease:
    """The Lease that this agent renews as long as its event loop turns."""

    def __init__(self, settings: Settings, client: KubeClient) -> None:
        self._settings = settings
        self._client = client
        self._name = agent_lease_name(settings.node_name)
        self._folder = f"/apis/coordination.k8s.io/v1/namespaces/{settings.system_namespace}/leases"

    async def run(self) -> None:
        """Renew for ever. What fails is tried again at once the next time is due."""
        while True:
            due = loop_now() + self._settings.lease_renew_seconds
            try:
                await self._renew(due)
            except ForktreeError as err:
                log.warning("lease_not_renewed reason=%s error=%r", err.reason, err.message)
            await asyncio.sleep(max(RETRY_SECONDS, due - loop_now()))

    async def _renew(self, deadline: float) -> None:
        spec = {
            "holderIdentity": self._settings.node_name,
            "leaseDurationSeconds": self._settings.lease_seconds,
            "renewTime": wall_now().isoformat(timespec="microseconds").replace("+00:00", "Z"),
        }
        path = f"{self._folder}/{self._name}"
        try:
            await self._client.raw(
                "PATCH", path, {"spec": spec}, content_type="application/merge-patch+json", deadline=deadline
            )
        except NotFound:
            lease = {
                "apiVersion": "coordination.k8s.io/v1",
                "kind": "Lease",
                "metadata": {"name": self._name, "namespace": self._settings.system_namespace},
                "spec": spec,
            }
            with suppress(AlreadyExists):  # Made by somebody else meanwhile; the next renewal is ours.
                await self._client.raw("POST", self._folder, lease, deadline=deadline)
