"""Sessions as each surface shows them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

from forktree.kube.errors import NotFound
from forktree.models import Fork, Session, SessionPhase
from forktree_agent.control.facade import Facade
from forktree_agent.http import locating
from forktree_agent.http.collimate import labels
from forktree_agent.http.collimate.sandboxes import Elsewhere, Visit
from forktree_agent.http.collimate.wire import DaemonSession, Sandbox
from forktree_agent.http.describing import parent_name
from forktree_agent.http.proxying import HOP_SECONDS

STATES: Final = {
    SessionPhase.PENDING: "starting",
    SessionPhase.STARTING: "starting",
    SessionPhase.RUNNING: "running",
    SessionPhase.PAUSED: "suspended",
    SessionPhase.RELEASED: "deleted",
    SessionPhase.FAILED: "failed",
}

_LIVE: Final = {SessionPhase.RUNNING, SessionPhase.PAUSED}


async def sandbox(visit: Visit, session_id: str) -> Sandbox:
    """One session that is there. Raises `Refusal` and `Elsewhere`."""
    session = await _found(visit, session_id)
    if not session.metadata.uid:  # A child that has no object yet; one with a label has.
        return _sandbox(visit, session, visit.facade.parent_name(session), labels.NONE)
    fork = await _fork_of(visit, session)
    return _sandbox(visit, session, await parent_name(visit.client, session), labels.found(session, fork))


async def sandboxes(visit: Visit) -> list[Sandbox]:
    """All sessions of the namespace that were not deleted or released."""
    sessions = (await visit.client.list(Session, visit.namespace)).items
    there = [each for each in sessions if not _is_over(each)]
    forks: dict[str, Fork] = {}
    if any(each.spec.fork_ref is not None for each in there):
        forks = {each.metadata.uid: each for each in (await visit.client.list(Fork, visit.namespace)).items}
    names = {each.metadata.uid: each.metadata.name for each in sessions}
    return [
        _sandbox(
            visit,
            each,
            names.get(each.status.parent) if each.status.parent else None,
            labels.found(each, forks.get(each.spec.fork_ref.uid) if each.spec.fork_ref else None),
        )
        for each in there
    ]


async def session(visit: Visit, session_id: str) -> DaemonSession:
    """One session that takes commands, on this node. Raises `Refusal` and `Elsewhere`."""
    found = await _found(visit, session_id)
    if node := locating.other_node(visit.facade, found):
        raise Elsewhere(node, visit.seen + HOP_SECONDS)
    return _session(visit.facade, found)


async def sessions(visit: Visit) -> list[DaemonSession]:
    """Those of the namespace that run on this node."""
    on_node = f"spec.nodeName={visit.facade.node_name}"
    listed = await visit.client.list(Session, visit.namespace, field_selector=on_node)
    return [
        _session(visit.facade, each)
        for each in listed.items
        if each.status.phase in _LIVE and not each.metadata.deleting
    ]


async def _found(visit: Visit, session_id: str) -> Session:
    """As the API server has it, or as its node does where it has no object yet."""
    try:
        found = await visit.client.get(Session, visit.namespace, session_id)
    except NotFound as err:
        found = await locating.find(visit.client, visit.facade, visit.namespace, session_id)
        if node := locating.other_node(visit.facade, found):
            raise Elsewhere(node, visit.seen + HOP_SECONDS) from err
        if found.metadata.uid:
            raise locating.no_such_session(session_id, visit.namespace) from err
    if _is_over(found):
        raise locating.no_such_session(session_id, visit.namespace)
    return found


async def _fork_of(visit: Visit, session: Session) -> Fork | None:
    reference = session.spec.fork_ref
    if reference is None:
        return None
    try:
        return await visit.client.get(Fork, visit.namespace, reference.name)
    except NotFound:
        return None


def _sandbox(visit: Visit, session: Session, parent: str | None, own: labels.Labels) -> Sandbox:
    return Sandbox(
        id=session.metadata.name,
        template=visit.facade.template_name(session),
        state=STATES[session.status.phase],
        label=own.label,
        labels=own.labels,
        parent=parent,
        node=session.status.node,
        age_secs=_age_seconds(session),
        message=session.status.message,
    )


def _session(facade: Facade, session: Session) -> DaemonSession:
    age_seconds = _age_seconds(session)
    idle_seconds = facade.idle_seconds(session)
    return DaemonSession(
        session_id=session.metadata.name,
        template_id=facade.template_name(session),
        age_secs=age_seconds,
        idle_secs=age_seconds if idle_seconds is None else round(idle_seconds, 3),
        exec_count=facade.exec_count(session),
    )


def _age_seconds(session: Session) -> float:
    now = datetime.now(UTC)
    return max(0.0, (now - (session.metadata.creation_timestamp or now)).total_seconds())


def _is_over(session: Session) -> bool:
    return session.metadata.deleting or session.status.phase is SessionPhase.RELEASED
