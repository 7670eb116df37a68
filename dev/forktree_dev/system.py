"""All our parts running together on this machine: for the demo, tests, `make up`.

A system has a name that nothing else has; its folder, control groups and processes carry it, so that
whoever looks for what it left needs nothing but the name.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Self

from forktree_dev import control_groups, provisioning
from forktree_dev.control_plane import ControlPlane
from forktree_dev.kubectl import Kubectl
from forktree_dev.node import STOP_SECONDS, UIDS, Artifacts, Node, Sizes
from forktree_dev.processes import Service, stop_recorded

__all__ = ["Artifacts", "Node", "Sizes", "System", "name_of", "stop"]

NAME_VARIABLE = "FORKTREE_SYSTEM"
"""In the environment of each part, so that a part is recognised even before it has opened a file."""

_FIRST_UID = 1_000_000
"""Machines' user ids are far from people's."""
_SYSTEMS = 200
"""As many ranges of user ids there are: two systems rarely have the same."""
_NODES = 8
"""At most in one system."""
_CONTROL_PLANE = "control-plane"


def name_of(state_dir: Path) -> str:
    """The name of the system in `state_dir` and of its folder in memory. Its control groups begin with it."""
    return f"forktree-dev-{hashlib.sha256(str(state_dir.resolve()).encode()).hexdigest()[:8]}"


async def stop(state_dir: Path) -> list[str]:
    """End what a system left recorded in `state_dir`, the last started first; the names of what still ran.

    Nothing of it is left in memory or in control groups, also where a keeper had been killed or the caller is
    cancelled meanwhile.
    """
    try:
        ended = await stop_recorded(state_dir, grace_seconds=STOP_SECONDS)
        await control_groups.clear(f"{name_of(state_dir)}-")
        return ended
    finally:
        shutil.rmtree(memory_dir(name_of(state_dir)), ignore_errors=True)


def memory_dir(name: str) -> Path:
    """Where the system `name` keeps what must not outlive the machine's boot.

    On the first tmpfs that Linux systems usually have; a container's /run often is none.
    """
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    tmpfs = {fields[1] for fields in mounts if fields[2] == "tmpfs"}
    for folder in ("/run", "/dev/shm"):
        if folder in tmpfs:
            return Path(folder) / name
    raise FileNotFoundError("neither /run nor /dev/shm is a tmpfs: the agent's state has no place")


class System:
    """Nodes and an operator, and the control plane unless one is given.

    `node`, `keeper`, `agent`, `url` and `ca_path` are those of the first node: of the only one, unless more
    are asked for.
    """

    def __init__(
        self,
        state_dir: Path,
        *,
        cluster: Kubectl | None = None,
        nodes: Sequence[str] = ("node-1",),
        sizes: Sizes | None = None,
        garbage_collector_qps: float | None = None,
        outlives_us: bool = False,
        artifacts: Artifacts | None = None,
    ) -> None:
        """`cluster` reaches an existing control plane as its administrator; None: one of our own. `sizes` are
        each node's. `artifacts` None: looks them up, which blocks for seconds. With `outlives_us`, agents and
        the operator are started again when they end, as in a cluster; else they stay as a test left them."""
        if not 0 < len(nodes) <= _NODES:
            raise ValueError(f"a system has 1 to {_NODES} nodes")
        artifacts = artifacts or Artifacts.built()
        self.name = name_of(state_dir)
        self.state_dir = state_dir
        self.control_plane: ControlPlane | None = None
        if cluster is None:
            self.control_plane = ControlPlane(
                state_dir / _CONTROL_PLANE,
                garbage_collector_qps=garbage_collector_qps,
                outlives_us=outlives_us,
            )
            cluster = self.control_plane.kubectl
        self.kubectl = cluster
        env = {**os.environ, NAME_VARIABLE: self.name, "PYTHONUNBUFFERED": "1"}
        machine_dir = memory_dir(self.name)
        first_uid = _FIRST_UID + int(self.name[-6:], 16) % _SYSTEMS * _NODES * UIDS
        self.nodes = tuple(
            Node(
                node,
                state_dir / node,
                kubectl=cluster,
                machine_dir=machine_dir / node,
                cgroup=f"{self.name}-{node}",
                uid_base=first_uid + index * UIDS,
                sizes=sizes or Sizes(),
                artifacts=artifacts,
                env=env,
                outlives_us=outlives_us,
            )
            for index, node in enumerate(nodes)
        )
        first = self.nodes[0]
        self.node, self.keeper, self.agent = first.name, first.keeper, first.agent
        self.url, self.ca_path = first.url, first.ca_path
        self.operator = Service(
            "operator",
            [
                *(sys.executable, "-m", "forktree_operator"),
                f"--kubeconfig={self._operator_kubeconfig}",
                f"--namespace={provisioning.SYSTEM_NAMESPACE}",
                "--metrics-listen=127.0.0.1:0",
            ],
            state_dir,
            env=env,
            outlives_us=outlives_us,
            restarts=outlives_us,
            grace_seconds=STOP_SECONDS,
        )

    @classmethod
    @asynccontextmanager
    async def running(
        cls,
        state_dir: Path,
        *,
        cluster: Kubectl | None = None,
        nodes: Sequence[str] = ("node-1",),
        sizes: Sizes | None = None,
        garbage_collector_qps: float | None = None,
        artifacts: Artifacts | None = None,
    ) -> AsyncGenerator[Self, None]:
        """Up and ready to take sessions; on leaving all is ended, whatever happened. The logs stay."""
        system = cls(
            state_dir,
            cluster=cluster,
            nodes=nodes,
            sizes=sizes,
            garbage_collector_qps=garbage_collector_qps,
            artifacts=artifacts,
        )
        try:
            await system.start()
            yield system
        finally:
            await system.stop()

    async def start(self) -> None:
        """Start all parts and wait until every node says that it is ready.

        Raises `ProcessFailed` with the end of its log when a part ends instead.
        """
        if self.control_plane:
            await self.control_plane.start()
        else:
            await provisioning.install(self.kubectl)
        for node in self.nodes:
            await node.start()
        await provisioning.write_operator_kubeconfig(self.kubectl, self._operator_kubeconfig)
        self.operator.start()
        await self.ready()

    async def ready(self, *, timeout_seconds: float = 120.0) -> None:
        """Wait until each agent has published that its node takes sessions: its canary has run by then.

        What an agent published that was killed since still stands, so after a restart this says nothing.
        Raises `ProcessFailed` when a part ends instead, `TimeoutError` with the end of an agent's log.
        """
        parts = (self.operator, *(part for node in self.nodes for part in (node.keeper, node.agent)))
        deadline = asyncio.get_running_loop().time() + timeout_seconds
        async with asyncio.TaskGroup() as tasks:
            published = tasks.create_task(self._unready(timeout_seconds), name="published-ready")
            ended = [
                tasks.create_task(part.ended(deadline=deadline), name=f"watch-{part.name}") for part in parts
            ]
            await asyncio.wait([published, *ended], return_when=asyncio.FIRST_COMPLETED)
            for task in (published, *ended):
                task.cancel()
        for part in parts:
            if part.pid is None:
                raise part.failure()
        unready = self.nodes if published.cancelled() else published.result()
        if unready:
            names = ", ".join(node.name for node in unready)
            raise TimeoutError(f"not ready after {timeout_seconds} s: {names}\n{unready[0].agent.log_tail()}")

    async def _unready(self, timeout_seconds: float) -> tuple[Node, ...]:
        """The nodes that did not become ready in time."""
        ready = await asyncio.gather(*(node.published_ready(timeout_seconds) for node in self.nodes))
        return tuple(node for node, is_ready in zip(self.nodes, ready, strict=True) if not is_ready)

    async def stop(self) -> None:
        """End all parts and remove what they kept in memory. Safe to repeat."""
        await stop(self.state_dir)

    @property
    def _operator_kubeconfig(self) -> Path:
        return self.state_dir / "operator.kubeconfig"
