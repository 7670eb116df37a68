"""Deleting a session whose object may still be on its way."""

from __future__ import annotations

from forktree.kube.client import KubeClient
from forktree.kube.errors import NotFound
from forktree.models import Session
from forktree_agent.control.facade import Facade
from forktree_agent.http import locating


async def delete_session(
    client: KubeClient, facade: Facade, namespace: str, session_id: str, *, deadline: float
) -> str | None:
    """The session goes, and all below it; or the node whose agent alone knows it. Raises `Refusal`.

    One that was just forked is waited for until `deadline` (loop time).
    """
    known = facade.session(namespace, session_id)
    if known is not None and not known.metadata.uid:
        await locating.recorded(facade, known, deadline=deadline)
    try:
        await client.delete(Session, namespace, session_id)
    except NotFound as err:
        found = await locating.find(client, facade, namespace, session_id)
        if node := locating.other_node(facade, found):
            return node
        raise locating.no_such_session(session_id, namespace) from err
    return None
