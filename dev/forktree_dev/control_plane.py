"""A real Kubernetes control plane for development and tests: etcd, API server, controller manager.

RBAC, the Node authorizer, NodeRestriction and service accounts are on, as in a cluster that somebody runs,
and OwnerReferencesPermissionEnforcement, as in a strict one. Usually there is no kubelet: Node objects are
made by `provisioning`. For a node that runs pods it listens where they reach it, and has a scheduler. Two
of them run side by side without meeting.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import aiohttp
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from forktree_dev import cluster_binary, ports, provisioning
from forktree_dev.client_certificates import Authority
from forktree_dev.kubectl import Kubectl
from forktree_dev.processes import Service

_START_SECONDS = 60.0
"""Up in 2 to 3 s on two idle cores; a build beside it can make that ten times as long."""
_GARBAGE_COLLECTION = {"GOGC": "400", "GOMEMLIMIT": "2GiB"}
"""Of each part's Go runtime: rarer than usual, as long as little is held. A server that holds next to nothing
would spend a fifth of its time on it. What the environment says already goes first."""
_NO_PODS = ("--endpoint-reconciler-type=none",)
"""Nobody would use the `kubernetes` Service."""
_STOP_SECONDS = 5.0
"""Each needs under a second, except an API server whose etcd is gone: it would go on trying."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pods:
    """What a control plane must know where pods run."""

    address: str
    """Of this machine: where kubelets, pods and we reach the API server."""
    node: str
    """Name of the one node."""


