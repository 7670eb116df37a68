"""A control plane for the operator alone: nodes here are objects and a Lease that somebody renews.

Apart from the run's other control plane, where a whole system with its own operator and node may be at work.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import sys
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

import pytest

from forktree.kube.access import ClusterAccess
from forktree.kube.client import KubeClient
from forktree.kube.errors import NoRight, NotFound, Unavailable
from forktree.kube.watching import Changed, Deleted, Listed, watch
from forktree.models.base import ApiObject, ObjectMeta
from forktree.models.conditions import Condition, ConditionStatus, ConditionType
from forktree.models.fork import Fork, ForkSource, ForkSpec, SourceRef
from forktree.models.fork_node import ForkNode, ForkNodeStatus
from forktree.models.names import agent_lease_name
from forktree.models.reasons import ForkPhase, SessionPhase
from forktree.models.session import Session, SessionSpec, TemplateRef
from forktree.models.session_template import Machine, SessionTemplate, SessionTemplateSpec
from forktree_dev import ports, provisioning
from forktree_dev.control_plane import ControlPlane
from forktree_dev.processes import Service, boot_id
from forktree_operator.cluster import Lease, LeaseSpec

MIB = 1 << 20
LEASE_SECONDS = 3
"""Of the nodes here: a loss is certain after twice that."""
PATIENCE_SECONDS = 30.0
"""For anything that takes a fraction of a second on a machine that does nothing else."""

ObjectT = TypeVar("ObjectT", bound=ApiObject)


@dataclass(frozen=True, slots=True)
class OperatorProcess:
    """One operator."""

    identity: str
    service: Service

    async def logged(self, word: str, *, seconds: float = PATIENCE_SECONDS) -> None:
        """Wait until its log has `word`. A file tells nobody when it grows, so it is read again and again."""
        async with asyncio.timeout(seconds):
            while word not in self.service.log_tail(1000):  # noqa: ASYNC110
                await asyncio.sleep(0.05)

    async def exit_text(self, *, seconds: float = PATIENCE_SECONDS) -> str:
        """How it ended, in words; fails if it does not end."""
        deadline = asyncio.get_running_loop().time() + seconds
        assert await self.service.ended(deadline=deadline), self.service.log_tail()
        return str(self.service.failure())


class OperatorRig:
    """Makes what the operator decides about, and tells what became of it."""

    def __init__(self, plane: ControlPlane, client: KubeClient, namespace: str, folder: Path) -> None:
        self.plane, self.client, self.namespace = plane, client, namespace
        self._folder = folder
        self._heartbeats: dict[str, asyncio.Task[None]] = {}
        self._nodes: set[str] = set()

    @classmethod
    @asynccontextmanager
    async def running(cls, plane: ControlPlane, folder: Path) -> AsyncGenerator[OperatorRig]:
        """A namespace and nodes of the test's own; both go with it."""
        namespace = f"test-{secrets.token_hex(4)}"
        await plane.kubectl.run("create", "namespace", namespace)
        await provisioning.write_operator_kubeconfig(plane.kubectl, folder / "operator.kubeconfig")
        async with KubeClient.connected(ClusterAccess.discovered(plane.kubeconfig)) as client:
            rig = cls(plane, client, namespace, folder)
            try:
                yield rig
            finally:
                for node in list(rig._nodes):
                    await rig.remove_node(node)
                await plane.kubectl.run("delete", "namespace", namespace, "--wait=false")

    @asynccontextmanager
    async def operator(self, *options: str, name: str = "operator") -> AsyncGenerator[OperatorProcess]:
        """An operator with short times. Ended on leaving, whatever happens."""
        identity = f"{name}-{secrets.token_hex(2)}"
        argv = [
            *(sys.executable, "-m", "forktree_operator"),
            *("--kubeconfig", str(self._folder / "operator.kubeconfig")),
            *("--namespace", provisioning.SYSTEM_NAMESPACE, "--identity", identity),
            *("--lease-seconds", "5", "--sweep-seconds", "2", "--source-exists-seconds", "2"),
            *options,
        ]
        service = Service(identity, argv, self._folder)
        service.start()
        try:
            yield OperatorProcess(identity, service)
        finally:
            await service.stop()

    def kubeconfig_of_nobody(self) -> Path:
        """Of the same cluster, at an address where nothing listens."""
        text = (self._folder / "operator.kubeconfig").read_text()
        (port,) = ports.free(1)
        elsewhere = self._folder / "nobody.kubeconfig"
        elsewhere.write_text(re.sub(r"https://127\.0\.0\.1:\d+", f"https://127.0.0.1:{port}", text))
        return elsewhere

    async def add_node(
        self,
        name: str,
        *,
        capacity_mib: int = 4096,
        reserved_mib: int = 0,
        ready: bool = True,
        boot: str | None = None,
    ) -> None:
        """A Node, its ForkNode, and a Lease that is renewed until `silence`."""
        self._nodes.add(name)
        await provisioning.create_node(self.plane.kubectl, name)
        await self.start_heartbeat(name)
        status = ForkNodeStatus(
            ready=ready,
            capacity_bytes=capacity_mib * MIB,
            reserved_bytes=reserved_mib * MIB,
            boot_id=boot or boot_id(),
        )
        await self.client.create(ForkNode(metadata=ObjectMeta(name=name)))
        await self.set_node(name, status)

    async def set_node(self, name: str, status: ForkNodeStatus) -> None:
        await self.client.merge_patch(
            ForkNode, None, name, {"status": status.to_merge_patch()}, subresource="status"
        )

    async def remove_node(self, name: str) -> None:
        """All of it, as if it had never been."""
        await self.silence(name)
        self._nodes.discard(name)
        await self.plane.kubectl.run("delete", "node,forknode", name, "--ignore-not-found")
        lease = ("delete", "lease", agent_lease_name(name), "--namespace", provisioning.SYSTEM_NAMESPACE)
        await self.plane.kubectl.run(*lease, "--ignore-not-found")

    async def start_heartbeat(self, name: str) -> None:
        """The Lease exists when this returns, and goes on being renewed."""
        await self._renew(name)
        self._heartbeats[name] = asyncio.create_task(self._beat(name), name=f"heartbeat-{name}")

    async def silence(self, name: str) -> None:
        """Renew no more: what the death of an agent looks like."""
        beating = self._heartbeats.pop(name, None)
        if beating is not None:
            beating.cancel()
            await asyncio.wait([beating])

    async def add_template(self, name: str = "tiny", *, memory: str = "256Mi") -> None:
        spec = SessionTemplateSpec(image="builtin:tiny", machine=Machine(memory=memory))
        await self.client.create(SessionTemplate(metadata=self._meta(name), spec=spec))

    async def add_session(self, name: str, *, template: str = "tiny") -> Session:
        spec = SessionSpec(template_ref=TemplateRef(name=template))
        return await self.client.create(Session(metadata=self._meta(name), spec=spec))

    async def add_fork(
        self,
        name: str,
        *,
        session: str | None = None,
        fork: str | None = None,
        uid: str | None = None,
        timeout_seconds: int = 300,
    ) -> Fork:
        source = ForkSource(
            session=SourceRef(name=session, uid=uid) if session else None,
            fork=SourceRef(name=fork, uid=uid) if fork else None,
        )
        spec = ForkSpec(source=source, timeout_seconds=timeout_seconds)
        return await self.client.create(Fork(metadata=self._meta(name), spec=spec))

    async def running_session(self, name: str) -> Session:
        """A session that was placed and then started by its agent, which here is us."""
        await self.add_session(name)
        await self.until(Session, name, lambda session: session.spec.node_name is not None)
        return await self.set_session(name, phase=SessionPhase.RUNNING, ready=True)

    async def set_session(self, name: str, **status: object) -> Session:
        """Write into its status what an agent would."""
        patch = {"status": status}
        return await self.client.merge_patch(Session, self.namespace, name, patch, subresource="status")

    async def set_fork(self, name: str, *, phase: ForkPhase, point: ConditionStatus) -> Fork:
        """Write into its status what an agent would."""
        held = Condition(
            type=ConditionType.POINT_AVAILABLE,
            status=point,
            reason="Test",
            last_transition_time=datetime.now(UTC),
        )
        patch = {"status": {"phase": phase, "conditions": [held.to_json()]}}
        return await self.client.merge_patch(Fork, self.namespace, name, patch, subresource="status")

    async def until_leader(self, identity: str) -> None:
        """Wait until that operator leads."""
        namespace = provisioning.SYSTEM_NAMESPACE
        async with (
            asyncio.timeout(PATIENCE_SECONDS),
            aclosing(watch(self.client, Lease, namespace=namespace)) as events,
        ):
            async for event in events:
                leases = event.objects if isinstance(event, Listed) else (event.obj,)
                if any(lease.spec.holder_identity == identity for lease in leases):
                    return

    async def get(self, model: type[ObjectT], name: str) -> ObjectT:
        return await self.client.get(model, self.namespace, name)

    async def until(
        self,
        model: type[ObjectT],
        name: str,
        wanted: Callable[[ObjectT], bool],
        *,
        seconds: float = PATIENCE_SECONDS,
    ) -> ObjectT:
        """The object once `wanted` holds. Fails with its last state when that takes longer than `seconds`."""
        (found,) = await self.until_all(model, [name], wanted, seconds=seconds)
        return found

    async def until_all(
        self,
        model: type[ObjectT],
        names: Sequence[str],
        wanted: Callable[[ObjectT], bool],
        *,
        seconds: float = PATIENCE_SECONDS,
    ) -> list[ObjectT]:
        """The objects once `wanted` holds for each."""
        last: dict[str, ObjectT] = {}
        try:
            async with (
                asyncio.timeout(seconds),
                aclosing(watch(self.client, model, namespace=self.namespace)) as events,
            ):
                async for event in events:
                    match event:
                        case Listed(objects):
                            last = {each.metadata.name: each for each in objects}
                        case Changed(obj) | Deleted(obj):
                            last[obj.metadata.name] = obj
                    if all(name in last and wanted(last[name]) for name in names):
                        break
        except TimeoutError:
            states = [last[name].to_json() if name in last else name for name in names]
            pytest.fail(f"not within {seconds:g} s: {states[:3]}")
        return [last[name] for name in names]

    def _meta(self, name: str) -> ObjectMeta:
        return ObjectMeta(name=name, namespace=self.namespace)

    async def _beat(self, name: str) -> None:
        while True:
            await asyncio.sleep(LEASE_SECONDS / 6)
            with suppress(Unavailable, NoRight):  # A test may end the API server; a new one refuses at first.
                await self._renew(name)

    async def _renew(self, name: str) -> None:
        spec = LeaseSpec(
            holder_identity=name, lease_duration_seconds=LEASE_SECONDS, renew_time=datetime.now(UTC)
        )
        lease = agent_lease_name(name)
        namespace = provisioning.SYSTEM_NAMESPACE
        try:
            await self.client.merge_patch(Lease, namespace, lease, {"spec": spec.to_json()})
        except NotFound:
            await self.client.create(Lease(metadata=ObjectMeta(name=lease, namespace=namespace), spec=spec))
