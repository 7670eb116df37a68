"""Remove what agents wrote about their nodes, once no agent is there any more that would write it again."""

from __future__ import annotations

from typing import ClassVar, Literal

from forktree.kube.client import KubeClient
from forktree.kube.errors import NotFound
from forktree.models import ForkNode
from forktree.models.base import ApiObject
from forktree.models.names import agent_lease_name
from forktree.models.schema import Resource
from forktree_operator.cluster import Lease
from forktree_operator.jobs.telling import say, until
from forktree_operator.leadership import LEASE_NAME

_PARTS = "app.kubernetes.io/part-of=forktree,app.kubernetes.io/component in (operator,keeper,agent)"
_TEST_POD = "forktree-test"
"""What `helm test` runs stays, so that its log can be read."""


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
    """Returns when pods, ForkNodes and Leases of ours are gone from `namespace` and the cluster."""

    async def pods() -> str:
        listed = await client.list(_Pod, namespace, label_selector=_PARTS, deadline=deadline)
        return ", ".join(pod.metadata.name for pod in listed.items)

    await _delete(client, _Pod, namespace, _TEST_POD, deadline)
    await until(pods, "the pods of operator, keepers and agents to end", deadline=deadline)
    say("no pod of ours runs")
    try:
        nodes = [node.metadata.name for node in (await client.list(ForkNode, deadline=deadline)).items]
    except NotFound:  # The very type is gone; then so are they.
        nodes = []
    for node in nodes:
        await _delete(client, ForkNode, None, node, deadline)
        await _delete(client, Lease, namespace, agent_lease_name(node), deadline)
    await _delete(client, Lease, namespace, LEASE_NAME, deadline)
    say(f"removed {len(nodes)} ForkNodes and their Leases")


async def _delete(
    client: KubeClient, kind: type[ApiObject], namespace: str | None, name: str, deadline: float
) -> None:
    try:
        await client.delete(kind, namespace, name, deadline=deadline)
    except NotFound:
        return
