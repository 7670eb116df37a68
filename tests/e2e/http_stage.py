"""A real API server and the HTTP API in front of it, with scripted machines: for tests that play the rest."""

from __future__ import annotations

import asyncio
import io
import json
import ssl
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Never, cast

import aiohttp

from forktree.kube.access import ClusterAccess
from forktree.kube.client import KubeClient
from forktree.kube.errors import NotFound
from forktree.kube.watching import Changed, Deleted, Listed, watch
from forktree.models import Fork, Level, Mode, Session, Uid
from forktree_agent.control.activity import Activity
from forktree_agent.control.branch_logs import BranchLogs
from forktree_agent.control.branch_reports import BranchReports
from forktree_agent.control.facade import Facade, Known
from forktree_agent.control.newborns import Newborns
from forktree_agent.control.objects import Store
from forktree_agent.control.owners import owner_of
from forktree_agent.control.records import Limits, Lineage, Records, SessionRecord
from forktree_agent.engine.contract import (
    BaselineId,
    Command,
    CommandRefused,
    Engine,
    ExecNotFound,
    ExecResult,
    Machine,
    MachineId,
    MemoryUse,
    Owner,
    TreeId,
)
from forktree_agent.http.holding import HELD_BYTES
from forktree_agent.http.proxying import Proxy
from forktree_agent.http.routes import Api
from forktree_agent.http.server import Listener, serving
from forktree_agent.journal import Journal
from forktree_agent.metrics import Metrics
from forktree_dev import provisioning
from forktree_dev.control_plane import ControlPlane

NODE = "http-node"
SECONDS = 30.0

Answering = Callable[[Command], Awaitable[ExecResult]]


async def echo(command: Command) -> ExecResult:
    """Shows what reached the engine."""
    shown = {
        "argv": command.argv,
        "env": dict(command.env),
        "cwd": command.cwd,
        "stdin": command.stdin.decode(),
        "timeout": command.timeout_seconds,
    }
    return ExecResult(
        stdout=json.dumps(shown).encode(), stderr=b"\xff!", exit_code=3, timed_out=False, truncated=False
    )


class ScriptedEngine:
    """Stands for the machines: they exist because a test says so, and commands do what it scripts."""

    def __init__(self) -> None:
        self.running: dict[str, Machine] = {}
        self.answering: Answering = echo
        self.executed: list[MachineId] = []

    def machine_of(self, owner: Owner) -> Machine | None:
        return next((each for each in self.running.values() if each.owner == owner), None)

    async def answered(self, machine: MachineId, *, deadline: float) -> float | None:
        return None

    async def exec(self, machine: MachineId, command: Command, *, deadline: float) -> ExecResult:
        self.executed.append(machine)
        assert deadline > asyncio.get_running_loop().time() + command.timeout_seconds
        return await self.answering(command)

    async def execs_told(self, machine: MachineId, *, deadline: float) -> tuple[str, ...]:
        return ()

    async def begin(self, machine: MachineId, command: Command, *, deadline: float) -> str:
        raise CommandRefused("nothing outlives its caller here")

    def streaming(self, machine: MachineId, command: Command, *, deadline: float) -> Never:
        raise CommandRefused("nothing outlives its caller here")

    def reading(self, machine: MachineId, exec_id: str, **_: object) -> Never:
        raise ExecNotFound(f"no command {exec_id} runs there")

    async def write(self, machine: MachineId, exec_id: str, data: bytes, **_: object) -> None:
        raise ExecNotFound(f"no command {exec_id} runs there")

    async def kill_exec(self, machine: MachineId, exec_id: str, *, deadline: float) -> bool:
        raise ExecNotFound(f"no command {exec_id} runs there")

    async def attach(self, machine: MachineId, exec_id: str, *, deadline: float) -> ExecResult:
        raise ExecNotFound(f"no command {exec_id} runs there")

    async def memory(self, machine: MachineId, *, deadline: float) -> MemoryUse:
        assert machine in {each.id for each in self.running.values()}
        return MemoryUse(unique_bytes=5 << 20, shared_bytes=7 << 20)


