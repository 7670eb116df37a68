"""A system at work, so that there is something to see: searches, mistakes, and an API server that is away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Final

import forktree
from forktree.errors import ClientError
from forktree_dev import provisioning
from forktree_dev.node import metrics_url
from forktree_dev.system import System

NAMESPACE: Final = "working"
_API: Final = "forktree.dev/v1alpha1"
_WAIT_SECONDS: Final = 120.0
_FAR_TOO_MANY: Final = 250
"""Children, for any node that this is done on."""
_WORTH: Final = "usleep $((RANDOM * 10)); echo $RANDOM"


def metrics_urls(system: System) -> Mapping[str, str]:
    """Where all parts serve metrics, by the names of their instances."""
    nodes = {node.name: node.metrics_url for node in system.nodes}
    return {**nodes, "operator": metrics_url(system.operator)}


class Work:
    """What one user does, over HTTP and by objects."""

    def __init__(self, system: System, client: forktree.AsyncClient) -> None:
        self._system, self._client = system, client
        self._named = 0

    @classmethod
    @asynccontextmanager
    async def begun(cls, system: System) -> AsyncGenerator[Work]:
        """With a namespace and a template, and rights to use them."""
        kubectl = system.kubectl
        await kubectl.run("create", "namespace", NAMESPACE)
        account = f"--serviceaccount={NAMESPACE}:default"
        await kubectl.run("create", "rolebinding", "user", "--clusterrole=edit", account, "-n", NAMESPACE)
        token = await provisioning.user_token(kubectl, "default", namespace=NAMESPACE)
        async with forktree.AsyncClient(
            system.url, token=token, ca=system.ca_path, namespace=NAMESPACE
        ) as client:
            work = cls(system, client)
            machine = {"memory": "128Mi"}
            await work._apply("SessionTemplate", "tiny", {"image": "builtin:tiny", "machine": machine})
            yield work

    async def search(self, *, depth: int, width: int) -> None:
        """From a new root down, each time on from the child that is worth most; then all of it goes."""
        async with self._root() as root:
            here = root
            for _ in range(depth):
                children = await here.fork(width)
                done = await self._client.exec_each(children, _WORTH, check=True)
                worth = {child: float(result.stdout) for child, result in zip(children, done, strict=True)}
                await self._client.score(worth)
                here = max(children, key=lambda child: worth[child])
                await self._client.prune(child for child in children if child != here)

    async def by_objects(self) -> None:
        """A Fork with a command for each branch, whose best child is kept, until all of it goes."""
        async with self._root() as root:
            await self._fork(
                root.id,
                replicas=3,
                branches=[{"exec": {"argv": ["sh", "-c", f"exit {number % 2}"]}} for number in range(3)],
                score={"exec": {"argv": ["sh", "-c", "echo $RANDOM"]}},
                prune={"keepTop": 1},
            )
            await self._wait(f"fork/{self._last}", "condition=Complete")

    async def mistakes(self) -> None:
        """Commands that take too long or cannot be, sessions that nobody has, forks that find no room or no
        source, and a guest that ends itself."""
        async with self._root() as root:
            await root.exec("sleep 60", timeout=0.5)
            refusals = (
                root.exec(["/no/such/program"]),
                root.fork(_FAR_TOO_MANY),
                self._client.sessions.get("nobody"),
            )
            for refused in refusals:
                with suppress(ClientError):
                    await refused
            await self._fork(root.id, replicas=_FAR_TOO_MANY, timeoutSeconds=3)
            hopeless = self._last
            await self._fork("nobody")
            await self._wait(f"fork/{hopeless}", "jsonpath={.status.phase}=Failed")
            await self._wait(f"fork/{self._last}", "jsonpath={.status.phase}=Failed")
            await self._kubectl("delete", "fork", self._last)
            (lost,) = await root.fork(1)
            with suppress(ClientError):
                await lost.exec("reboot -f", timeout=5)
            await self._wait(f"session/{lost.id}", "jsonpath={.status.phase}=Failed")

    async def outage(self, seen: Callable[[], Awaitable[object]]) -> None:
        """The API server is away while somebody forks, until `seen`; all is written when it is back."""
        plane = self._system.control_plane
        assert plane is not None, "this system's API server is somebody else's"
        async with self._root() as root:
            await root.fork(1)  # So that it is known for some seconds that he who asks may.
            await plane.api_server.kill()
            try:
                await root.fork(2)
                await seen()
            finally:
                plane.api_server.start()
                await plane.ready(deadline=asyncio.get_running_loop().time() + _WAIT_SECONDS)
                for part in (self._system.operator, plane.controller_manager):
                    part.start()  # Either may have ended itself by then.

    @asynccontextmanager
    async def standing(self, *, width: int) -> AsyncGenerator[None]:
        """A fork whose children run within."""
        async with self._root() as root:
            await root.fork(width)
            yield

    @asynccontextmanager
    async def _root(self) -> AsyncGenerator[forktree.AsyncSession]:
        root = await self._client.sessions.create("tiny", timeout=_WAIT_SECONDS)
        try:
            yield root
        finally:
            await root.delete()

    @property
    def _last(self) -> str:
        """Name of the Fork that was asked for last."""
        return f"fork-{self._named}"

    async def _fork(self, source: str, **spec: object) -> None:
        self._named += 1
        await self._apply("Fork", self._last, {"source": {"session": {"name": source}}, **spec})

    async def _apply(self, kind: str, name: str, spec: dict[str, object]) -> None:
        metadata = {"name": name, "namespace": NAMESPACE}
        await self._system.kubectl.apply(
            {"apiVersion": _API, "kind": kind, "metadata": metadata, "spec": spec}
        )

    async def _wait(self, what: str, condition: str) -> None:
        await self._kubectl("wait", what, f"--for={condition}", f"--timeout={_WAIT_SECONDS:g}s")

    async def _kubectl(self, *arguments: str) -> None:
        await self._system.kubectl.run(
            *arguments, f"--namespace={NAMESPACE}", timeout_seconds=_WAIT_SECONDS + 10
        )
