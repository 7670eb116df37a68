"""Sessions as the HTTP API shows them: names of templates and parents where the objects hold uids."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from forktree.kube.client import KubeClient
from forktree.kube.errors import NotFound
from forktree.models import Fork, Session, SessionTemplate, Uid
from forktree.models.names import OUR_LABELS, ROOT_LABEL
from forktree.wire import SessionInfo
from forktree_agent.control.endpoints import endpoints_of
from forktree_agent.control.facade import Facade

FORKS_ABOVE = 65
"""A fork of a fork of a fork …: as deep as a tree may be, so a longer way up is a cycle made by hand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """What a session's object says by uid only."""

    template: str
    parent: str | None
    root: str | None
    endpoints: Mapping[str, str] = field(default_factory=dict[str, str])
    """Where its ports are reached, by name."""


def describe(session: Session, now: datetime, names: Names) -> SessionInfo:
    """`session` with the names of its template, its parent and its root."""
    return SessionInfo(**told(session, now, names))


def told(session: Session, now: datetime, names: Names) -> dict[str, Any]:
    """What `SessionInfo` says, by its fields."""
    spec, status = session.spec, session.status
    created = session.metadata.creation_timestamp or now
    labels = {key: text for key, text in session.metadata.labels.items() if OUR_LABELS not in key}
    return {
        "session_id": session.metadata.name,
        "template_id": names.template,
        "phase": status.phase,
        "ready": status.ready,
        "age_secs": max(0.0, (now - created).total_seconds()),
        "parent_session_id": names.parent,
        "depth": status.depth,
        "node": status.node or spec.node_name,
        "mode": status.mode,
        "level": status.level,
        "reason": status.reason,
        "message": status.message,
        "root": names.root,
        "fork_id": None if spec.fork_ref is None else spec.fork_ref.name,
        # What its user set counts, also before the node's agent has said so.
        "score": status.score if spec.score is None else spec.score,
        "rewards": spec.rewards or None,
        "labels": labels or None,
        "endpoints": dict(names.endpoints) or None,
        "fork_ms": status.fork_ms,
        "vm_generation_id": status.vm_generation_id,
        "baseline_id": status.baseline_id,
        "seed": status.seed or spec.seed,
    }


async def describe_one(client: KubeClient, facade: Facade, session: Session, now: datetime) -> SessionInfo:
    """One session; asks the API server for what stands in other objects, unless this node holds them."""
    parent = facade.session_of(session.status.parent or Uid(""))
    names = Names(
        template=await template_name(client, facade, session),
        parent=await parent_name(client, session) if parent is None else parent.metadata.name,
        root=await root_name(client, facade, session),
        endpoints=endpoints_of(session.status.endpoint, facade.ports(session)),
    )
    return describe(session, now, names)


def describe_newborn(facade: Facade, session: Session, now: datetime) -> SessionInfo:
    """A child of this node that has no object yet."""
    root = facade.session_of(session.status.root or Uid(""))
    names = Names(
        template=facade.template_name(session),
        parent=facade.parent_name(session),
        root=None if root is None else root.metadata.name,
        endpoints=endpoints_of(session.status.endpoint, facade.ports(session)),
    )
    return describe(session, now, names)


async def describe_all(client: KubeClient, namespace: str, now: datetime) -> list[SessionInfo]:
    """Every session of `namespace`, by two lists whatever their number."""
    sessions, _ = await client.list(Session, namespace)
    templates = await template_names(client, namespace)
    return [
        describe(session, now, names)
        for session, names in zip(sessions, names_among(sessions, templates), strict=True)
    ]


def names_among(sessions: Sequence[Session], templates: Mapping[str, str]) -> Iterator[Names]:
    """The names for each of `sessions`, where those above are among them. `templates`: names by uid."""
    names = {session.metadata.uid: session.metadata.name for session in sessions}
    for session in sessions:
        yield Names(
            template=_template_of(session, templates),
            parent=names.get(session.status.parent or Uid("")),
            root=session.metadata.name if session.spec.is_root else names.get(root_uid(session)),
        )


def root_uid(item: Session | Fork) -> Uid:
    """Of the session at the top of its tree, which a child says from its first moment; empty: not known."""
    return item.status.root or Uid(item.metadata.labels.get(ROOT_LABEL, ""))


async def root_name(client: KubeClient, facade: Facade, session: Session) -> str | None:
    """The name of the session at the top of its tree; None where that is gone, or not known yet."""
    if session.spec.is_root:
        return session.metadata.name
    root = await root_of(client, facade, session)
    return None if root is None else root.metadata.name


async def root_of(client: KubeClient, facade: Facade, item: Session | Fork) -> Session | None:
    """The session at the top of its tree; None where that is gone, or not known yet."""
    if isinstance(item, Session) and item.spec.is_root:
        return item
    uid = root_uid(item)
    known = facade.session_of(uid)
    if known is not None or not uid:
        return known
    namespace = item.metadata.namespace or ""
    # Of a tree that another node has: its first forks hang below the root itself, and name it.
    forks, _ = await client.list(Fork, namespace, label_selector=f"{ROOT_LABEL}={uid}")
    owners = (owner for fork in (*forks, item) for owner in fork.metadata.owner_references)
    name = next((owner.name for owner in owners if owner.uid == uid), None)
    if name is None:
        return None
    try:
        root = await client.get(Session, namespace, name)
    except NotFound:
        return None
    return root if root.metadata.uid == uid else None


async def template_name(client: KubeClient, facade: Facade, session: Session) -> str:
    """The name of a session's template: said by a root, found by uid for a child."""
    known = facade.template_name(session)
    if known != (session.status.template_uid or ""):
        return known
    return _template_of(session, await template_names(client, session.metadata.namespace))


async def parent_name(client: KubeClient, session: Session) -> str | None:
    """The name of the session a child was forked from, found through its fork; None where that is gone."""
    reference = session.spec.fork_ref
    return (
        None if reference is None else await source_name(client, session.metadata.namespace, reference.name)
    )


async def source_name(client: KubeClient, namespace: str | None, fork_name: str) -> str | None:
    """The name of the session whose instant a fork holds; None where what leads there is gone."""
    name: str | None = fork_name
    for _ in range(FORKS_ABOVE):
        if name is None:
            return None
        try:
            fork = await client.get(Fork, namespace, name)
        except NotFound:
            return None
        source = fork.spec.source
        if source.session is not None:
            return source.session.name
        name = source.fork.name if source.fork is not None else None
    return None


async def template_names(client: KubeClient, namespace: str | None) -> Mapping[str, str]:
    templates, _ = await client.list(SessionTemplate, namespace)
    return {template.metadata.uid: template.metadata.name for template in templates}


def _template_of(session: Session, templates: Mapping[str, str]) -> str:
    if session.spec.template_ref is not None:
        return session.spec.template_ref.name
    uid = session.status.template_uid or ""
    return templates.get(uid, uid)
