"""Which node has the session that a request is about."""

from __future__ import annotations

from forktree.kube.client import KubeClient
from forktree.kube.errors import NotFound
from forktree.models import Session
from forktree_agent.control.facade import Facade
from forktree_agent.http.errors import Code, Refusal
from forktree_agent.http.waiting import Vanished, until


async def find(client: KubeClient, facade: Facade, namespace: str, session_id: str) -> Session:
    """The session: from memory if this node has it, else as the API server has it now.

    Raises `Refusal` (`no_such_session`).
    """
    known = facade.session(namespace, session_id)
    if known is not None:
        return known
    try:
        return await client.get(Session, namespace, session_id)
    except NotFound as err:
        sentence = f"there is no session {session_id} in the namespace {namespace}"
        raise Refusal(Code.NO_SUCH_SESSION, sentence) from err


async def find_placed(
    client: KubeClient, facade: Facade, namespace: str, session_id: str, *, deadline: float
) -> Session:
    """Like `find`, but waits until the session has a node, or has ended without.

    Raises `Refusal`, also when the session goes meanwhile, and at `deadline` (loop time).
    """
    session = await find(client, facade, namespace, session_id)
    if facade.session(namespace, session_id) is session:
        return session
    try:
        return await until(client, session, _is_placed, deadline=deadline)
    except Vanished as err:
        raise Refusal(Code.SESSION_GONE, f"session {session_id} was deleted as it started") from err
    except TimeoutError as err:
        why = session.status.message or "it waits to be placed"
        raise Refusal(Code.NOT_READY, f"session {session_id} has no node yet: {why}") from err


def other_node(facade: Facade, session: Session) -> str | None:
    """The node whose agent has to be asked. None: this one can answer as well as any.

    It is what `spec.nodeName` says, which only the operator and the node's own agent can write.
    """
    node = session.spec.node_name
    if node is None or node == facade.node_name or _has_ended(session):
        return None
    return node


def _is_placed(session: Session) -> bool:
    return session.spec.node_name is not None or _has_ended(session)


def _has_ended(session: Session) -> bool:
    return session.metadata.deleting or session.status.phase.terminal
