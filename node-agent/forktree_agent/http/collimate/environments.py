"""SessionTemplates as this protocol's templates: made, sized and shown.

Its pool of warm machines is our `standby`: so many on each node.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final
from urllib.parse import urlsplit

from pydantic import ValidationError

from forktree.kube.client import KubeClient
from forktree.kube.errors import AlreadyExists, NotFound
from forktree.models import ObjectMeta, Session, SessionTemplate
from forktree.models.reasons import BakePhase
from forktree.models.session_template import (
    EnvVar,
    ExecAction,
    HttpGetAction,
    ReadinessProbe,
    SessionTemplateSpec,
)
from forktree_agent.http.collimate.sandboxes import Visit
from forktree_agent.http.collimate.wire import (
    WIDTH_MAX,
    Image,
    MakeTemplate,
    OnNode,
    Ready,
    TemplateMade,
    TemplateStatus,
)
from forktree_agent.http.errors import Code, Refusal
from forktree_agent.http.handlers.templates import described
from forktree_agent.http.naming import FOR_CALLERS

BEFORE_ANNOTATION: Final = "forktree.dev/standby-before"
"""On a template whose `standby` follows an expected width: what it was, and will be again."""

_HERE: Final = {"localhost", "127.0.0.1"}


def image(template: SessionTemplate) -> Image:
    """What can be started from it."""
    name, spec = template.metadata.name, template.spec
    return Image(
        id=name, name=name, image=spec.image, description=f"{spec.image} with {spec.machine.memory} of memory"
    )


def status(template: SessionTemplate) -> TemplateStatus:
    """How it stands on its nodes."""
    spec, nodes = template.spec, template.status.nodes
    ready = [each for each in nodes if each.phase is BakePhase.READY]
    failed = [each for each in nodes if each.phase is BakePhase.FAILED]
    on_nodes = tuple(
        OnNode(node=each.node, warm=spec.standby if each.phase is BakePhase.READY else 0) for each in nodes
    )
    return TemplateStatus(
        **dict(described(template)),
        id=template.metadata.name,
        name=template.metadata.name,
        phase=phase(template),
        declared=spec.standby,
        warm=sum(each.warm for each in on_nodes),
        per_node=on_nodes,
        # A pool of nothing is as wide as it was asked to be.
        converge_state="converged" if ready or spec.standby == 0 else "converging",
        error=next((each.message for each in failed if each.message), ""),
        build_fails=len(failed),
    )


def phase(template: SessionTemplate) -> str:
    """One word for all nodes."""
    seen = {each.phase for each in template.status.nodes}
    if BakePhase.READY in seen:
        return "Live"
    if BakePhase.BAKING in seen:
        return "Converting"
    return "Failed" if seen else "Pending"


async def make(visit: Visit, wanted: MakeTemplate) -> TemplateMade:
    """The template, new or as it is already. Raises `Refusal` for another of that name."""
    before, standby = _width(wanted.pool.width), _width(max(wanted.pool.width, wanted.expected_width))
    template = SessionTemplate(
        metadata=ObjectMeta(
            name=wanted.name,
            namespace=visit.namespace,
            annotations={BEFORE_ANNOTATION: str(before)} if standby > before else {},
        ),
        spec=_spec(wanted, standby),
    )
    try:
        made = await visit.client.create(template, manager=FOR_CALLERS)
    except AlreadyExists as err:
        made = await get(visit.client, visit.namespace, wanted.name)
        same = made.spec.model_copy(update={"standby": standby}) == template.spec
        if not same:
            sentence = f"a template {wanted.name} exists already and is another one: choose another name"
            raise Refusal(Code.CONFLICT, sentence) from err
    return TemplateMade(id=wanted.name, name=wanted.name, image=made.spec.image, phase=phase(made))


async def expect(visit: Visit, name: str, width: int) -> int:
    """Keep so many machines waiting until `release`. Returns how many that are. Raises `Refusal`."""
    template = await get(visit.client, visit.namespace, name)
    before = template.metadata.annotations.get(BEFORE_ANNOTATION, str(template.spec.standby))
    await _resize(visit, template, _width(width), before)
    return _width(width)


async def release(visit: Visit, name: str) -> str:
    """Keep as many as before, and say since when. Raises `Refusal`."""
    template = await get(visit.client, visit.namespace, name)
    before = template.metadata.annotations.get(BEFORE_ANNOTATION)
    if before is not None:
        await _resize(visit, template, _width(int(before) if before.isdecimal() else 0), None)
    return datetime.now(UTC).isoformat(timespec="seconds")


async def delete(visit: Visit, name: str) -> None:
    """Raises `Refusal`, also while sessions of it run."""
    template = await get(visit.client, visit.namespace, name)
    uid = template.metadata.uid
    users = [
        each.metadata.name
        for each in (await visit.client.list(Session, visit.namespace)).items
        if not each.status.phase.terminal and not each.metadata.deleting and _is_of(each, name, uid)
    ]
    if users:
        sentence = f"{len(users)} sandboxes of template {name} are there, {users[0]} among them: delete these"
        raise Refusal(Code.TEMPLATE_IN_USE, sentence)
    try:
        await visit.client.delete(SessionTemplate, visit.namespace, name, uid=uid)
    except NotFound as err:
        raise _unknown(visit.namespace, name) from err


async def get(client: KubeClient, namespace: str, name: str) -> SessionTemplate:
    """Raises `Refusal`."""
    try:
        return await client.get(SessionTemplate, namespace, name)
    except NotFound as err:
        raise _unknown(namespace, name) from err


async def _resize(visit: Visit, template: SessionTemplate, standby: int, before: str | None) -> None:
    metadata = {"uid": template.metadata.uid, "annotations": {BEFORE_ANNOTATION: before}}
    patch = {"metadata": metadata, "spec": {"standby": standby}}
    try:
        await visit.client.merge_patch(
            SessionTemplate, visit.namespace, template.metadata.name, patch, manager=FOR_CALLERS
        )
    except NotFound as err:
        raise _unknown(visit.namespace, template.metadata.name) from err


def _spec(wanted: MakeTemplate, standby: int) -> SessionTemplateSpec:
    ready = wanted.ready or Ready()
    if ready.network or ready.ports:
        raise Refusal(
            Code.BAD_REQUEST,
            "a template of this protocol declares no network and no ports: leave `ready.network` and"
            " `ready.ports` out, or make a SessionTemplate that has them",
        )
    if not wanted.image.startswith(("builtin:", "oci:")):
        raise Refusal(
            Code.BAD_REQUEST,
            "`image` must be one that the nodes have, like builtin:python, or one of a registry, like"
            " oci:registry.example.com/team/app:1.2",
        )
    try:
        return SessionTemplateSpec(
            image=wanted.image,
            env=tuple(EnvVar(name=name, value=value) for name, value in ready.env.items()),
            readiness_probe=_probe(ready),
            standby=standby,
        )
    except ValidationError as err:
        first = err.errors(include_url=False, include_context=False, include_input=False)[0]
        raise Refusal(Code.BAD_REQUEST, f"`ready`: {first['msg'].removeprefix('Value error, ')}") from None


def _probe(ready: Ready) -> ReadinessProbe | None:
    if ready.http:
        tries = ready.http_timeout_s or ReadinessProbe().failure_threshold  # One a second.
        return ReadinessProbe(http_get=_http_get(ready.http), failure_threshold=tries)
    if ready.cmd:
        return ReadinessProbe(exec=ExecAction(command=("/bin/sh", "-c", ready.cmd)))
    return None


def _http_get(url: str) -> HttpGetAction:
    refusal = Refusal(
        Code.BAD_REQUEST, "`ready.http` must be a URL inside the machine, like http://localhost:8080/health"
    )
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port or 80
    except ValueError:
        raise refusal from None
    if host not in _HERE or parts.scheme != "http":
        raise refusal
    return HttpGetAction(port=port, path=(parts.path or "/") + (f"?{parts.query}" if parts.query else ""))


def _width(asked: int) -> int:
    return min(asked, WIDTH_MAX)


def _is_of(session: Session, name: str, uid: str) -> bool:
    reference = session.spec.template_ref
    return session.status.template_uid == uid or (reference is not None and reference.name == name)


def _unknown(namespace: str, name: str) -> Refusal:
    return Refusal(Code.NO_TEMPLATE, f"there is no template {name} in the namespace {namespace}")