class ControlPlane:
    """One control plane with all it has in one folder. `kubeconfig` is its administrator's."""

    def __init__(
        self,
        state_dir: Path,
        *,
        outlives_us: bool = False,
        garbage_collector_qps: float | None = None,
        pods: Pods | None = None,
    ) -> None:
        """`garbage_collector_qps` None: the controller manager's own 20 requests a second. `pods` None: none
        run here."""
        self.state_dir = state_dir
        self._pods = pods
        self._address = pods.address if pods else "127.0.0.1"
        self.kubeconfig = state_dir / "kubeconfig"
        self.binaries = cluster_binary.directory()
        self.kubectl = Kubectl(self.binaries / "kubectl", self.kubeconfig)
        etcd_port, peer_port, port = ports.free(3)
        self.url = f"https://{self._address}:{port}"
        self.token = secrets.token_urlsafe(24)
        self.kubelet_token = secrets.token_urlsafe(24)
        self.proxy_token = secrets.token_urlsafe(24)
        self.etcd = self._service("etcd", self._etcd_arguments(etcd_port, peer_port), outlives_us)
        self.api_server = self._service(
            "kube-apiserver", self._api_server_arguments(etcd_port, port), outlives_us
        )
        self.controller_manager = self._service(
            "kube-controller-manager", self._controller_manager_arguments(garbage_collector_qps), outlives_us
        )
        self.scheduler = self._service("kube-scheduler", self._scheduler_arguments(), outlives_us)

    @classmethod
    @asynccontextmanager
    async def running(
        cls, state_dir: Path, *, garbage_collector_qps: float | None = None
    ) -> AsyncGenerator[Self, None]:
        """Up with our definitions installed; ended on leaving, whatever happens. Its folder stays."""
        plane = cls(state_dir, garbage_collector_qps=garbage_collector_qps)
        try:
            await plane.start()
            yield plane
        finally:
            await plane.stop()

    async def start(self, *, provisioned: bool = True) -> None:
        """Returns when the API server is ready, our definitions are served, and the controllers are started.

        Not `provisioned`, it knows nothing of ours, as a cluster before an installation. Raises
        `ProcessFailed` with the end of its log when a part ends, `TimeoutError` when it takes too long.
        """
        deadline = asyncio.get_running_loop().time() + _START_SECONDS
        self._write_secrets()
        self.etcd.start()
        self.api_server.start()
        await self.ready(deadline=deadline)
        self._write_kubeconfig()
        if provisioned:
            # Before the controllers: the garbage collector looks for new types only every 30 s.
            await provisioning.install(self.kubectl)
        self.controller_manager.start()
        if self._pods:
            self.scheduler.start()

    async def stop(self) -> None:
        """End all parts, the ones that need the others first. Safe to repeat."""
        for service in (self.scheduler, self.controller_manager, self.api_server, self.etcd):
            await service.stop()

    async def ready(self, *, deadline: float) -> None:
        """Wait until the API server says that it is ready, `deadline` in loop time."""
        headers = {"Authorization": f"Bearer {self.token}"}
        async with aiohttp.ClientSession(headers=headers) as client:
            while not await self._answers(client):
                for service in (self.etcd, self.api_server):
                    if service.pid is None:
                        raise service.failure()
                if asyncio.get_running_loop().time() > deadline:
                    raise TimeoutError(f"the API server is not ready in time\n{self.api_server.log_tail()}")
                await asyncio.sleep(0.05)  # Somebody else's program: /readyz can only be asked.

    async def _answers(self, client: aiohttp.ClientSession) -> bool:
        try:
            # Its certificate is made while we wait, so there is nothing yet to check it against.
            async with client.get(
                f"{self.url}/readyz", ssl=False, timeout=aiohttp.ClientTimeout(2)
            ) as answer:
                return answer.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    def _service(self, name: str, arguments: list[str], outlives_us: bool) -> Service:
        return Service(
            name,
            [str(self.binaries / name), *arguments],
            self.state_dir,
            env={**_GARBAGE_COLLECTION, **os.environ},
            outlives_us=outlives_us,
            grace_seconds=_STOP_SECONDS,
        )

    def _etcd_arguments(self, port: int, peer_port: int) -> list[str]:
        client, peer = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{peer_port}"
        return [
            f"--data-dir={self.state_dir / 'etcd'}",
            "--unsafe-no-fsync",  # Lives no longer than the machine's boot, so nothing is lost.
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
        ]

    def _api_server_arguments(self, etcd_port: int, port: int) -> list[str]:
        return [
            f"--etcd-servers=http://127.0.0.1:{etcd_port}",
            f"--cert-dir={self.state_dir / 'certificates'}",
            f"--bind-address={self._address}",
            f"--advertise-address={self._address}",
            f"--secure-port={port}",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={self._key_path}",
            f"--service-account-signing-key-file={self._key_path}",
            f"--token-auth-file={self._tokens_path}",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction,OwnerReferencesPermissionEnforcement",
            "--service-cluster-ip-range=10.99.0.0/24",
            "--allow-privileged=true",
            *(self._kubelet_arguments() if self._pods else _NO_PODS),
        ]

    def _kubelet_arguments(self) -> list[str]:
        """How the API server proves to a kubelet who it is, and where it looks for one."""
        return [
            f"--kubelet-client-certificate={self._kubelet_client.certificate}",
            f"--kubelet-client-key={self._kubelet_client.key}",
            "--kubelet-preferred-address-types=InternalIP",
        ]

    def _scheduler_arguments(self) -> list[str]:
        return [
            f"--kubeconfig={self.kubeconfig}",
            f"--authentication-kubeconfig={self.kubeconfig}",
            f"--authorization-kubeconfig={self.kubeconfig}",
            "--leader-elect=false",
            "--secure-port=0",
        ]

    def _controller_manager_arguments(self, garbage_collector_qps: float | None) -> list[str]:
        pace = (
            [f"--kube-api-qps={garbage_collector_qps:g}", f"--kube-api-burst={2 * garbage_collector_qps:g}"]
            if (garbage_collector_qps)
            else []
        )
        return [
            f"--kubeconfig={self.kubeconfig}",
            f"--authentication-kubeconfig={self.kubeconfig}",
            f"--authorization-kubeconfig={self.kubeconfig}",
            f"--service-account-private-key-file={self._key_path}",
            "--use-service-account-credentials=true",
            f"--root-ca-file={self.ca_path}",
            "--leader-elect=false",
            "--secure-port=0",
            # Where no kubelet renews our nodes' leases, this one would declare every node dead.
            *(() if self._pods else ("--controllers=*,-node-lifecycle-controller",)),
            *pace,
        ]

    @property
    def _key_path(self) -> Path:
        return self.state_dir / "service-account.key"

    @property
    def _tokens_path(self) -> Path:
        return self.state_dir / "tokens.csv"

    @property
    def kubelet_authority(self) -> Path:
        """By whom a kubelet knows the API server's own requests."""
        return self._kubelet_client.authority

    @property
    def _kubelet_client(self) -> Authority:
        return Authority(self.state_dir / "kubelet-client")

    @property
    def ca_path(self) -> Path:
        # The API server makes a certificate and its issuer at its first start, both in this file.
        return self.state_dir / "certificates" / "apiserver.crt"

    def _write_secrets(self) -> None:
        self.state_dir.mkdir(parents=True, exist_ok=True)
        self.state_dir.chmod(0o700)
        key = ec.generate_private_key(ec.SECP256R1()).private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.TraditionalOpenSSL,
            serialization.NoEncryption(),
        )
        self._key_path.write_bytes(key)
        tokens = [f'{self.token},admin,admin,"system:masters"']
        if self._pods:
            self._kubelet_client.issue("kube-apiserver-kubelet-client", "system:masters")
            tokens += [
                f'{self.kubelet_token},system:node:{self._pods.node},kubelet,"system:nodes"',
                f"{self.proxy_token},system:kube-proxy,kube-proxy,",
            ]
        self._tokens_path.write_text("".join(f"{line}\n" for line in tokens))

    def _write_kubeconfig(self) -> None:
        provisioning.write_kubeconfig(
            self.kubeconfig,
            provisioning.Cluster(server=self.url, ca=self.ca_path.read_bytes()),
            self.token,
        )
