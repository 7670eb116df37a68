"""One development node: its keeper and its agent, with a folder, control group, users and port of their own.

Several on one machine are as good as several machines: they share nothing but the API server.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from forktree_dev import control_groups, images, native, ports, provisioning
from forktree_dev.kubectl import Kubectl, KubectlFailed
from forktree_dev.processes import Service

STOP_SECONDS = 30.0
"""The keeper ends and reaps every machine before it goes."""

UIDS = 4_096
"""User ids that an agent takes for its machines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What one development node may take."""

    memory_limit_bytes: int = 4 << 30
    """Worst case over all machines at once; the agent refuses beyond it."""
    accelerator: str = "auto"
    engine: str = "microvm"
    served_namespaces: tuple[str, ...] = ()
    """Those with a socket of their own."""
    registries: tuple[str, ...] = ()
    """That images may come from, as `--registry` takes them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifacts:
    """What an agent needs that is built from this checkout."""

    guest_directory: Path
    shim_library: Path

    @classmethod
    def built(cls) -> Self:
        """Looked up in the cache, and built where missing. Some seconds even then: all sources are hashed, so
        who starts several systems should ask once."""
        return cls(guest_directory=images.guest_directory(images.STANDARD), shim_library=native.shim())


class Node:
    """Keeper and agent of the Node object `name`."""

    def __init__(
        self,
        name: str,
        folder: Path,
        *,
        kubectl: Kubectl,
        machine_dir: Path,
        cgroup: str,
        uid_base: int,
        sizes: Sizes,
        artifacts: Artifacts,
        env: Mapping[str, str],
        outlives_us: bool,
    ) -> None:
        """`folder` gets logs and records; `machine_dir`, in memory, what must end with the machine's boot."""
        self.name = name
        self.machine_dir = machine_dir
        self._kubectl = kubectl
        self._cgroup = cgroup
        self._kubeconfig = folder / "agent.kubeconfig"
        (port,) = ports.free(1)
        self.url = f"https://127.0.0.1:{port}"
        self.ca_path = machine_dir / "tls" / "ca.crt"

        def part(name: str, *arguments: str, restarts: bool = False) -> Service:
            return Service(
                name,
                [sys.executable, *arguments],
                folder,
                env=env,
                outlives_us=outlives_us,
                restarts=restarts,
                grace_seconds=STOP_SECONDS,
            )

        self.keeper = part(
            "keeper", "-m", "forktree_keeper", f"--state-dir={machine_dir}", f"--cgroup-root={cgroup}"
        )
        self.agent = part(
            "agent",
            *("-m", "forktree_agent"),
            f"--node-name={name}",
            f"--state-dir={machine_dir}",
            f"--guest-dir={artifacts.guest_directory}",
            f"--shim-library={artifacts.shim_library}",
            f"--kubeconfig={self._kubeconfig}",
            f"--listen=127.0.0.1:{port}",
            f"--advertise={self.url}",
            "--metrics-listen=127.0.0.1:0",
            f"--memory-limit={sizes.memory_limit_bytes}",
            f"--uid-base={uid_base}",
            f"--accelerator={sizes.accelerator}",
            f"--engine={sizes.engine}",
            f"--image-dir={folder / f'{name}-images'}",
            "--image-space=2Gi",
            *(f"--registry={each}" for each in sizes.registries),
            *(f"--serve-namespace={each}={self.socket_path(each)}" for each in sizes.served_namespaces),
            restarts=outlives_us,
        )

    def socket_path(self, namespace: str) -> Path:
        """Where its sessions can be used without a token."""
        return self.machine_dir / f"{namespace}.sock"

    @property
    def metrics_url(self) -> str:
        """Where the agent that was started last serves its metrics, once it has said so."""
        return metrics_url(self.agent)

    async def start(self) -> None:
        """Register the node and start its parts; also after `power_off`. They work once it is `ready`."""
        self.machine_dir.mkdir(mode=0o711, parents=True, exist_ok=True)
        self.keeper.start()
        await provisioning.create_node(self._kubectl, self.name)
        await provisioning.write_agent_kubeconfig(self._kubectl, self.name, self._kubeconfig)
        self.agent.start()

    async def published_ready(self, timeout_seconds: float) -> bool:
        """Whether the agent publishes in time that the node takes sessions. One that was killed since still
        stands as it was."""
        wait = ("wait", f"forknode/{self.name}", f"--timeout={timeout_seconds:.0f}s")
        try:
            for condition in ("create", "jsonpath={.status.ready}=true"):
                await self._kubectl.run(*wait, f"--for={condition}", timeout_seconds=timeout_seconds)
        except KubectlFailed:
            return False
        return True

    async def power_off(self) -> None:
        """What a power cut leaves: no process, and nothing that was in memory."""
        await self.agent.kill()
        await self.keeper.kill()
        await control_groups.clear(self._cgroup)
        shutil.rmtree(self.machine_dir)


def metrics_url(part: Service) -> str:
    """Where an agent or an operator serves its metrics: at a port that it has found by itself, and logged."""
    said = re.findall(r"metrics_serving host=(\S+) port=(\d+)", part.log_path.read_text(errors="replace"))
    host, port = said[-1]
    return f"http://{host}:{port}/metrics"
