"""Deleting a sandbox. This protocol knows no tree: what was forked from it lives on, as roots of their own.

And nothing may be left in the end: a Fork goes with the last of its children.
"""

from __future__ import annotations

import asyncio
import logging

from forktree.errors import ForktreeError
from forktree.kube.client import Propagation
from forktree.kube.errors import NotFound
from forktree.models import Fork, Session
from forktree.models.fork import KeepPoint
from forktree.models.names import FORK_LABEL, ROOT_LABEL
from forktree_agent.http import locating
from forktree_agent.http.collimate.sandboxes import Elsewhere, Visit
from forktree_agent.http.errors import Code, Refusal

log = logging.getLogger(__name__)

WAIT_SECONDS = 60.0
"""For the objects of what was just forked: they are on their way."""


async def closed(visit: Visit, session_id: str, *, its_node_first: bool) -> None:
    """The session goes, and nothing else that has a machine. Raises `Refusal` and `Elsewhere`.

    `its_node_first`: where it is another's, that is to do it, which alone knows of forks without an object.
    """
    session = await _object(visit, session_id, its_node_first=its_node_first)
    metadata = session.metadata
    forks = await _forks_below(visit, session)
    propagation: Propagation = "Orphan" if forks else "Background"
    try:
        await visit.client.delete(
            Session, visit.namespace, session_id, uid=metadata.uid, propagation=propagation
        )
    except NotFound as err:
        raise locating.no_such_session(session_id, visit.namespace) from err
    if session.spec.fork_ref is not None:
        try:
            await _tidied(visit, session)
        except ForktreeError as err:  # What was asked for is done.
            log.warning("fork_left namespace=%s session=%s error=%s", visit.namespace, session_id, err)


async def _object(visit: Visit, session_id: str, *, its_node_first: bool) -> Session:
    """The session as the API server has it, once it has its forks too, as far as this node knows any."""
    deadline = asyncio.get_running_loop().time() + WAIT_SECONDS
    known = visit.facade.session(visit.namespace, session_id)
    if known is not None:
        known = await locating.recorded(visit.facade, known, deadline=deadline)
        try:
            async with asyncio.timeout_at(deadline):
                await visit.facade.early.recorded_below(known.metadata.uid)
        except TimeoutError as err:
            sentence = f"the API server has not taken what was forked from {session_id} yet"
            raise Refusal(Code.NOT_READY, sentence) from err
    try:
        session = await visit.client.get(Session, visit.namespace, session_id)
    except NotFound as err:
        found = await locating.find(visit.client, visit.facade, visit.namespace, session_id)
        if node := locating.other_node(visit.facade, found):
            raise Elsewhere(node, deadline) from err
        raise locating.no_such_session(session_id, visit.namespace) from err
    if session.metadata.deleting:
        raise locating.no_such_session(session_id, visit.namespace)
    if its_node_first and (node := locating.other_node(visit.facade, session)):
        raise Elsewhere(node, deadline)
    return session


async def _forks_below(visit: Visit, session: Session) -> list[Fork]:
    """Those right below it. A tree's objects have its root's label, but for a Fork that nobody has taken."""
    forks = (await visit.client.list(Fork, visit.namespace)).items
    root = session.status.root
    return [
        each
        for each in forks
        if each.metadata.labels.get(ROOT_LABEL, root) == root
        and each.spec.source.session is not None
        and each.spec.source.session.name == session.metadata.name
    ]


async def _tidied(visit: Visit, session: Session) -> None:
    """Without the Fork of a session that was deleted, if that was the last of its children."""
    reference = session.spec.fork_ref
    assert reference is not None
    of_fork = f"{FORK_LABEL}={reference.name}"
    children = (await visit.client.list(Session, visit.namespace, label_selector=of_fork)).items
    if any(not each.metadata.deleting for each in children):
        return
    try:
        fork = await visit.client.get(Fork, visit.namespace, reference.name)
        is_whole = (fork.status.recorded or 0) >= fork.spec.replicas  # Else some are still to come.
        if fork.metadata.uid == reference.uid and is_whole and fork.spec.keep_point is not KeepPoint.ALWAYS:
            # Somebody may have started others from its instant: these stay.
            await visit.client.delete(
                Fork, visit.namespace, reference.name, uid=fork.metadata.uid, propagation="Orphan"
            )
    except NotFound:
        pass
