"""Clients of the API server that speak as those who use forktree: users, the operator, agents of nodes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from forktree.kube.access import ClusterAccess
from forktree.kube.client import KubeClient
from forktree_dev import provisioning
from forktree_dev.control_plane import ControlPlane
from forktree_dev.kubectl import Kubectl

_USER = "policy-user"
NODES = ("policy-node-1", "policy-node-2")


@dataclass(frozen=True, slots=True, kw_only=True)
class Accounts:
    """One client each. None but `admin` may do what its role or a policy does not allow."""

    namespace: str
    """Where `user` may work."""
    admin: KubeClient
    user: KubeClient
    """May edit the namespace, as a person with the cluster's own `edit` role may."""
    operator: KubeClient
    agent: KubeClient
    """Of the first of `NODES`."""
    other_agent: KubeClient
    """Of the second."""
    nameless_agent: KubeClient
    """With the agents' account, but with a token that is bound to no node."""

    @classmethod
    @asynccontextmanager
    async def connected(cls, plane: ControlPlane, state_dir: Path) -> AsyncGenerator[Accounts]:
        """All of them, in the namespace `default`, where the user may not do anything yet."""
        kubectl = plane.kubectl
        for node in NODES:
            await provisioning.create_node(kubectl, node)
            await provisioning.write_agent_kubeconfig(kubectl, node, state_dir / node)
        await provisioning.write_operator_kubeconfig(kubectl, state_dir / "operator")
        await kubectl.run("create", "serviceaccount", _USER)
        reach = ClusterAccess.from_kubeconfig(kubectl.kubeconfig)
        system = provisioning.SYSTEM_NAMESPACE
        async with (
            KubeClient.connected(reach) as admin,
            _by_token(kubectl, reach, _USER, "default") as user,
            KubeClient.connected(ClusterAccess.from_kubeconfig(state_dir / "operator")) as operator,
            KubeClient.connected(ClusterAccess.from_kubeconfig(state_dir / NODES[0])) as agent,
            KubeClient.connected(ClusterAccess.from_kubeconfig(state_dir / NODES[1])) as other_agent,
            _by_token(kubectl, reach, provisioning.AGENT_ACCOUNT, system) as nameless_agent,
        ):
            yield cls(
                namespace="default",
                admin=admin,
                user=user,
                operator=operator,
                agent=agent,
                other_agent=other_agent,
                nameless_agent=nameless_agent,
            )
        await kubectl.run("delete", "serviceaccount", _USER)
        for node in NODES:
            await kubectl.run("delete", "node", node)

    async def at_home_in(self, namespace: str) -> Accounts:
        """The same, where the user may edit `namespace`."""
        binding = {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "RoleBinding",
            "metadata": {"name": _USER},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "edit"},
            "subjects": [{"kind": "ServiceAccount", "name": _USER, "namespace": "default"}],
        }
        path = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}/rolebindings"
        await self.admin.raw("POST", path, binding)
        async with asyncio.timeout(10):
            # The authorizer sees a binding some milliseconds after it was written, and tells nobody when.
            while not await may(self.user, namespace, "create", "sessions"):
                pass
        return replace(self, namespace=namespace)


@asynccontextmanager
async def _by_token(
    kubectl: Kubectl, reach: ClusterAccess, account: str, namespace: str
) -> AsyncGenerator[KubeClient]:
    token = (await kubectl.run("create", "token", account, "-n", namespace)).strip()
    async with KubeClient.connected(ClusterAccess(reach.server_url, reach.tls, lambda: token)) as client:
        yield client


async def may(client: KubeClient, namespace: str, verb: str, resource: str) -> bool:
    """Whether RBAC lets `client` do it: `resource` as `sessions/exec`."""
    plural, _, subresource = resource.partition("/")
    attributes = {
        "namespace": namespace,
        "verb": verb,
        "group": "forktree.dev",
        "resource": plural,
        "subresource": subresource,
    }
    answer = await client.raw(
        "POST",
        "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews",
        {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": attributes},
        },
    )
    return bool(json.loads(answer)["status"]["allowed"])
