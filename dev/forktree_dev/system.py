"""All our parts running together on this machine, as one node of a cluster: for the demo, tests, `make up`.

A system has a name that nothing else has; its folder, control group and processes carry it, so that
whoever looks for what it left needs nothing but the name.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from forktree_dev import images, native, ports, provisioning
from forktree_dev.control_plane import ControlPlane
from forktree_dev.kubectl import Kubectl, KubectlFailed
from forktree_dev.processes import Service, stop_recorded

NAME_VARIABLE = "FORKTREE_SYSTEM"
"""In the environment of each part, so that a part is recognised even before it has opened a file."""

_FIRST_UID = 1_000_000
_UIDS = 4_096
"""Machines' user ids: far from people's, and as many for each system as an agent takes."""
_STOP_SECONDS = 30.0
"""The keeper ends and reaps every machine before it goes."""
_CONTROL_PLANE = "control-plane"


def name_of(state_dir: Path) -> str:
    """The name of the system in `state_dir`, also of its control group and its folder in memory."""
    return f"forktree-dev-{hashlib.sha256(str(state_dir.resolve()).encode()).hexdigest()[:8]}"


async def stop(state_dir: Path) -> list[str]:
    """End what a system left recorded in `state_dir`, the last started first; the names of what still ran."""
    ended = await stop_recorded(state_dir, grace_seconds=_STOP_SECONDS)
    shutil.rmtree(_machine_dir(name_of(state_dir)), ignore_errors=True)
    return ended


def _machine_dir(name: str) -> Path:
    """On the first tmpfs that Linux systems usually have; a container's /run often is none."""
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    tmpfs = {fields[1] for fields in mounts if fields[2] == "tmpfs"}
    for folder in ("/run", "/dev/shm"):
        if folder in tmpfs:
            return Path(folder) / name
    raise FileNotFoundError("neither /run nor /dev/shm is a tmpfs: the agent's state has no place")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What one development node may take."""

    memory_limit_bytes: int = 4 << 30
    """Worst case over all machines at once; the agent refuses beyond it."""
    accelerator: str = "auto"


class System:
    """Keeper, agent and operator of one node, and the control plane unless one is given."""

    def __init__(
        self,
        state_dir: Path,
        *,
        cluster: Kubectl | None = None,
        node: str = "node-1",
        sizes: Sizes | None = None,
        garbage_collector_qps: float | None = None,
        outlives_us: bool = False,
    ) -> None:
        """`cluster` reaches an existing control plane as its administrator; None: one of our own."""
        sizes = sizes or Sizes()
        self.name = name_of(state_dir)
        self.state_dir = state_dir
        self.node = node
        self.machine_dir = _machine_dir(self.name)
        """State of keeper and agent: in memory, as it must end with the machine's boot."""
        self.control_plane: ControlPlane | None = None
        if cluster is None:
            self.control_plane = ControlPlane(
                state_dir / _CONTROL_PLANE,
                garbage_collector_qps=garbage_collector_qps,
                outlives_us=outlives_us,
            )
            cluster = self.control_plane.kubectl
        self.kubectl = cluster
        (port,) = ports.free(1)
        self.url = f"https://127.0.0.1:{port}"
        self.ca_path = self.machine_dir / "tls" / "ca.crt"
        self.keeper = self._part(
            "keeper",
            ["-m", "forktree_keeper", f"--state-dir={self.machine_dir}", f"--cgroup-root={self.name}"],
            outlives_us,
        )
        self.agent = self._part(
            "agent",
            [
                *("-m", "forktree_agent"),
                f"--node-name={node}",
                f"--state-dir={self.machine_dir}",
                f"--guest-dir={images.guest_directory(list(images.IMAGES))}",
                f"--shim-library={native.shim()}",
                f"--kubeconfig={self._agent_kubeconfig}",
                f"--listen=127.0.0.1:{port}",
                f"--advertise={self.url}",
                f"--memory-limit={sizes.memory_limit_bytes}",
                f"--uid-base={_FIRST_UID + int(self.name[-6:], 16) % 200 * _UIDS}",
                f"--accelerator={sizes.accelerator}",
            ],
            outlives_us,
        )
        self.operator = self._part(
            "operator",
            [
                *("-m", "forktree_operator"),
                f"--kubeconfig={self._operator_kubeconfig}",
                f"--namespace={provisioning.SYSTEM_NAMESPACE}",
            ],
            outlives_us,
        )

    @classmethod
    @asynccontextmanager
    async def running(
        cls,
        state_dir: Path,
        *,
        cluster: Kubectl | None = None,
        node: str = "node-1",
        sizes: Sizes | None = None,
        garbage_collector_qps: float | None = None,
    ) -> AsyncGenerator[Self, None]:
        """Up and ready to take sessions; on leaving all is ended, whatever happened. The logs stay."""
        system = cls(
            state_dir, cluster=cluster, node=node, sizes=sizes, garbage_collector_qps=garbage_collector_qps
        )
        try:
            await system.start()
            yield system
        finally:
            await system.stop()

    async def start(self) -> None:
        """Start all parts and wait until the node says that it is ready.

        Raises `ProcessFailed` with the end of its log when a part ends instead.
        """
        if self.control_plane:
            await self.control_plane.start()
        else:
            await provisioning.install(self.kubectl)
        self.machine_dir.mkdir(mode=0o711, parents=True, exist_ok=True)
        self.keeper.start()
        await provisioning.create_node(self.kubectl, self.node)
        await provisioning.write_agent_kubeconfig(self.kubectl, self.node, self._agent_kubeconfig)
        await provisioning.write_operator_kubeconfig(self.kubectl, self._operator_kubeconfig)
        self.agent.start()
        self.operator.start()
        await self.ready()

    async def ready(self, *, timeout_seconds: float = 120.0) -> None:
        """Wait until the agent has published that this node takes sessions: its canary has run by then.

        What an agent published that was killed since still stands, so after a restart this says nothing.
        Raises `ProcessFailed` when a part ends instead, `TimeoutError` with the end of the agent's log.
        """
        parts = (self.keeper, self.agent, self.operator)
        deadline = asyncio.get_running_loop().time() + timeout_seconds
        async with asyncio.TaskGroup() as tasks:
            published = tasks.create_task(self._published_ready(timeout_seconds), name="published-ready")
            ended = [
                tasks.create_task(part.ended(deadline=deadline), name=f"watch-{part.name}") for part in parts
            ]
            await asyncio.wait([published, *ended], return_when=asyncio.FIRST_COMPLETED)
            for task in (published, *ended):
                task.cancel()
        for part in parts:
            if part.pid is None:
                raise part.failure()
        if published.cancelled() or not published.result():
            raise TimeoutError(f"{self.node} is not ready after {timeout_seconds} s\n{self.agent.log_tail()}")

    async def _published_ready(self, timeout_seconds: float) -> bool:
        wait = ("wait", f"forknode/{self.node}", f"--timeout={timeout_seconds:.0f}s")
        try:
            for condition in ("create", "jsonpath={.status.ready}=true"):
                await self.kubectl.run(*wait, f"--for={condition}", timeout_seconds=timeout_seconds)
        except KubectlFailed:
            return False
        return True

    async def stop(self) -> None:
        """End all parts and remove what they kept in memory. Safe to repeat."""
        await stop(self.state_dir)

    @property
    def _agent_kubeconfig(self) -> Path:
        return self.state_dir / "agent.kubeconfig"

    @property
    def _operator_kubeconfig(self) -> Path:
        return self.state_dir / "operator.kubeconfig"

    def _part(self, name: str, arguments: list[str], outlives_us: bool) -> Service:
        return Service(
            name,
            [sys.executable, *arguments],
            self.state_dir,
            env={**os.environ, NAME_VARIABLE: self.name, "PYTHONUNBUFFERED": "1"},
            outlives_us=outlives_us,
            grace_seconds=_STOP_SECONDS,
        )
