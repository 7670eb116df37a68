"""Remove what agents wrote about their nodes, once no agent is there any more that would write it again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import ClassVar, Literal

from forktree.kube.client import KubeClient
from forktree.kube.errors import NotFound
from forktree.models import ForkNode
from forktree.models.base import ApiModel, ApiObject
from forktree.models.names import agent_lease_name
from forktree.models.schema import Resource
from forktree_operator.cluster import Lease
from forktree_operator.jobs.telling import NotInTime, say, until
from forktree_operator.leadership import LEASE_NAME

_PARTS = "app.kubernetes.io/part-of=forktree,app.kubernetes.io/component in (operator,keeper,agent)"
_CLEARING = "forktree-clear"
"""The DaemonSet whose pods are ready once their node's state is gone."""
_TEST_POD = "forktree-test"
"""What `helm test` runs stays, so that its log can be read."""


class _DaemonSetStatus(ApiModel):
    observed_generation: int = 0
    desired_number_scheduled: int = 0
    number_ready: int = 0


class _DaemonSet(ApiObject):
    resource: ClassVar[Resource] = Resource(
        kind="DaemonSet", plural="daemonsets", short_names=(), namespaced=True, columns=()
    )

    api_version: str = "apps/v1"
    kind: Literal["DaemonSet"] = "DaemonSet"
    status: _DaemonSetStatus = _DaemonSetStatus()

    @classmethod
    def collection_path(cls, namespace: str | None) -> str:
        return f"/apis/apps/v1/namespaces/{namespace}/daemonsets"


class _Pod(ApiObject):
    resource: ClassVar[Resource] = Resource(
        kind="Pod", plural="pods", short_names=(), namespaced=True, columns=()
    )

    api_version: str = "v1"
    kind: Literal["Pod"] = "Pod"

    @classmethod
    def collection_path(cls, namespace: str | None) -> str:
        return f"/api/v1/namespaces/{namespace}/pods"


async def clear(client: KubeClient, namespace: str, *, deadline: float) -> None:
    """Returns when ForkNodes and Leases of ours are gone.

    Pods are waited for, and the nodes' own state, but for half of the time at most: a node that does not
    answer keeps both until it comes back, or for ever.
    """

    async def pods() -> str:
        listed = await client.list(_Pod, namespace, label_selector=_PARTS, deadline=deadline)
        return ", ".join(pod.metadata.name for pod in listed.items)

    await _delete(client, _Pod, namespace, _TEST_POD, deadline)

    async def nodes_with_state() -> str:
        status = (await client.get(_DaemonSet, namespace, _CLEARING, deadline=deadline)).status
        if status.observed_generation == 0:
            return "all nodes"
        left = status.desired_number_scheduled - status.number_ready
        return f"{left} of {status.desired_number_scheduled} nodes" if left else ""

    loop = asyncio.get_running_loop()
    patience = loop.time() + (deadline - loop.time()) / 2
    await _wait(pods, "the pods of operator, keepers and agents to end", deadline=patience)
    await _wait(nodes_with_state, "the nodes' state directories to be empty", deadline=patience)
    try:
        nodes = [node.metadata.name for node in (await client.list(ForkNode, deadline=deadline)).items]
    except NotFound:  # The very type is gone; then so are they.
        nodes = []
    for node in nodes:
        await _delete(client, ForkNode, None, node, deadline)
        await _delete(client, Lease, namespace, agent_lease_name(node), deadline)
    await _delete(client, Lease, namespace, LEASE_NAME, deadline)
    say(f"removed {len(nodes)} ForkNodes and their Leases")


async def _wait(look: Callable[[], Awaitable[str]], what: str, *, deadline: float) -> None:
    try:
        await until(look, what, deadline=deadline)
    except NotInTime as err:
        say(f"going on: {err}")
    else:
        say(f"waited for {what}")


async def _delete(
    client: KubeClient, kind: type[ApiObject], namespace: str | None, name: str, deadline: float
) -> None:
    try:
        await client.delete(kind, namespace, name, deadline=deadline)
    except NotFound:
        return
