"""The Kubernetes objects that the operator uses beside forktree's own: Leases and Nodes."""

from __future__ import annotations

from datetime import datetime
from typing import ClassVar, Literal

from pydantic import field_serializer

from forktree.models.base import ApiModel, ApiObject
from forktree.models.schema import Resource


class LeaseSpec(ApiModel):
    """Who holds a Lease, and since when."""

    holder_identity: str | None = None
    """None or empty: nobody."""
    lease_duration_seconds: int | None = None
    """How long it holds without renewal."""
    acquire_time: datetime | None = None
    renew_time: datetime | None = None
    """By the holder's clock."""
    lease_transitions: int | None = None
    """How often it went from one holder to another."""

    @field_serializer("acquire_time", "renew_time")
    def _micro_time(self, value: datetime | None) -> str | None:
        # The API server takes these two with exactly six digits behind the point, and nothing else.
        return None if value is None else f"{value:%Y-%m-%dT%H:%M:%S.%f}Z"


class Lease(ApiObject):
    """A sign of life: an object that its holder renews."""

    resource: ClassVar[Resource] = Resource(
        kind="Lease", plural="leases", short_names=(), namespaced=True, columns=()
    )

    api_version: str = "coordination.k8s.io/v1"
    kind: Literal["Lease"] = "Lease"
    spec: LeaseSpec = LeaseSpec()

    @classmethod
    def collection_path(cls, namespace: str | None) -> str:
        scope = "" if namespace is None else f"namespaces/{namespace}/"
        return f"/apis/coordination.k8s.io/v1/{scope}leases"


class NodeSystemInfo(ApiModel):
    boot_id: str = ""
    """Of the kernel that runs, as the kubelet reported it. Empty while it has not."""


class NodeStatus(ApiModel):
    node_info: NodeSystemInfo = NodeSystemInfo()


class Node(ApiObject):
    """A machine of the cluster."""

    resource: ClassVar[Resource] = Resource(
        kind="Node", plural="nodes", short_names=(), namespaced=False, columns=()
    )

    api_version: str = "v1"
    kind: Literal["Node"] = "Node"
    status: NodeStatus = NodeStatus()

    @classmethod
    def collection_path(cls, namespace: str | None) -> str:
        return "/api/v1/nodes"
