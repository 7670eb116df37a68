"""Argo Workflows for a cluster with a real node: its definitions, the executor's image, a controller.

The controller is a process beside the node's own and no pod: its settings are then arguments here. What it
does is the same.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from forktree_dev import argo_programs, cache, provisioning
from forktree_dev.container_images import oci
from forktree_dev.container_images.oci import Layer
from forktree_dev.processes import Service
from forktree_dev.real_node.cluster import RealCluster

EXECUTOR_IMAGE = "localhost/forktree-dev/argoexec:4"
NAMESPACE = "argo"
_USER = "8737:8737"
"""As in the image that Argo publishes for those who run nothing as root."""
_START_SECONDS = 60.0
_HEALTH_PORT = 6060


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How soon Argo notices anything. The defaults are Argo's own."""

    look: str = "5s"
    """Between two looks of a step at its resource: RESOURCE_STATE_CHECK_INTERVAL of the executor."""
    requeue: str = "10s"
    """Until the controller looks again at a workflow: its DEFAULT_REQUEUE_TIME."""


def executor_image() -> Path:
    """Its archive: the one program, in an image of nothing else. It has its own kubectl."""
    program = argo_programs.argo_programs().executor

    def make(folder: Path) -> None:
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            root = Path(scratch, "root")
            (root / "bin").mkdir(parents=True)
            (root / "tmp").mkdir()
            (root / "tmp").chmod(0o1777)  # Where it puts the manifest of its step.
            shutil.copy(program, root / "bin" / "argoexec")
            layer = Layer.packed(root, Path(scratch, "layer.tar"))
            config = oci.Config(
                user=_USER, command=("/bin/argoexec",), environment={"PATH": "/bin"}, labels={}
            )
            oci.write(folder / "argoexec.tar", EXECUTOR_IMAGE, config, [layer])

    inputs: list[str | Path] = [program, EXECUTOR_IMAGE, _USER, Path(oci.__file__), Path(__file__)]
    return cache.entry("oci", cache.key(inputs), make, announce="packing Argo's executor") / "argoexec.tar"


async def install(cluster: RealCluster) -> None:
    """Its definitions and the namespace that its controller reads its settings from. Safe to repeat."""
    kubectl = cluster.kubectl
    definitions = argo_programs.argo_programs().definitions
    await provisioning.define(kubectl, definitions)
    await kubectl.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})


@asynccontextmanager
async def controller(cluster: RealCluster, folder: Path, pace: Pace) -> AsyncGenerator[Service]:
    """One that has begun to work, with its log in `folder`; killed on leaving, since it takes no other no.

    Raises `ProcessFailed` with the end of its log when it ends instead, `TimeoutError` for a late one.
    """
    await cluster.kubectl.apply(
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "workflow-controller-configmap", "namespace": NAMESPACE},
            "data": {
                "executor": f"env: [{{name: RESOURCE_STATE_CHECK_INTERVAL, value: {pace.look}}}]\n",
            },
        }
    )
    argv = (
        str(argo_programs.argo_programs().controller),
        f"--kubeconfig={cluster.control_plane.kubeconfig}",
        f"--namespace={NAMESPACE}",
        f"--executor-image={EXECUTOR_IMAGE}",
        "--executor-image-pull-policy=Never",
    )
    service = Service(
        "workflow-controller",
        # It listens on ports of its own choice: in the node's network nobody else has them.
        cluster.in_network(argv),
        folder,
        env={**os.environ, "LEADER_ELECTION_DISABLE": "true", "DEFAULT_REQUEUE_TIME": pace.requeue},
        grace_seconds=0.0,  # It goes on for over 20 s after it was told to end.
    )
    service.start()
    try:
        await _answers(cluster, service)
        yield service
    finally:
        await service.stop()


async def _answers(cluster: RealCluster, service: Service) -> None:
    deadline = asyncio.get_running_loop().time() + _START_SECONDS
    url = f"http://{cluster.node.address}:{_HEALTH_PORT}/healthz"
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(2)) as client:
        while True:
            try:
                async with client.get(url) as answer:
                    if answer.status == 200:
                        return
            except (aiohttp.ClientError, TimeoutError):
                pass
            if service.pid is None:
                raise service.failure()
            if asyncio.get_running_loop().time() > deadline:
                raise TimeoutError(f"Argo's controller does not answer\n{service.log_tail()}")
            await asyncio.sleep(0.1)  # Somebody else's program: its port can only be tried.
