"""A control plane with one real node, as one thing that is started and ended."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Self

from forktree_dev import control_groups
from forktree_dev.control_plane import ControlPlane, Pods
from forktree_dev.processes import stop_recorded
from forktree_dev.real_node import network
from forktree_dev.real_node import node as nodes
from forktree_dev.real_node.network import Wire
from forktree_dev.real_node.node import RealNode
from forktree_dev.real_node.pause_image import pause_image
from forktree_dev.real_node.sandbox import Sandbox
from forktree_dev.system import name_of

_PREFIX = "forktree-dev-"
PARTS = 8
"""Sandbox, etcd, API server, controller manager, scheduler, containerd, kubelet, kube-proxy."""
_STOP_SECONDS = 5.0
"""An API server waits for watchers that are gone."""


class RealCluster:
    """Everything in `state_dir`. `kubectl` is its administrator's."""

    def __init__(self, state_dir: Path, *, node: str = "node-1", outlives_us: bool = False) -> None:
        self.name = name_of(state_dir)
        self.state_dir = state_dir
        self._sandbox = Sandbox(state_dir / "sandbox", outlives_us=outlives_us)
        self._wire = Wire.free(_wire_name(self.name))
        self.control_plane = ControlPlane(
            state_dir / "control-plane",
            outlives_us=outlives_us,
            pods=Pods(address=self._wire.outer, node=node),
        )
        self.kubectl = self.control_plane.kubectl
        self.node = RealNode(
            node,
            state_dir / "node",
            plane=self.control_plane,
            sandbox=self._sandbox,
            wire=self._wire,
            cgroup=self.name,
            outlives_us=outlives_us,
        )

    @classmethod
    @asynccontextmanager
    async def running(cls, state_dir: Path, images: Sequence[Path]) -> AsyncGenerator[Self, None]:
        """Up, with a Ready node that has `images`; ended on leaving, whatever happens. The logs stay."""
        cluster = cls(state_dir)
        try:
            await cluster.start(images)
            yield cluster
        finally:
            await stop(state_dir)

    async def start(self, images: Sequence[Path]) -> None:
        """Raises `ProcessFailed` with the end of its log when a part ends, `TimeoutError` for a late one."""
        await self._sandbox.start()
        self._wire.lay(self._sandbox)
        await self.control_plane.start(provisioned=False)
        await self.node.start([pause_image(), *images])

    def inside(self, argv: Sequence[str]) -> list[str]:
        """The command that runs `argv` on the node itself, beside its pods."""
        return self._sandbox.inside(argv)

    def in_network(self, argv: Sequence[str]) -> list[str]:
        """The command that runs `argv` as a process of this machine that has the node's network."""
        return self._sandbox.in_network(argv)

    @property
    def machines_cgroup(self) -> str:
        """For the chart's keeper. Its own: whatever is below it ends with the keeper."""
        return _machines_cgroup(self.name)

    @property
    def wire_name(self) -> str:
        """Of the interface on this machine that leads to the node."""
        return self._wire.name


async def stop(state_dir: Path) -> list[str]:
    """End what a cluster left recorded in `state_dir`; the names of what still ran.

    The sandbox takes the node with it. What is removed after that is what belongs to no process.
    """
    name = name_of(state_dir)
    ended = await stop_recorded(state_dir / "sandbox")
    ended += await stop_recorded(state_dir, grace_seconds=_STOP_SECONDS)
    network.cut(_wire_name(name))
    await control_groups.clear(_machines_cgroup(name))
    nodes.remove_cgroup(name)
    nodes.remove_containers(state_dir / "node")
    return ended


def _machines_cgroup(name: str) -> str:
    return f"{name}-machines"


def _wire_name(name: str) -> str:
    return f"ft-{name.removeprefix(_PREFIX)}"
