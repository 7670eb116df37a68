"""The node's own programs: containerd, kubelet and kube-proxy, started inside a sandbox."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from forktree_dev import node_programs, provisioning
from forktree_dev.control_plane import ControlPlane
from forktree_dev.processes import Service
from forktree_dev.real_node import configuration
from forktree_dev.real_node.network import Wire
from forktree_dev.real_node.sandbox import Sandbox

_CGROUPS = Path("/sys/fs/cgroup")
_KUBELET_PORT = 10250
_START_SECONDS = 120.0
"""Some 5 s on two idle cores."""
_IMPORT_SECONDS = 180.0


class RealNode:
    """The node `name` of a control plane, with all it has in `folder` and below control group `cgroup`."""

    def __init__(
        self,
        name: str,
        folder: Path,
        *,
        plane: ControlPlane,
        sandbox: Sandbox,
        wire: Wire,
        cgroup: str,
        outlives_us: bool,
    ) -> None:
        self.name = name
        self.folder = folder
        self._plane = plane
        self._sandbox = sandbox
        self._wire = wire
        self._cgroup = cgroup
        self._outlives_us = outlives_us
        self._containerd = node_programs.containerd()

    async def start(self, images: Sequence[Path]) -> None:
        """Returns when the node is Ready and has `images`. The API server must be up.

        Raises `ProcessFailed` with the end of its log when a program ends instead.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _START_SECONDS
        self._write_configuration()
        make_cgroup(self._cgroup)
        containerd = self._service("containerd", self._containerd / "containerd", self._at("containerd.toml"))
        containerd.start()
        await self._containerd_answers(containerd, deadline=deadline)
        await self.import_images(images)
        kubelet = self._service(
            "kubelet",
            self._plane.binaries / "kubelet",
            self._at("kubelet.json"),
            f"--kubeconfig={self.folder / 'kubelet.kubeconfig'}",
            f"--root-dir={self.folder / 'kubelet'}",
            f"--cert-dir={self.folder / 'kubelet-certificates'}",
            f"--hostname-override={self.name}",
            f"--node-ip={self._wire.inner}",
        )
        kubelet.start()
        binding = ("clusterrolebinding", "node-proxier", "--clusterrole=system:node-proxier")
        await self._plane.kubectl.run("create", *binding, "--user=system:kube-proxy")
        proxy = self._service("kube-proxy", self._plane.binaries / "kube-proxy", self._at("kube-proxy.json"))
        proxy.start()
        await self._ready((containerd, kubelet, proxy), deadline=deadline)

    @property
    def address(self) -> str:
        """Where this machine reaches it."""
        return self._wire.inner

    async def import_images(self, archives: Sequence[Path]) -> None:
        """Give the node images, as a registry would. Raises `CalledProcessError`."""
        for archive in archives:
            await self._ctr("images", "import", "--platform", "linux/amd64", str(archive))

    async def tag_image(self, reference: str, another: str) -> None:
        """Call an image by another name as well. Raises `CalledProcessError`."""
        await self._ctr("images", "tag", reference, another)

    async def _ctr(self, *arguments: str) -> None:
        socket = str(configuration.containerd_socket(self.folder))
        ctr = [str(self._containerd / "ctr"), "--address", socket, "--namespace", "k8s.io"]
        await asyncio.to_thread(
            subprocess.run, [*ctr, *arguments], check=True, capture_output=True, timeout=_IMPORT_SECONDS
        )

    async def _containerd_answers(self, service: Service, *, deadline: float) -> None:
        socket = configuration.containerd_socket(self.folder)
        while True:
            try:
                _, writer = await asyncio.open_unix_connection(socket)
            except OSError:
                if service.pid is None:
                    raise service.failure() from None
                if asyncio.get_running_loop().time() > deadline:
                    raise TimeoutError(f"containerd does not answer\n{service.log_tail()}") from None
                await asyncio.sleep(0.05)  # Somebody else's program: its socket can only be tried.
            else:
                writer.close()
                return

    async def _ready(self, services: Sequence[Service], *, deadline: float) -> None:
        left = deadline - asyncio.get_running_loop().time()
        kubectl = self._plane.kubectl
        conditions = ("create", "condition=Ready")
        try:
            for condition in conditions:
                await kubectl.run(
                    *("wait", f"node/{self.name}", f"--for={condition}", f"--timeout={left:.0f}s"),
                    timeout_seconds=left + 5,
                )
        except Exception:
            for service in services:
                if service.pid is None:
                    raise service.failure() from None
            raise

    def _service(self, name: str, program: Path, *arguments: str) -> Service:
        # What these start they look for by name: mount, iptables, nft, the shim beside containerd.
        path = f"{self._containerd}:/usr/sbin:/usr/bin:/sbin:/bin"
        return Service(
            name,
            self._sandbox.inside([str(program), *arguments]),
            self.folder,
            env={**os.environ, "PATH": path},
            outlives_us=self._outlives_us,
            grace_seconds=0.0,  # It is told by the end of its sandbox.
        )

    def _at(self, file: str) -> str:
        return f"--config={self.folder / file}"

    def _write_configuration(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "cni").mkdir(exist_ok=True)
        cluster = provisioning.Cluster(server=self._plane.url, ca=self._plane.ca_path.read_bytes())
        tokens = {"kubelet": self._plane.kubelet_token, "kube-proxy": self._plane.proxy_token}
        for program, token in tokens.items():
            provisioning.write_kubeconfig(self.folder / f"{program}.kubeconfig", cluster, token)
        texts = {
            "containerd.toml": configuration.containerd(self.folder),
            "cni/10-pods.conflist": json.dumps(configuration.pod_network(self.folder, self._wire.pods)),
            "kubelet.json": json.dumps(
                configuration.kubelet(
                    self.folder,
                    address=self._wire.inner,
                    port=_KUBELET_PORT,
                    cgroup=self._cgroup,
                    client_authority=self._plane.kubelet_authority,
                )
            ),
            "kube-proxy.json": json.dumps(
                configuration.kube_proxy(
                    self.folder / "kube-proxy.kubeconfig", node=self.name, pods=self._wire.pods
                )
            ),
        }
        for file, text in texts.items():
            (self.folder / file).write_text(text)


def make_cgroup(name: str) -> None:
    """The group of all pods of a node, in every hierarchy. Safe to repeat."""
    for hierarchy in _hierarchies():
        group = hierarchy / name
        group.mkdir(exist_ok=True)
        for file in ("cpuset.cpus", "cpuset.mems"):
            # Version 1 lets nobody into a group that has none of these.
            if (hierarchy / file).exists() and (group / file).exists():
                (group / file).write_text((hierarchy / file).read_text())


def remove_cgroup(name: str) -> None:
    """Once nothing runs in it any more. Safe to repeat."""
    for hierarchy in _hierarchies():
        for folder, _, _ in os.walk(hierarchy / name, topdown=False):
            with suppress(OSError):
                Path(folder).rmdir()


def remove_containers(folder: Path) -> None:
    """What containers and images had on disk. The rest of the folder stays: its logs say what happened."""
    for each in ("root", "kubelet"):
        shutil.rmtree(folder / each, ignore_errors=True)


def _hierarchies() -> list[Path]:
    return [path for path in (_CGROUPS, *_CGROUPS.iterdir()) if (path / "cgroup.procs").exists()]