class ByObject:
    """A node that forks nothing before its object is there."""

    async def fork(self, *_: object, **__: object) -> None:
        return None

    async def recorded(self, namespace: str, name: str) -> None:
        return None

    async def recorded_below(self, above: Uid) -> None:
        return None


@dataclass(kw_only=True)
class Stage:
    """The server under test, and what is needed to play the rest of the system around it."""

    namespace: str
    plane: ControlPlane
    admin: KubeClient
    agent: KubeClient
    """With the agent's rights, on its node."""
    url: str
    client: aiohttp.ClientSession
    token: str
    engine: ScriptedEngine
    sessions: Store[Session]
    records: Records
    ca_bundle: str

    async def ask(
        self, method: str, path: str, body: object = None, *, token: str | None = None, own: bool = False
    ) -> tuple[int, Any]:
        prefix = "/v1" if own else f"/ns/{self.namespace}/v1"
        async with self.client.request(
            method,
            f"{self.url}{prefix}{path}",
            data=None if body is None else io.BytesIO(json.dumps(body).encode()),
            headers={"Authorization": f"Bearer {self.token if token is None else token}"},
        ) as answer:
            return answer.status, await answer.json()

    async def template(self, name: str = "basic") -> None:
        await self.plane.kubectl.apply(
            {
                "apiVersion": "forktree.dev/v1alpha1",
                "kind": "SessionTemplate",
                "metadata": {"name": name, "namespace": self.namespace},
                "spec": {"image": "builtin:tiny"},
            }
        )

    async def session(self, name: str, **status: object) -> Session:
        """An object as the operator and an agent would leave it: by default it runs on this node."""
        await self.template()
        await self.plane.kubectl.apply(
            {
                "apiVersion": "forktree.dev/v1alpha1",
                "kind": "Session",
                "metadata": {"name": name, "namespace": self.namespace},
                "spec": {"templateRef": {"name": "basic"}},
            }
        )
        wanted = {"phase": "Running", "ready": True, "node": NODE, **status}
        return await self.admin.merge_patch(
            Session, self.namespace, name, {"status": wanted}, subresource="status"
        )

    async def session_here(self, name: str, **status: object) -> Session:
        """A session that control knows and a machine runs for."""
        session = await self.session(name, **status)
        uid = session.metadata.uid
        self.sessions.observe(session)
        self.engine.running[uid] = Machine(
            id=MachineId(f"m-{name}"),
            owner=owner_of(session),
            tree=TreeId(uid),
            baseline=BaselineId("b"),
            generation="g",
            mode=Mode.FORK,
            level=Level.MEMORY,
        )
        lineage = Lineage(
            root=uid, parent=None, depth=0, template_uid=uid, limits=Limits(depth=64, memory_bytes=None)
        )
        self.records.put_session(
            SessionRecord(
                owner=owner_of(session),
                uid=uid,
                namespace=self.namespace,
                name=name,
                lineage=lineage,
                seen_at=0.0,
            )
        )
        return session

    @asynccontextmanager
    async def answering(self, kind: type[Session] | type[Fork], **status: object) -> AsyncGenerator[None]:
        """Inside the block every new object of `kind` gets this status, as an agent would write it."""
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(self._answer(kind, status), name="play-agent")
            yield
            task.cancel()

    async def _answer(self, kind: type[Session] | type[Fork], status: dict[str, object]) -> None:
        answered: set[str] = set()
        async with aclosing(watch(self.admin, kind, namespace=self.namespace)) as events:
            async for event in events:
                match event:
                    case Listed(objects=objects):
                        seen = objects
                    case Changed(obj=obj):
                        seen = (obj,)
                    case Deleted():
                        continue
                for each in seen:
                    if each.metadata.uid not in answered and not each.status.ready:
                        answered.add(each.metadata.uid)
                        await self.admin.merge_patch(
                            kind,
                            self.namespace,
                            each.metadata.name,
                            {"status": status},
                            subresource="status",
                        )

    async def asked_for(self, kind: type[Session] | type[Fork]) -> list[str]:
        """Names of all objects of `kind`."""
        return [each.metadata.name for each in (await self.admin.list(kind, self.namespace)).items]

    async def exists(self, kind: type[Session] | type[Fork], name: str) -> bool:
        try:
            await self.admin.get(kind, self.namespace, name)
        except NotFound:
            return False
        return True


