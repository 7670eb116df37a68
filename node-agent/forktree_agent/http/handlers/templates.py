"""Where templates are ready, and what the node can do whose agent answers."""

from __future__ import annotations

from http import HTTPStatus
from typing import Final

from aiohttp import web

from forktree.kube.errors import NotFound
from forktree.models import BakePhase, ForkNode, SessionTemplate
from forktree.wire_trees import CanaryInfo, NodeInfo, TemplateInfo, TemplateNode
from forktree_agent.http import bodies
from forktree_agent.http.errors import Code, Refusal
from forktree_agent.http.table import Asked, Each, Right, Route


async def _list(asked: Asked) -> web.StreamResponse:
    templates, _ = await asked.client.list(SessionTemplate, asked.namespace)
    return bodies.array([described(each) for each in templates])


async def _get(asked: Asked) -> web.StreamResponse:
    name = asked.named("template_id")
    try:
        template = await asked.client.get(SessionTemplate, asked.namespace, name)
    except NotFound as err:
        sentence = f"there is no template {name} in the namespace {asked.namespace}"
        raise Refusal(Code.NO_TEMPLATE, sentence) from err
    return await bodies.answer(described(template))


async def _node(asked: Asked) -> web.StreamResponse:
    name = asked.facade.node_name
    try:
        status = (await asked.client.get(ForkNode, None, name)).status
    except NotFound:
        return await bodies.answer(NodeInfo(node=name, ready=False))  # Nothing was published of it yet.
    canary = status.canary
    body = NodeInfo(
        node=name,
        ready=status.ready,
        engine=status.engine,
        accelerator=status.accelerator,
        canary=None
        if canary is None
        else CanaryInfo(
            passed=canary.passed,
            reason=canary.reason,
            message=canary.message,
            boot_ms=canary.boot_ms,
            fork_ms=canary.fork_ms,
        ),
        capacity_bytes=status.capacity_bytes,
        reserved_bytes=status.reserved_bytes,
        agent_version=status.agent_version,
        endpoint=status.endpoint,
    )
    return await bodies.answer(body)


def described(template: SessionTemplate) -> TemplateInfo:
    """A template, and where it is ready."""
    nodes = template.status.nodes
    return TemplateInfo(
        template_id=template.metadata.name,
        image=template.spec.image,
        ready_nodes=sum(each.phase is BakePhase.READY for each in nodes),
        nodes=tuple(
            TemplateNode(
                node=each.node,
                phase=each.phase,
                reason=each.reason,
                message=each.message,
                baseline_id=each.baseline_id,
                boot_ms=each.boot_ms,
            )
            for each in nodes
        ),
        standby=template.spec.standby,
    )


ROUTES: Final = (
    Route(
        method="GET",
        path="/templates",
        summary="The templates of the namespace, and where they are ready",
        handler=_list,
        rights=(Right("list", "sessiontemplates"),),
        answers={HTTPStatus.OK: (Each(TemplateInfo),)},
    ),
    Route(
        method="GET",
        path="/templates/{template_id}",
        summary="One template, and where it is ready",
        handler=_get,
        rights=(Right("get", "sessiontemplates"),),
        answers={HTTPStatus.OK: (TemplateInfo,)},
    ),
    Route(
        method="GET",
        path="/node",
        summary="What the node can do whose agent answers, and why not more",
        handler=_node,
        rights=(Right("get", "forknodes"),),
        answers={HTTPStatus.OK: (NodeInfo,)},
    ),
)
