"""A tree as the API server has it: its root, and all that says by its label that it hangs below."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime

from forktree.kube.client import KubeClient
from forktree.models import Fork, Session, SessionPhase, Uid
from forktree.models.names import ROOT_LABEL
from forktree.wire_trees import ForkInfo, TreeInfo, TreeSession, TreeTotals
from forktree_agent.control.facade import Facade
from forktree_agent.engine.contract import MemoryUse
from forktree_agent.http.describing import Names, names_among, root_of, root_uid, told
from forktree_agent.http.describing_forks import describe_fork, holds_point, parent_among

LIVE = {SessionPhase.RUNNING, SessionPhase.PAUSED}


@dataclass(frozen=True, slots=True, kw_only=True)
class Grown:
    """The objects of a tree, or of a part of one, and what their uids are called."""

    top: Session
    sessions: tuple[Session, ...]
    forks: tuple[Fork, ...]
    names: Mapping[Uid, Names]
    parents: Mapping[Uid, str | None]
    """Whose instants the forks hold."""


async def grown(client: KubeClient, facade: Facade, session: Session, *, below: bool) -> Grown:
    """The whole tree that `session` is in, or what is `below` it, itself included."""
    root = await root_of(client, facade, session)
    uid = root_uid(session) if root is None else root.metadata.uid
    namespace, selector = session.metadata.namespace, f"{ROOT_LABEL}={uid}"
    labelled, _ = await client.list(Session, namespace, label_selector=selector)
    forks, _ = await client.list(Fork, namespace, label_selector=selector)
    others = [each for each in labelled if each.metadata.uid not in {uid, session.metadata.uid}]
    top = session if root is None or root.metadata.uid == session.metadata.uid else root
    ends = (top,) if top is session else (top, session)
    return _known(session if below else top, (*ends, *others), forks, below=below)


def _known(top: Session, sessions: tuple[Session, ...], forks: tuple[Fork, ...], *, below: bool) -> Grown:
    root = next((each for each in sessions if each.spec.is_root), None)
    template = "" if root is None or root.spec.template_ref is None else root.spec.template_ref.name
    uids: dict[str, str] = {
        each.status.template_uid: template for each in sessions if each.status.template_uid and template
    }
    named = {fork.metadata.name: fork for fork in forks}
    names = {
        session.metadata.uid: with_parent(session, found, named)
        for session, found in zip(sessions, names_among(sessions, uids), strict=True)
    }
    parents = {fork.metadata.uid: parent_among(fork, named) for fork in forks}
    if below:
        kept = _below(top, sessions, names)
        sessions = tuple(each for each in sessions if each.metadata.name in kept)
        forks = tuple(fork for fork in forks if parents[fork.metadata.uid] in kept)
    return Grown(
        top=top,
        sessions=tuple(sorted(sessions, key=_order)),
        forks=tuple(sorted(forks, key=_order)),
        names=names,
        parents=parents,
    )


def with_parent(session: Session, names: Names, forks: Mapping[str, Fork]) -> Names:
    """A child that was just born says which fork made it, and not yet of whom."""
    reference = session.spec.fork_ref
    fork = None if reference is None or names.parent is not None else forks.get(reference.name)
    return names if fork is None else replace(names, parent=parent_among(fork, forks))


def _order(item: Session | Fork) -> tuple[int, str]:
    """From the top down. What says nothing of its depth yet has nothing below it."""
    depth = item.status.depth
    return (sys.maxsize if depth is None else depth, item.metadata.name)


def _below(top: Session, sessions: Iterable[Session], names: Mapping[Uid, Names]) -> set[str]:
    children: dict[str, list[str]] = {}
    for each in sessions:
        parent = names[each.metadata.uid].parent
        if parent is not None:
            children.setdefault(parent, []).append(each.metadata.name)
    found: set[str] = set()
    waiting = [top.metadata.name]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += children.get(name, [])
    return found


def shown(tree: Grown, now: datetime, memory: Mapping[Uid, MemoryUse]) -> TreeInfo:
    """The tree as an answer has it; `memory` of those for which it is known."""
    sessions: list[TreeSession] = []
    for each in tree.sessions:
        used = memory.get(each.metadata.uid)
        sessions.append(
            TreeSession(
                **told(each, now, tree.names[each.metadata.uid]),
                unique_bytes=None if used is None else used.unique_bytes,
                shared_bytes=None if used is None else used.shared_bytes,
            )
        )
    return TreeInfo(
        root_session_id=tree.top.metadata.name,
        sessions=tuple(sessions),
        forks=tuple(fork_shown(tree, each, now) for each in tree.forks),
        totals=TreeTotals(
            sessions=len(tree.sessions),
            live=sum(each.status.phase in LIVE for each in tree.sessions),
            depth=max((each.status.depth or 0 for each in tree.sessions), default=0),
            point_bytes=sum(each.status.point_bytes or 0 for each in tree.forks if holds_point(each)),
        ),
    )


def fork_shown(tree: Grown, fork: Fork, now: datetime) -> ForkInfo:
    return describe_fork(fork, now, parent=tree.parents[fork.metadata.uid])
