"""Which node has the session that a request is about."""

from __future__ import annotations

from forktree.kube.client import KubeClient
from forktree.kube.errors import NotFound
from forktree.models import ForkNode, ObjectMeta, Session, SessionSpec
from forktree.models.session import ForkRef
from forktree_agent.control.facade import Facade
from forktree_agent.http.errors import Code, Refusal
from forktree_agent.http.naming import tag_in, tag_of
from forktree_agent.http.waiting import Vanished, until


async def find(client: KubeClient, facade: Facade, namespace: str, session_id: str) -> Session:
    """The session: from memory if this node has it, else as the API server has it now.

    A child that another node made and that has no object yet is only known by its node.

    Raises `Refusal`: `no_such_session`, and `session_gone` for a child that came to nothing.
    """
    known = facade.session(namespace, session_id)
    if known is not None:
        return known
    why = facade.why_gone(namespace, session_id)
    if why is not None:
        raise Refusal(Code.SESSION_GONE, f"session {session_id} is gone: {why}")
    try:
        return await client.get(Session, namespace, session_id)
    except NotFound as err:
        node = await _maker(client, facade, session_id)
        if node is not None:
            return _somewhere(namespace, session_id, node)
        raise no_such_session(session_id, namespace) from err


def no_such_session(session_id: str, namespace: str) -> Refusal:
    return Refusal(Code.NO_SUCH_SESSION, f"there is no session {session_id} in the namespace {namespace}")


async def _maker(client: KubeClient, facade: Facade, session_id: str) -> str | None:
    """The other node whose agent knows whether there is such a session, as its name tells."""
    tag = tag_in(session_id)
    if tag is None or tag == tag_of(facade.node_name):
        return None
    nodes = (each.metadata.name for each in (await client.list(ForkNode)).items)
    return next((node for node in nodes if tag_of(node) == tag), None)


def _somewhere(namespace: str, session_id: str, node: str) -> Session:
    fork, index, _ = session_id.rsplit("-", 2)
    return Session(
        metadata=ObjectMeta(name=session_id, namespace=namespace),
        spec=SessionSpec(fork_ref=ForkRef(name=fork, uid=fork, index=int(index)), node_name=node),
    )


async def find_placed(
    client: KubeClient, facade: Facade, namespace: str, session_id: str, *, deadline: float
) -> Session:
    """Like `find`, but waits until the session has a node, or has ended without.

    Raises `Refusal`, also when the session goes meanwhile, and at `deadline` (loop time).
    """
    session = await find(client, facade, namespace, session_id)
    if facade.session(namespace, session_id) is session or _is_placed(session):
        return session
    try:
        return await until(client, session, _is_placed, deadline=deadline)
    except Vanished as err:
        raise Refusal(Code.SESSION_GONE, f"session {session_id} was deleted as it started") from err
    except TimeoutError as err:
        why = session.status.message or "it waits to be placed"
        raise Refusal(Code.NOT_READY, f"session {session_id} has no node yet: {why}") from err


async def recorded(facade: Facade, session: Session, *, deadline: float) -> Session:
    """A session of this node, once it has its object; at once for all but those just forked.

    Raises `Refusal`, also at `deadline` (loop time).
    """
    session_id = session.metadata.name
    try:
        found = await facade.recorded(session, deadline=deadline)
    except TimeoutError as err:
        sentence = f"session {session_id} runs, but the API server has not taken its object yet"
        raise Refusal(Code.NOT_READY, sentence) from err
    if found is None:
        why = facade.why_gone(session.metadata.namespace or "", session_id) or "it was deleted"
        raise Refusal(Code.SESSION_GONE, f"session {session_id} is gone: {why}")
    return found


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
