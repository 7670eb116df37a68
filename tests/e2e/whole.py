"""What tests of the whole system ask of it: objects by kubectl, commands by HTTP, processes by pid."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from forktree_dev import provisioning
from forktree_dev.system import Node, System

API = "forktree.dev/v1alpha1"
SECONDS = 120.0


@dataclass(slots=True)
class Whole:
    """One user of one namespace, who speaks to the agent of `node`."""

    system: System
    node: Node
    namespace: str
    token: str
    http: aiohttp.ClientSession

    @classmethod
    @asynccontextmanager
    async def using(cls, system: System, namespace: str) -> AsyncGenerator[Whole]:
        kubectl = system.kubectl
        await kubectl.run("create", "rolebinding", "tester", "--clusterrole=edit",
                          f"--serviceaccount={namespace}:default", "-n", namespace)  # fmt: skip
        token = await provisioning.user_token(kubectl, "default", namespace=namespace)
        async with _speaking_to(system.nodes[0], token) as http:
            whole = cls(system, system.nodes[0], namespace, token, http)
            yield whole
            await kubectl.run("delete", "sessions,forks", "--all", "-n", namespace, timeout_seconds=SECONDS)

    @asynccontextmanager
    async def at(self, node: Node) -> AsyncGenerator[Whole]:
        """The same user, who speaks to another node's agent."""
        async with _speaking_to(node, self.token) as http:
            yield Whole(self.system, node, self.namespace, self.token, http)

    async def names(self) -> set[str]:
        """All sessions and forks that are there, as kubectl names them."""
        listed = await self.kubectl("get", "sessions,forks", "-o", "name")
        return {line.replace(".forktree.dev", "") for line in listed.split()}

    async def names_are(self, expected: set[str]) -> None:
        """Wait until these are there and no others: objects go at the collector's pace."""
        deadline = asyncio.get_running_loop().time() + SECONDS
        while (found := await self.names()) != expected:
            assert asyncio.get_running_loop().time() < deadline, (found - expected, expected - found)
            await asyncio.sleep(0.1)

    async def template(self, name: str = "tiny", **spec: object) -> None:
        await self.apply(
            "SessionTemplate", name, {"image": "builtin:tiny", "machine": {"memory": "128Mi"}} | spec
        )

    async def session(self, name: str = "root", template: str = "tiny") -> None:
        """Apply a session and wait until it runs."""
        await self.apply("Session", name, {"templateRef": {"name": template}})
        await self.ready("session", name)

    async def fork(
        self, name: str, source: str = "root", *, replicas: int = 1, kind: str = "session"
    ) -> None:
        await self.apply("Fork", name, {"source": {kind: {"name": source}}, "replicas": replicas})

    async def forked(self, name: str, source: str = "root", *, replicas: int = 1) -> list[str]:
        """Apply a fork, wait until all of it is there, and name its children."""
        await self.fork(name, source, replicas=replicas)
        await self.ready("fork", name)
        await self.wait("fork", name, f"jsonpath={{.status.recorded}}={replicas}")
        children = [child["name"] for child in (await self.status("fork", name))["children"]]
        for child in children:
            await self.ready("session", child)
        return children

    async def apply(self, kind: str, name: str, spec: dict[str, object]) -> None:
        metadata = {"name": name, "namespace": self.namespace}
        await self.system.kubectl.apply({"apiVersion": API, "kind": kind, "metadata": metadata, "spec": spec})

    async def ready(self, kind: str, name: str) -> None:
        await self.wait(kind, name, "condition=Ready")

    async def failed(self, kind: str, name: str) -> tuple[str, str]:
        """Wait until it has failed. Returns the reason and the sentence."""
        await self.wait(kind, name, "jsonpath={.status.phase}=Failed")
        status = await self.status(kind, name)
        assert status["ready"] is False
        return status["reason"], status["message"]

    async def wait(self, kind: str, name: str, what: str) -> None:
        await self.kubectl("wait", f"{kind}/{name}", f"--for={what}", f"--timeout={SECONDS:.0f}s")

    async def gone(self, kind: str, *names: str) -> None:
        for name in names:
            await self.wait(kind, name, "delete")

    async def delete(self, kind: str, name: str, *options: str) -> None:
        await self.kubectl("delete", kind, name, *options)

    async def status(self, kind: str, name: str) -> dict[str, Any]:
        found = await self.system.kubectl.json("get", kind, name, "-n", self.namespace)
        status: dict[str, Any] = found.get("status", {})
        return status

    async def kubectl(self, *arguments: str) -> str:
        return await self.system.kubectl.run(*arguments, "-n", self.namespace, timeout_seconds=SECONDS + 10)

    async def post(self, path: str, body: dict[str, object]) -> tuple[int, dict[str, Any]]:
        url = f"{self.node.url}/ns/{self.namespace}/v1/{path}"
        async with self.http.post(url, json=body) as answer:
            return answer.status, await answer.json()

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.http.get(f"{self.node.url}/ns/{self.namespace}/v1/{path}") as answer:
            return answer.status, await answer.json()

    async def sh(self, session: str, script: str) -> str:
        """What the script prints in the session. Fails when it fails."""
        status, body = await self.post(f"sessions/{session}/exec", {"command": script, "timeout_seconds": 60})
        assert status == 200, body
        assert body["exit_code"] == 0, body
        stdout: str = body["stdout"]
        return stdout

    def machines(self) -> set[int]:
        """Process ids of all QEMUs that the node's keeper has, but for those that wait for a fork to come."""
        assert self.node.keeper.pid is not None
        return {pid for pid in children_of(self.node.keeper.pid) if not self._waits(pid)}

    def _waits(self, pid: int) -> bool:
        try:
            arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            name = arguments[arguments.index(b"-name") + 1].decode().partition(",")[0]
            record = self.node.machine_dir / "journal" / "machine" / f"{name.removeprefix('forktree-')}.json"
            return bool(json.loads(record.read_text())["record"]["waiting"])
        except (OSError, ValueError, KeyError):
            return False

    async def machines_are(self, expected: set[int]) -> None:
        """Wait until exactly these machines run."""
        await until(lambda: self.machines() == expected)

    async def crash_agent(self) -> None:
        """`kill -9` the agent, start another, and wait until that one answers."""
        await self.node.agent.kill()
        await self.revive_agent()

    async def revive_agent(self) -> None:
        """Start the agent, and wait until it answers."""
        self.node.agent.start()
        await self.answered()

    async def answered(self) -> None:
        """Wait until the agent answers."""
        async with asyncio.timeout(SECONDS):
            while not await self._answers():  # noqa: ASYNC110  # Nothing announces a server to a stranger.
                await asyncio.sleep(0.1)

    async def _answers(self) -> bool:
        try:
            async with self.http.get(f"{self.node.url}/v1/health") as answer:
                return answer.status == 200
        except aiohttp.ClientError:
            return False


def _speaking_to(node: Node, token: str) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(ssl=ssl.create_default_context(cafile=str(node.ca_path))),
        headers={"Authorization": f"Bearer {token}"},
        timeout=aiohttp.ClientTimeout(total=SECONDS),
    )


async def until(holds: Callable[[], bool]) -> None:
    """Wait for what nobody announces to a third party: that processes have come or gone."""
    async with asyncio.timeout(SECONDS):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def children_of(pid: int) -> set[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return {int(child) for child in children if "qemu" in _name(int(child))}


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text()
    except OSError:
        return ""
