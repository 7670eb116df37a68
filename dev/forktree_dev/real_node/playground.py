"""The playground on a real node: the chart installed, with the images of this checkout."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forktree_dev import container_images
from forktree_dev.kubectl import Kubectl
from forktree_dev.real_node.cluster import RealCluster
from forktree_dev.real_node.helm import Helm


def values(**node: Any) -> dict[str, Any]:
    """What the chart is told here: images are there already, and one node has room for one operator."""
    return {
        "images": {"pullPolicy": "Never"},
        "operator": {"replicas": 1},
        "node": node,
    }


async def start(state: Path) -> Mapping[str, str]:
    """Start it in `state`, to stay; what a user's environment needs to know of it."""
    built = [container_images.build(recipe) for recipe in container_images.RECIPES]
    cluster = RealCluster(state, outlives_us=True)
    await cluster.start([image.archive for image in built])
    helm = Helm(cluster.control_plane.kubeconfig, state / "helm")
    await helm.install(values(cgroup=cluster.machines_cgroup))
    bundle = state / "agent-ca.crt"
    url = await _agent(cluster.kubectl, cluster.node.name, bundle)
    return {
        "KUBECONFIG": str(cluster.control_plane.kubeconfig),
        "FORKTREE_URL": url,
        "FORKTREE_CA": str(bundle),
    }


async def _agent(kubectl: Kubectl, node: str, bundle: Path) -> str:
    """Where the agent is reached; `bundle` gets what to verify it by."""
    for condition in ("create", "jsonpath={.status.ready}=true"):
        wait = ("wait", f"forknode/{node}", f"--for={condition}", "--timeout=120s")
        await kubectl.run(*wait, timeout_seconds=130)
    status = (await kubectl.json("get", "forknode", node))["status"]
    await asyncio.to_thread(bundle.write_text, status["caBundle"])
    url: str = status["endpoint"]
    return url
