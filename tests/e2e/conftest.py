"""A whole node for tests that go from kubectl to the machines and back."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from e2e.http_stage import Stage, staged
from e2e.operator_rig import OperatorRig
from e2e.whole import Whole
from forktree.kube.access import ClusterAccess
from forktree.kube.client import KubeClient
from forktree.models import Session
from forktree_dev import ports, provisioning
from forktree_dev.control_plane import ControlPlane
from forktree_dev.system import Artifacts, Sizes, System

_MEMORY_LIMIT_BYTES = 20 << 30
"""Worst case, not what is used: a group of seventy small machines has to be admitted."""

SERVED_NAMESPACE = "at-the-node"
"""What the agent also serves at a socket. Made by the tests that use it."""


@pytest.fixture(scope="session")
def artifacts() -> Artifacts:
    """What agents need; looking it up takes seconds, so it is done once for all systems of the run."""
    return Artifacts.built()


@pytest.fixture(scope="session")
def registry_port() -> int:
    """Where tests have their registry: the agent is told of it when it starts, before there is one."""
    (port,) = ports.free(1)
    return port


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def system(
    artifacts: Artifacts, registry_port: int, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[System]:
    """Control plane, operator, keeper and agent; one for all tests, as starting costs a canary.

    Its control plane is its own: its operator would place the sessions of tests that play the operator
    themselves. A test may kill and restart its parts if all of them run and answer again when it ends.
    """
    state_dir = tmp_path_factory.mktemp("system")
    sizes = Sizes(
        memory_limit_bytes=_MEMORY_LIMIT_BYTES,
        served_namespaces=(SERVED_NAMESPACE,),
        registries=(f"127.0.0.1:{registry_port}=http",),
    )
    async with System.running(state_dir, sizes=sizes, artifacts=artifacts) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="session")
async def whole(system: System) -> AsyncIterator[Whole]:
    """The system as one namespace's user sees it; whatever a test did, its machines are gone at the end."""
    namespace = f"test-{secrets.token_hex(4)}"
    await system.kubectl.run("create", "namespace", namespace)
    async with Whole.using(system, namespace) as whole:
        before = whole.machines()
        yield whole
    await system.kubectl.run("delete", "namespace", namespace, "--wait=false")
    await whole.machines_are(before & whole.machines())


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def operator_plane(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ControlPlane]:
    """A second control plane: two operators, or real and invented nodes, would not leave each other alone."""
    async with ControlPlane.running(tmp_path_factory.mktemp("operator-plane")) as plane:
        yield plane


@pytest.fixture
async def rig(operator_plane: ControlPlane, tmp_path: Path) -> AsyncIterator[OperatorRig]:
    """What tests of the operator alone need, in a namespace of the test's own."""
    async with OperatorRig.running(operator_plane, tmp_path) as running:
        yield running


@pytest.fixture
async def stage(control_plane: ControlPlane, namespace: str, tmp_path: Path) -> AsyncIterator[Stage]:
    """The HTTP API in front of a real API server; the test plays operator and control."""
    async with staged(control_plane, namespace, tmp_path) as running:
        yield running


@pytest.fixture
async def far(stage: Stage, tmp_path: Path) -> AsyncIterator[str]:
    """A session of another node, which its agent has named."""
    kubectl = stage.plane.kubectl
    await provisioning.create_node(kubectl, "far-node")
    await provisioning.write_agent_kubeconfig(kubectl, "far-node", tmp_path / "far.kubeconfig")
    await stage.session("far", node="far-node")
    async with KubeClient.connected(ClusterAccess.from_kubeconfig(tmp_path / "far.kubeconfig")) as agent:
        await agent.merge_patch(Session, stage.namespace, "far", {"spec": {"nodeName": "far-node"}})
    yield "far"
    await kubectl.run("delete", "node", "far-node")
