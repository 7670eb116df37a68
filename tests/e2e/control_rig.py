"""Control of one invented node on a real API server, with an engine that has no machines.

What it shows is what control writes and ends, and when; that machines really fork is shown elsewhere.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from forktree.kube.access import ClusterAccess
from forktree.kube.client import KubeClient, Propagation
from forktree.kube.errors import NotFound
from forktree.models import Fork, ForkSpec, ObjectMeta, Session, SessionSpec, SessionTemplate, Uid
from forktree.models.fork import ForkSource, SourceRef
from forktree.models.session import TemplateRef
from forktree.models.session_template import SessionTemplateSpec, TreeLimits
from forktree_agent.control.control import Control
from forktree_agent.journal import Journal
from forktree_agent.metrics import Metrics
from forktree_agent.settings import Settings
from forktree_dev import provisioning
from forktree_dev.control_plane import ControlPlane
from unit.fake_engine import FakeEngine, FakeHost

Kind = TypeVar("Kind", Session, Fork, SessionTemplate)

WAIT_SECONDS = 20.0
BOOT = "one-boot"


class ControlRig:
    """A node, its machines, and users of the API. `control` runs between `start` and `stop`."""

    def __init__(
        self, namespace: str, folder: Path, user: KubeClient, agent: KubeClient, operator: KubeClient
    ) -> None:
        self.namespace = namespace
        self.folder = folder
        self.user = user
        self.agent = agent
        self.operator = operator
        self.host = FakeHost()
        self.engine = FakeEngine(self.host)
        self.settings = Settings(
            node_name="",
            state_directory=folder,
            guest_directory=folder,
            shim_library=folder,
            capacity_wait_seconds=5.0,
        )
        self.control: Control | None = None
        self._running: AsyncExitStack | None = None

    @classmethod
    @asynccontextmanager
    async def running(cls, plane: ControlPlane, namespace: str, folder: Path) -> AsyncGenerator[ControlRig]:
        """A node of its own, with control running on it."""
        node = f"control-{secrets.token_hex(4)}"
        await provisioning.create_node(plane.kubectl, node)
        await provisioning.write_agent_kubeconfig(plane.kubectl, node, folder / "agent.kubeconfig")
        await provisioning.write_operator_kubeconfig(plane.kubectl, folder / "operator.kubeconfig")
        async with (
            # Patient: what a busy machine makes slow is not what these tests are about.
            KubeClient.connected(ClusterAccess.from_kubeconfig(plane.kubeconfig), timeout_seconds=60) as user,
            KubeClient.connected(ClusterAccess.from_kubeconfig(folder / "agent.kubeconfig")) as agent,
            KubeClient.connected(ClusterAccess.from_kubeconfig(folder / "operator.kubeconfig")) as operator,
        ):
            rig = cls(namespace, folder, user, agent, operator)
            rig.settings = replace(rig.settings, node_name=node)
            await rig.template("tiny")
            await rig.start()
            try:
                yield rig
            finally:
                await rig.stop()
                await plane.kubectl.run("delete", "node", node)

    async def start(self, client: KubeClient | None = None) -> None:
        """Control begins, as after a restart of the agent: with this journal and these machines."""
        journal = Journal.opened(self.folder / "journal", BOOT)
        adoption = await self.engine.adopt(deadline=0)
        self._running = AsyncExitStack()
        self.control = await self._running.enter_async_context(
            Control.running(
                self.settings,
                client=client or self.agent,
                engine=self.engine,
                journal=journal,
                adoption=adoption,
                metrics=Metrics(),
            )
        )

    async def stop(self) -> None:
        """Control ends as when the agent is told to stop. Machines stay."""
        if self._running is not None:
            running, self._running = self._running, None
            await running.aclose()

    async def restart(self) -> None:
        """Another agent takes over."""
        await self.stop()
        old = self.engine
        self.engine = FakeEngine(self.host, capacity=old.capacity, hook=old.hook)
        await self.start()

    # What users do ----------------------------------------------------------------------------------------

    async def template(
        self, name: str, *, limits: TreeLimits | None = None, standby: int = 0
    ) -> SessionTemplate:
        return await self.user.create(
            SessionTemplate(
                metadata=ObjectMeta(name=name, namespace=self.namespace),
                spec=SessionTemplateSpec(
                    image=f"builtin:{name}", tree_limits=limits or TreeLimits(), standby=standby
                ),
            )
        )

    async def session(self, name: str, template: str = "tiny") -> Session:
        """A root that the operator has placed here."""
        created = await self.user.create(
            Session(
                metadata=ObjectMeta(name=name, namespace=self.namespace),
                spec=SessionSpec(template_ref=TemplateRef(name=template)),
            )
        )
        body = {"spec": {"nodeName": self.settings.node_name}}
        return await self.operator.merge_patch(Session, self.namespace, created.metadata.name, body)

    async def running_session(self, name: str, template: str = "tiny") -> Session:
        await self.session(name, template)
        return await self.until(Session, name, lambda each: each.status.ready)

    async def fork(
        self,
        name: str,
        *,
        session: str | None = None,
        fork: str | None = None,
        replicas: int = 1,
        **more: Uid,
    ) -> Fork:
        """A Fork that the operator has routed here."""
        source = ForkSource(
            session=None if session is None else SourceRef(name=session, uid=more.get("uid")),
            fork=None if fork is None else SourceRef(name=fork, uid=more.get("uid")),
        )
        created = await self.user.create(
            Fork(
                metadata=ObjectMeta(name=name, namespace=self.namespace),
                spec=ForkSpec(source=source, replicas=replicas),
            )
        )
        return await self.route(created)

    async def branched(self, name: str, spec: ForkSpec) -> Fork:
        """A Fork of whatever spec that the operator has routed here."""
        metadata = ObjectMeta(name=name, namespace=self.namespace)
        return await self.route(await self.user.create(Fork(metadata=metadata, spec=spec)))

    async def route(self, fork: Fork) -> Fork:
        body = {"status": {"node": self.settings.node_name}}
        return await self.operator.merge_patch(
            Fork, self.namespace, fork.metadata.name, body, subresource="status"
        )

    async def forked(
        self, name: str, *, session: str | None = None, fork: str | None = None, replicas: int = 1
    ) -> list[Session]:
        """Fork, wait until all children are ready, and return them in order of their index."""
        await self.fork(name, session=session, fork=fork, replicas=replicas)
        done = await self.until(Fork, name, lambda each: each.status.recorded == replicas)
        names = [child.name for child in done.status.children]
        return [await self.until(Session, each, lambda child: child.status.ready) for each in names]

    async def delete(
        self, kind: type[Session] | type[Fork], name: str, propagation: Propagation | None = None
    ) -> None:
        await self.user.delete(kind, self.namespace, name, propagation=propagation)

    # What users see ---------------------------------------------------------------------------------------

    async def get(self, kind: type[Kind], name: str) -> Kind:
        return await self.user.get(kind, self.namespace, name)

    async def until(self, kind: type[Kind], name: str, there: Callable[[Kind], bool]) -> Kind:
        """The object once `there` holds. Fails with what it was instead."""
        found = await self.get(kind, name)
        deadline = asyncio.get_running_loop().time() + WAIT_SECONDS
        while not there(found):
            assert asyncio.get_running_loop().time() < deadline, found.status
            await asyncio.sleep(0.02)
            found = await self.get(kind, name)
        return found

    async def gone(self, kind: type[Session] | type[Fork], name: str) -> None:
        deadline = asyncio.get_running_loop().time() + WAIT_SECONDS
        while True:
            try:
                await self.user.get(kind, self.namespace, name)
            except NotFound:
                return
            assert asyncio.get_running_loop().time() < deadline, f"{name} is still there"
            await asyncio.sleep(0.05)

    async def eventually(self, there: Callable[[], bool], what: Callable[[], object]) -> None:
        deadline = asyncio.get_running_loop().time() + WAIT_SECONDS
        while not there():
            assert asyncio.get_running_loop().time() < deadline, what()
            await asyncio.sleep(0.02)

    async def measured(self, series: str, value: float) -> None:
        """Wait until control says so much of what Prometheus calls `series`."""
        assert self.control is not None
        instruments = self.control.world.metrics.instruments

        def said() -> list[str]:
            instruments.read()
            name, lines = series.partition("{")[0], instruments.text().decode().splitlines()
            return [line for line in lines if line.startswith(name)]

        await self.eventually(lambda: f"{series} {float(value)}" in said(), said)

    async def machines(self, count: int) -> None:
        """Wait until exactly so many machines run."""
        await self.eventually(lambda: len(self.host.machines) == count, lambda: self.host.machines)
