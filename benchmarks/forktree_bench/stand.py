"""A whole system on this machine, and ways to talk to it, for the suites that measure all of it."""

from __future__ import annotations

import asyncio
import json
import secrets
import shutil
import tempfile
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from forktree.kube.access import ClusterAccess
from forktree.kube.client import KubeClient
from forktree.models import Fork, ForkNode, ForkSpec, ObjectMeta, Session, SessionSpec
from forktree.models.fork import ForkSource, SourceRef
from forktree.models.session import TemplateRef
from forktree_bench import host
from forktree_bench.api import Api
from forktree_bench.forks_seen import ForksSeen
from forktree_bench.report import Report
from forktree_dev import provisioning
from forktree_dev.system import Sizes, System

NAMESPACE = "bench"
USER = "bench"
SECONDS = 180.0
"""For any one thing."""


@dataclass(frozen=True, slots=True)
class Stand:
    """A running system. `kube` is its administrator; the APIs' user may do what any editor may."""

    system: System
    kube: KubeClient
    forks: ForksSeen
    apis: tuple[Api, ...]
    """Of each node's agent."""

    @property
    def api(self) -> Api:
        return self.apis[0]

    async def apply(self, manifest: object) -> None:
        """`kubectl apply`."""
        await self.system.kubectl.run("apply", "-f", "-", stdin=json.dumps(manifest))

    async def template(self, name: str, spec: dict[str, object]) -> None:
        metadata = {"name": name, "namespace": NAMESPACE}
        await self.apply(
            {
                "apiVersion": "forktree.dev/v1alpha1",
                "kind": "SessionTemplate",
                "metadata": metadata,
                "spec": spec,
            }
        )

    async def root(self, name: str, template: str) -> Session:
        """A root session that is ready. The first of a template on a node boots a machine: seconds."""
        wanted = Session(
            metadata=ObjectMeta(name=name, namespace=NAMESPACE),
            spec=SessionSpec(template_ref=TemplateRef(name=template)),
        )
        await self.kube.create(wanted)
        wait = ("wait", f"session/{name}", f"--namespace={NAMESPACE}", "--for=condition=Ready")
        await self.system.kubectl.run(*wait, f"--timeout={SECONDS:.0f}s", timeout_seconds=SECONDS)
        return await self.kube.get(Session, NAMESPACE, name)

    async def fork(self, session: str, replicas: int) -> Fork:
        """Create a Fork object; the server's answer. What becomes of it is in `forks`."""
        return await self.kube.create(fork_object(f"f-{secrets.token_hex(6)}", session, replicas))

    def parts(self) -> dict[str, int]:
        """Pids of all parts that run, by name; a node's with the node's name."""
        plane = self.system.control_plane
        services = (
            {}
            if plane is None
            else {each.name: each for each in (plane.etcd, plane.api_server, plane.controller_manager)}
        )
        services["operator"] = self.system.operator
        for node in self.system.nodes:
            services |= {f"agent {node.name}": node.agent, f"keeper {node.name}": node.keeper}
        return {name: pid for name, service in services.items() if (pid := service.pid) is not None}

    async def settled(self) -> None:
        """All parts and machines are at rest."""
        await host.settled(*self.parts().values())

    def soon(self) -> float:
        return asyncio.get_running_loop().time() + SECONDS


def fork_object(name: str, session: str, replicas: int) -> Fork:
    return Fork(
        metadata=ObjectMeta(name=name, namespace=NAMESPACE),
        spec=ForkSpec(source=ForkSource(session=SourceRef(name=session)), replicas=replicas),
    )


@asynccontextmanager
async def running(
    report: Report, *, sizes: Sizes, nodes: tuple[str, ...] = ("node-1",)
) -> AsyncGenerator[Stand]:
    """Everything up, with a namespace and a user; all ended with the block, whatever happens.

    The folder of logs stays if the block fails, and the terminal says where it is.
    """
    folder = Path(tempfile.mkdtemp(prefix="forktree-bench-"))
    report.console.print("... starting the system", highlight=False)
    try:
        # Looking up what is built, and building what is not, blocks for as long as it takes.
        system = await asyncio.to_thread(System, folder, sizes=sizes, nodes=nodes)
        try:
            await system.start()
            async with _stand(system) as stand:
                node = await stand.kube.get(ForkNode, None, system.node)
                report.accelerator = node.status.accelerator or f"engine {node.status.engine}"
                yield stand
        finally:
            await system.stop()
    except BaseException:
        report.console.print(f"Logs: in the folders `logs` below {folder}", soft_wrap=True, highlight=False)
        raise
    shutil.rmtree(folder)


@asynccontextmanager
async def _stand(system: System) -> AsyncGenerator[Stand]:
    kubectl = system.kubectl
    await kubectl.run("create", "namespace", NAMESPACE)
    await kubectl.run("create", "serviceaccount", USER, f"--namespace={NAMESPACE}")
    await kubectl.run(
        *("create", "rolebinding", USER, f"--namespace={NAMESPACE}"),
        *("--clusterrole=edit", f"--serviceaccount={NAMESPACE}:{USER}"),
    )
    token = await provisioning.user_token(kubectl, USER, namespace=NAMESPACE)
    async with AsyncExitStack() as stack:
        access = ClusterAccess.from_kubeconfig(kubectl.kubeconfig)
        kube = await stack.enter_async_context(KubeClient.connected(access, timeout_seconds=SECONDS))
        forks = await stack.enter_async_context(ForksSeen.watching(kube, NAMESPACE))
        apis = [
            await stack.enter_async_context(Api.connected(node.url, node.ca_path, token, NAMESPACE))
            for node in system.nodes
        ]
        yield Stand(system, kube, forks, tuple(apis))