def rights(namespace: str, account: str) -> dict[str, object]:
    """All that this API offers, for one service account in one namespace."""
    rules = [
        {
            "apiGroups": ["forktree.dev"],
            "resources": ["sessions"],
            "verbs": ["create", "get", "list", "delete", "patch"],
        },
        {
            "apiGroups": ["forktree.dev"],
            "resources": ["forks"],
            "verbs": ["create", "get", "list", "delete"],
        },
        {"apiGroups": ["forktree.dev"], "resources": ["forks/log"], "verbs": ["get"]},
        {
            "apiGroups": ["forktree.dev"],
            "resources": ["sessiontemplates", "forknodes"],
            "verbs": ["get", "list"],
        },
        {"apiGroups": ["forktree.dev"], "resources": ["sessions/exec", "sessions/fork"], "verbs": ["create"]},
        {"apiGroups": ["forktree.dev"], "resources": ["sessions/exec"], "verbs": ["get"]},
        {
            "apiGroups": ["forktree.dev"],
            "resources": ["sessions/files"],
            "verbs": ["create", "get", "delete"],
        },
        {"apiGroups": ["forktree.dev"], "resources": ["sessions/proxy"], "verbs": ["create", "get"]},
    ]
    metadata = {"name": f"{account}-all", "namespace": namespace}
    objects: list[dict[str, object]] = [
        {
            "apiVersion": "v1",
            "kind": "ServiceAccount",
            "metadata": {"name": account, "namespace": namespace},
        },
        {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": metadata, "rules": rules},
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "RoleBinding",
            "metadata": metadata,
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": metadata["name"]},
            "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": namespace}],
        },
    ]
    return {"apiVersion": "v1", "kind": "List", "items": objects}


@asynccontextmanager
async def staged(
    control_plane: ControlPlane, namespace: str, tmp_path: Path, *, held_bytes: int = HELD_BYTES
) -> AsyncGenerator[Stage]:
    """The server, and a user of `namespace` who may do all that it offers."""
    kubectl = control_plane.kubectl
    await provisioning.create_node(kubectl, NODE)
    await provisioning.write_agent_kubeconfig(kubectl, NODE, tmp_path / "agent.kubeconfig")
    await kubectl.apply(rights(namespace, "user"))
    token = await provisioning.user_token(kubectl, "user", namespace=namespace)
    engine, sessions, records = (
        ScriptedEngine(),
        Store[Session](),
        Records(Journal.opened(tmp_path / "journal", "a boot")),
    )
    branches = BranchReports(records, BranchLogs.opened(tmp_path / "logs", set()))
    activity = Activity(time.monotonic)
    known = Known(sessions=sessions, templates=Store(), records=records, newborns=Newborns())
    facade = Facade(NODE, cast("Engine", engine), known, ByObject(), activity=activity, branches=branches)
    listener = Listener(
        host="127.0.0.1",
        port=0,
        names=("127.0.0.1", "localhost"),
        tls_directory=tmp_path / "tls",
        held_bytes=held_bytes,
    )
    async with (
        KubeClient.connected(ClusterAccess.from_kubeconfig(control_plane.kubeconfig)) as admin,
        KubeClient.connected(ClusterAccess.from_kubeconfig(tmp_path / "agent.kubeconfig")) as agent,
        Proxy.running(agent, NODE) as proxy,
        serving(listener, Api(agent, facade, proxy), Metrics().answered) as served,
    ):
        trust = ssl.create_default_context(cafile=str(served.authority))
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=trust)) as client:
            yield Stage(
                namespace=namespace,
                plane=control_plane,
                admin=admin,
                agent=agent,
                url=f"https://127.0.0.1:{served.port}",
                client=client,
                token=token,
                engine=engine,
                sessions=sessions,
                records=records,
                ca_bundle=served.ca_bundle,
            )
