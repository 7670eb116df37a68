"""The example of limits for classes of namespaces, on a real API server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import pytest_asyncio

from e2e.http_stage import SECONDS
from forktree.kube import errors
from forktree.kube.access import ClusterAccess
from forktree.kube.client import KubeClient
from forktree_dev.checkout import CHECKOUT
from forktree_dev.control_plane import ControlPlane

pytestmark = pytest.mark.asyncio(loop_scope="session")

EXAMPLE = CHECKOUT / "examples" / "tenancy"
GOOD: dict[str, Any] = {
    "image": "builtin:tiny",
    "machine": {"memory": "1Gi"},
    "treeLimits": {"memory": "8Gi", "depth": 16, "treeTTLSeconds": 3600},
}
"""A template that is just allowed."""


class Tenant:
    """Who makes things in one namespace."""

    def __init__(self, admin: KubeClient, namespace: str) -> None:
        self.admin, self.namespace = admin, namespace

    async def makes(self, plural: str, kind: str, spec: dict[str, Any]) -> None:
        """If it were allowed: nothing is kept."""
        path = f"/apis/forktree.dev/v1alpha1/namespaces/{self.namespace}/{plural}"
        body = {"apiVersion": "forktree.dev/v1alpha1", "kind": kind, "metadata": {"name": "x"}, "spec": spec}
        await self.admin.raw("POST", path, body, query={"dryRun": "All"})

    async def template(self, **spec: Any) -> None:
        await self.makes("sessiontemplates", "SessionTemplate", {**GOOD, **spec})

    async def fork(self, **spec: Any) -> None:
        await self.makes("forks", "Fork", {"source": {"session": {"name": "root"}}, **spec})


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def tenant(control_plane: ControlPlane) -> AsyncIterator[Tenant]:
    """Of a namespace of the class `small`, once the API server heeds its limits.

    One for all tests: a policy that was deleted and is made again finds its ConfigMap late (Kubernetes 1.36).
    """
    kubectl, namespace = control_plane.kubectl, "small-tenant"
    await kubectl.apply(EXAMPLE)
    await kubectl.run("create", "namespace", namespace)
    await kubectl.run("label", "namespace", namespace, "forktree-limits=small")
    reach = ClusterAccess.from_kubeconfig(kubectl.kubeconfig)
    async with KubeClient.connected(reach) as admin:
        tenant = Tenant(admin, namespace)
        await until_refused(lambda: tenant.template(machine={"memory": "64Gi"}), "may be at most")
        await until_refused(lambda: tenant.fork(replicas=256), "may have at most")
        yield tenant
    await kubectl.run("delete", "-f", str(EXAMPLE))
    await kubectl.run("delete", "namespace", namespace, "--wait=false")


async def until_refused(making: Callable[[], Awaitable[None]], sentence: str) -> None:
    """Returns once the API server heeds a policy, which it compiles some time after it was written."""
    async with asyncio.timeout(SECONDS):
        while True:
            try:
                await making()
            except errors.KubeError as err:
                if sentence in err.message:
                    return
            await asyncio.sleep(0.05)


BEYOND: tuple[tuple[dict[str, Any], str], ...] = (
    ({"machine": {"memory": "1025Mi"}}, "machine.memory may be at most 1Gi here"),
    (
        {"treeLimits": {**GOOD["treeLimits"], "memory": "9Gi"}},
        "treeLimits.memory must be set here, to at most 8Gi",
    ),
    ({"treeLimits": {"depth": 4, "treeTTLSeconds": 60}}, "treeLimits.memory must be set here"),
    ({"treeLimits": {**GOOD["treeLimits"], "depth": 17}}, "treeLimits.depth must be set here, to at most 16"),
    ({"treeLimits": {"memory": "1Gi", "treeTTLSeconds": 60}}, "treeLimits.depth must be set here"),
    ({"treeLimits": {"memory": "1Gi", "depth": 4}}, "treeLimits.treeTTLSeconds must be set here"),
    ({"standby": 1}, "standby may be at most 0 here"),
)
"""Templates that are not, and what is said of each."""


async def test_what_is_beyond_a_namespaces_limits_is_refused_by_name(tenant: Tenant) -> None:
    await tenant.template()
    for spec, sentence in BEYOND:
        with pytest.raises(errors.Forbidden, match=sentence):
            await tenant.template(**spec)
    await tenant.fork(replicas=16)
    with pytest.raises(errors.Forbidden, match="a Fork may have at most 16 children here"):
        await tenant.fork(replicas=17)


async def test_where_no_limits_are_asked_for_there_are_none(tenant: Tenant) -> None:
    free = Tenant(tenant.admin, "default")
    await free.template(machine={"memory": "64Gi"}, treeLimits={}, standby=64)
    await free.fork(replicas=256)


async def test_a_change_of_the_limits_counts(tenant: Tenant) -> None:
    path = "/api/v1/namespaces/forktree-system/configmaps/forktree-limits-small"
    patch = {"data": {"images": "builtin:py, builtin:gym", "replicas": None}}
    await tenant.admin.raw("PATCH", path, patch, content_type="application/merge-patch+json")
    beyond = "images here begin with one of builtin:py"
    await until_refused(lambda: tenant.template(image="builtin:tiny"), beyond)
    await tenant.template(image="builtin:python")
    await tenant.template(image="builtin:gym")
    await tenant.fork(replicas=256)
