"""Sessions as the HTTP API shows them: names of templates and parents where the objects hold uids."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

from forktree.kube.client import KubeClient
from forktree.kube.errors import NotFound
from forktree.models import Fork, Session, SessionTemplate
from forktree.wire import SessionInfo
from forktree_agent.control.facade import Facade

FORKS_ABOVE = 65
"""A fork of a fork of a fork …: as deep as a tree may be, so a longer way up is a cycle made by hand."""


def describe(session: Session, now: datetime, *, template: str, parent: str | None) -> SessionInfo:
    """`session` with the names of its template and parent."""
    status = session.status
    created = session.metadata.creation_timestamp or now
    return SessionInfo(
        session_id=session.metadata.name,
        template_id=template,
        phase=status.phase,
        ready=status.ready,
        age_secs=max(0.0, (now - created).total_seconds()),
        parent_session_id=parent,
        depth=status.depth,
        node=status.node or session.spec.node_name,
        mode=status.mode,
        level=status.level,
        reason=status.reason,
        message=status.message,
    )


async def describe_one(client: KubeClient, session: Session, now: datetime) -> SessionInfo:
    """One session; asks the API server for what stands in other objects."""
    return describe(
        session,
        now,
        template=await template_name(client, session),
        parent=await parent_name(client, session),
    )


def describe_newborn(facade: Facade, session: Session, now: datetime) -> SessionInfo:
    """A child of this node that has no object yet."""
    template, parent = facade.template_name(session), facade.parent_name(session)
    return describe(session, now, template=template, parent=parent)


async def describe_all(client: KubeClient, namespace: str, now: datetime) -> list[SessionInfo]:
    """Every session of `namespace`, by two lists whatever their number."""
    sessions, _ = await client.list(Session, namespace)
    templates = await _template_names(client, namespace)
    names = {session.metadata.uid: session.metadata.name for session in sessions}
    return [
        describe(
            session,
            now,
            template=_template_of(session, templates),
            parent=names.get(session.status.parent) if session.status.parent else None,
        )
        for session in sessions
    ]


async def template_name(client: KubeClient, session: Session) -> str:
    """The name of a session's template: said by a root, found by uid for a child."""
    if session.spec.template_ref is not None:
        return session.spec.template_ref.name
    return _template_of(session, await _template_names(client, session.metadata.namespace))


async def parent_name(client: KubeClient, session: Session) -> str | None:
    """The name of the session a child was forked from, found through its fork; None where that is gone."""
    reference = session.spec.fork_ref
    name = reference.name if reference is not None else None
    for _ in range(FORKS_ABOVE):
        if name is None:
            return None
        try:
            fork = await client.get(Fork, session.metadata.namespace, name)
        except NotFound:
            return None
        source = fork.spec.source
        if source.session is not None:
            return source.session.name
        name = source.fork.name if source.fork is not None else None
    return None


async def _template_names(client: KubeClient, namespace: str | None) -> Mapping[str, str]:
    templates, _ = await client.list(SessionTemplate, namespace)
    return {template.metadata.uid: template.metadata.name for template in templates}


def _template_of(session: Session, templates: Mapping[str, str]) -> str:
    if session.spec.template_ref is not None:
        return session.spec.template_ref.name
    uid = session.status.template_uid or ""
    return templates.get(uid, uid)
