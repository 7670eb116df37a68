"""Fork once, through all parts: what `helm test` runs."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping

from forktree.errors import ForktreeError
from forktree.kube.client import KubeClient
from forktree.kube.errors import NotFound
from forktree.models import Fork, ForkPhase, Session, SessionPhase, SessionTemplate
from forktree.models.base import API_VERSION, ApiObject
from forktree_operator.jobs.telling import NotInTime, say, until

_CHILDREN = 2


async def fork_once(client: KubeClient, namespace: str, image: str, *, deadline: float) -> None:
    """A template, a session, a fork of it, and all of them gone again, whatever happens."""
    trial = _Trial(client, namespace, f"forktree-test-{secrets.token_hex(3)}", deadline)
    try:
        await trial.create(SessionTemplate, {"image": image, "machine": {"memory": "128Mi"}})
        await trial.create(Session, {"templateRef": {"name": trial.name}})
        await until(trial.session_ready, "the session to be ready", deadline=deadline)
        trial.tell("a session runs")
        source = {"session": {"name": trial.name}}
        await trial.create(Fork, {"source": source, "replicas": _CHILDREN})
        await until(trial.fork_ready, "the fork to be ready", deadline=deadline)
        fork = await client.get(Fork, namespace, trial.name, deadline=deadline)
        trial.tell(f"{fork.status.ready_replicas} children run, forked in {fork.status.fork_ms} ms")
    finally:
        await trial.delete()
    await until(trial.left, "all of it to be gone", deadline=deadline)
    trial.tell("session, fork and children are gone")


class _Trial:
    def __init__(self, client: KubeClient, namespace: str, name: str, deadline: float) -> None:
        self._client, self._namespace, self.name, self._deadline = client, namespace, name, deadline
        self._began = time.monotonic()

    def tell(self, what: str) -> None:
        say(f"{time.monotonic() - self._began:6.1f} s  {what}")

    async def create(self, kind: type[ApiObject], spec: Mapping[str, object]) -> None:
        metadata = {"name": self.name, "namespace": self._namespace}
        body = {"apiVersion": API_VERSION, "kind": kind.resource.kind, "metadata": metadata, "spec": spec}
        path = kind.collection_path(self._namespace)
        await self._client.raw("POST", path, body, deadline=self._deadline)

    async def session_ready(self) -> str:
        status = (await self._client.get(Session, self._namespace, self.name, deadline=self._deadline)).status
        if status.phase is SessionPhase.FAILED:
            raise NotInTime(f"the session failed: {status.reason}: {status.message}")
        return "" if status.ready else f"{status.phase or 'no phase'} {status.reason or ''}".strip()

    async def fork_ready(self) -> str:
        status = (await self._client.get(Fork, self._namespace, self.name, deadline=self._deadline)).status
        if status.phase is ForkPhase.FAILED:
            raise NotInTime(f"the fork failed: {status.reason}: {status.message}")
        return "" if status.ready else f"{status.phase or 'no phase'} {status.reason or ''}".strip()

    async def left(self) -> str:
        found = [
            f"{each.resource.kind} {each.metadata.name}"
            for kind in (Session, Fork)
            for each in (await self._client.list(kind, self._namespace, deadline=self._deadline)).items
            if each.metadata.name.startswith(self.name)
        ]
        return ", ".join(found)

    async def delete(self) -> None:
        """The session takes the fork and the children with it. Says what cannot be deleted, and goes on."""
        for kind in (Session, SessionTemplate):
            try:
                await self._client.delete(kind, self._namespace, self.name, propagation="Background")
            except NotFound:
                pass
            except ForktreeError as err:
                say(f"{kind.resource.kind} {self.name} could not be deleted: {err}")
