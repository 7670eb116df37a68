"""An installed forktree as a user of one namespace sees it, and as somebody at the node does."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from forktree_dev import provisioning
from forktree_dev.container_images import BuiltImage
from forktree_dev.kubectl import Kubectl
from forktree_dev.real_node.cluster import RealCluster
from forktree_keeper.cgroups import ControlGroups

API = "forktree.dev/v1alpha1"
SECONDS = 180.0
_RETRY_SECONDS = 0.1


class Steps:
    """Prints each step with the seconds since the first."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self._began:7.1f} s  {text}", flush=True)


class User:
    """Who may edit one namespace, speaking to the agent of the node."""

    def __init__(self, kubectl: Kubectl, namespace: str, http: aiohttp.ClientSession, url: str) -> None:
        self._kubectl = kubectl
        self.namespace = namespace
        self._http = http
        self.url = url

    @classmethod
    @asynccontextmanager
    async def using(cls, cluster: RealCluster, namespace: str) -> AsyncGenerator[User]:
        kubectl = cluster.kubectl
        account = f"{namespace}:default"
        await kubectl.run("create", "namespace", namespace)
        await kubectl.run(
            *("create", "rolebinding", "user", "--clusterrole=edit", f"--serviceaccount={account}"),
            f"--namespace={namespace}",
        )
        token = await provisioning.user_token(kubectl, "default", namespace=namespace)
        status = (await kubectl.json("get", "forknode", cluster.node.name))["status"]
        trust = ssl.create_default_context(cadata=status["caBundle"])
        async with aiohttp.ClientSession(
            # Not kept: what is at the address may be another process at the next request.
            connector=aiohttp.TCPConnector(ssl=trust, force_close=True),
            headers={"Authorization": f"Bearer {token}"},
            timeout=aiohttp.ClientTimeout(total=60),
        ) as http:
            yield cls(kubectl, namespace, http, status["endpoint"])

    async def apply(self, kind: str, name: str, spec: dict[str, object]) -> None:
        metadata = {"name": name, "namespace": self.namespace}
        await self._kubectl.apply({"apiVersion": API, "kind": kind, "metadata": metadata, "spec": spec})

    async def wait(self, what: str, condition: str, *options: str) -> None:
        await self.kubectl("wait", what, *options, f"--for={condition}", f"--timeout={SECONDS:.0f}s")

    async def kubectl(self, *arguments: str) -> str:
        return await self._kubectl.run(
            *arguments, f"--namespace={self.namespace}", timeout_seconds=SECONDS + 10
        )

    async def children(self, fork: str) -> list[str]:
        status = (await self._kubectl.json("get", "fork", fork, f"--namespace={self.namespace}"))["status"]
        return [child["name"] for child in status["children"]]

    async def sh(self, session: str, script: str) -> str:
        """What the script prints in the session."""
        url = f"{self.url}/ns/{self.namespace}/v1/sessions/{session}/exec"
        async with self._http.post(url, json={"command": script, "timeout_seconds": 30}) as answer:
            body: dict[str, Any] = await answer.json()
        assert answer.status == 200, body
        assert body["exit_code"] == 0, body
        stdout: str = body["stdout"]
        return stdout.strip()

    async def sh_when_it_answers(self, session: str, script: str) -> str:
        """The same, asked again while nobody is at the address: what a client does that retries."""
        deadline = asyncio.get_running_loop().time() + SECONDS
        while True:
            try:
                return await self.sh(session, script)
            except aiohttp.ClientConnectionError:
                assert asyncio.get_running_loop().time() < deadline, "the agent did not come back"
                await asyncio.sleep(_RETRY_SECONDS)


async def in_service(cluster: RealCluster) -> None:
    """Returns when the agent of the node says that it takes sessions."""
    what = f"forknode/{cluster.node.name}"
    for condition in ("create", "jsonpath={.status.ready}=true"):
        wait = ("wait", what, f"--for={condition}", f"--timeout={SECONDS:.0f}s")
        await cluster.kubectl.run(*wait, timeout_seconds=SECONDS + 10)


async def from_a_pod(kubectl: Kubectl, image: BuiltImage, script: str, **env: str) -> str:
    """What the Python script prints in a pod of the default namespace that may do nothing."""
    container = {
        "name": "script",
        "image": image.reference,
        "imagePullPolicy": "Never",
        "command": ["python3", "-c", script],
        "env": [{"name": name, "value": value} for name, value in env.items()],
    }
    spec = {
        "containers": [container],
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": 1,
    }
    await kubectl.apply({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "script"}, "spec": spec})
    succeeded = ("pod/script", "--for=jsonpath={.status.phase}=Succeeded", "--timeout=60s")
    try:
        await kubectl.run("wait", *succeeded, timeout_seconds=70)
    finally:
        said = await kubectl.run("logs", "script")
        await kubectl.run("delete", "pod", "script")
        print(said)
    return said


def machines(cluster: RealCluster) -> set[str]:
    """Names of all QEMUs below the keeper's control group, whoever believes what of them."""
    found: set[str] = set()
    root = ControlGroups.found(Path("/sys/fs/cgroup"), cluster.machines_cgroup).roots[0]
    for group in root.glob("**/cgroup.procs"):
        for pid in group.read_text().split():
            arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if b"-name" in arguments:
                found.add(arguments[arguments.index(b"-name") + 1].decode())
    return found


def on_node(cluster: RealCluster, *command: str) -> str:
    """What a command prints on the node itself."""
    inside = cluster.inside(command)
    return subprocess.run(inside, check=True, capture_output=True, text=True).stdout
