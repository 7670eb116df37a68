"""What kopf calls: every event is decoded, noted or decided, and that is all.

Only `on.event` is used: every other decorator of kopf costs writes on each object, finalizers or annotations,
on the path between a fork and its machines.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

import aiohttp
import kopf
from pydantic import ValidationError

from forktree.kube.access import ClusterAccess
from forktree.kube.errors import KubeError
from forktree.models.base import GROUP, VERSION, ApiObject
from forktree.models.fork import Fork
from forktree.models.fork_node import ForkNode
from forktree.models.session import Session
from forktree.models.session_template import SessionTemplate
from forktree_operator.assigning import AgainSeconds, Assigning
from forktree_operator.cluster import Node
from forktree_operator.nodes import Nodes
from forktree_operator.sweep import Sweep
from forktree_operator.templates import Templates

log = logging.getLogger(__name__)

ObjectT = TypeVar("ObjectT", bound=ApiObject)
AssignedT = TypeVar("AssignedT", Session, Fork)


class Handlers:
    """One handler for each kind that is watched. None raises: kopf could only log it."""

    def __init__(
        self, access: ClusterAccess, templates: Templates, nodes: Nodes, assigning: Assigning, sweep: Sweep
    ) -> None:
        self._access, self._templates, self._nodes = access, templates, nodes
        self._assigning, self._sweep = assigning, sweep

    def registry(self) -> kopf.OperatorRegistry:
        """What to hand to kopf."""
        registry = kopf.OperatorRegistry()
        kopf.on.login(registry=registry)(self.login)
        for plural, handler in (
            ("sessions", self.on_unplaced_session),
            ("forks", self.on_unrouted_fork),
            ("sessiontemplates", self.on_template),
            ("forknodes", self.on_fork_node),
        ):
            kopf.on.event(GROUP, VERSION, plural, registry=registry)(handler)
        kopf.on.event("", "v1", "nodes", registry=registry)(self.on_node)
        return registry

    async def login(self, **_: object) -> kopf.AiohttpSession:
        """Credentials for kopf's own requests. Asked again when they are refused; kopf closes the session."""
        authorization = await self._access.authorization(fresh=True)
        session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=self._access.tls or True, limit=0),
            headers={} if authorization is None else {"Authorization": authorization},
        )
        return kopf.AiohttpSession(server=self._access.server_url, aiohttp_session=session)

    async def on_unplaced_session(self, event: kopf.RawEvent, **_: object) -> None:
        """A session without a node, as the watch is narrowed; leaving that view looks like a deletion."""
        await self._assign(Session, event, self._assigning.place_session)

    async def on_unrouted_fork(self, event: kopf.RawEvent, **_: object) -> None:
        """A fork without a node, as the watch is narrowed; leaving that view looks like a deletion."""
        await self._assign(Fork, event, self._assigning.route_fork)

    async def on_template(self, event: kopf.RawEvent, **_: object) -> None:
        template = _decode(SessionTemplate, event)
        if template is None:
            return
        if event["type"] == "DELETED":
            self._templates.forget(template)
        elif self._templates.observe(template):
            self._sweep.soon()  # Sessions may have been waiting for it.

    async def on_fork_node(self, event: kopf.RawEvent, **_: object) -> None:
        node = _decode(ForkNode, event)
        if node is None:
            return
        if event["type"] == "DELETED":
            self._nodes.forget(node.metadata.name)
        elif self._nodes.observe(node):
            self._sweep.soon()  # There is room that was not there before.

    async def on_node(self, event: kopf.RawEvent, **_: object) -> None:
        node = _decode(Node, event)
        if node is None or node.metadata.name not in self._nodes.names():
            return
        if event["type"] == "DELETED" or self._nodes.rebooted(
            node.metadata.name, node.status.node_info.boot_id
        ):
            self._sweep.soon()  # Whether anything is lost, the sweep decides.

    async def _assign(
        self,
        model: type[AssignedT],
        event: kopf.RawEvent,
        assign: Callable[[AssignedT], Awaitable[AgainSeconds]],
    ) -> None:
        assigned = None if event["type"] == "DELETED" else _decode(model, event)
        if assigned is None:
            return
        try:
            again_seconds = await assign(assigned)
        except KubeError as err:
            name = f"{assigned.metadata.namespace}/{assigned.metadata.name}"
            log.warning("decision_delayed kind=%s name=%s error=%s", assigned.kind, name, err)
            again_seconds = 1.0
        if again_seconds is not None:
            self._sweep.soon(again_seconds)


def _decode(model: type[ObjectT], event: kopf.RawEvent) -> ObjectT | None:
    """The event's object. None, and a line in the log, if this version cannot read it."""
    try:
        return model.model_validate(event["object"])
    except ValidationError as err:
        meta = event["object"].get("metadata", {})
        name = f"{meta.get('namespace')}/{meta.get('name')}"
        log.warning("object_unreadable kind=%s name=%s error=%s", model.resource.kind, name, err)
        return None
