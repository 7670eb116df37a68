"""Running a command in a session of this node, to its end."""

from __future__ import annotations

import asyncio

from forktree.kube.client import KubeClient
from forktree.kube.errors import NotFound
from forktree.models import ForkNode, Session, SessionPhase
from forktree.wire import Exec, ExecFinished
from forktree_agent.control.facade import Facade
from forktree_agent.control.objects import ObjectGone
from forktree_agent.engine.contract import Command
from forktree_agent.http.errors import Code, Refusal

START_SECONDS = 30.0
"""How long a command waits for a session that is still on its way."""

MARGIN_SECONDS = 30.0
"""Beyond the command's own time: a loaded node is slow to start it, and to carry 16 MiB of output out."""


async def execute(
    client: KubeClient, facade: Facade, namespace: str, session_id: str, request: Exec, *, request_id: str
) -> ExecFinished:
    """How the command ended. If the caller goes away first, it is killed in the guest.

    Raises `Refusal`, and what the engine raises.
    """
    loop = asyncio.get_running_loop()
    session = await _running(client, facade, namespace, session_id)
    command = Command(
        argv=request.arguments(),
        env=request.env,
        cwd=request.cwd,
        stdin=request.stdin.encode(),
        timeout_seconds=request.timeout_seconds,
    )
    began = loop.time()
    deadline = began + request.timeout_seconds + MARGIN_SECONDS
    result = await facade.exec(session, command, deadline=deadline)
    return ExecFinished(
        id=request_id,
        stdout=result.stdout.decode(errors="replace"),
        stderr=result.stderr.decode(errors="replace"),
        exit_code=result.exit_code,
        timed_out=result.timed_out,
        truncated=result.truncated,
        exec_time_ms=round((loop.time() - began) * 1000, 3),
    )


async def _running(client: KubeClient, facade: Facade, namespace: str, session_id: str) -> Session:
    """The session, once it runs on this node."""
    session = facade.session(namespace, session_id) or await _elsewhere(client, facade, namespace, session_id)
    if not _settled(session):
        deadline = asyncio.get_running_loop().time() + START_SECONDS
        try:
            session = await facade.session_when(session.metadata.uid, _settled, deadline=deadline)
        except ObjectGone as err:
            raise Refusal(Code.SESSION_GONE, f"session {session_id} was deleted as it started") from err
        except TimeoutError as err:
            sentence = f"session {session_id} does not run yet after {START_SECONDS:g} seconds of waiting"
            raise Refusal(Code.NOT_READY, sentence) from err
    status = session.status
    if session.metadata.deleting:
        raise Refusal(Code.SESSION_GONE, f"session {session_id} is being deleted")
    if status.phase.terminal:
        raise Refusal(Code.SESSION_GONE, status.message or f"session {session_id} is {status.phase}")
    return session


async def _elsewhere(client: KubeClient, facade: Facade, namespace: str, session_id: str) -> Session:
    """A session that this node has not seen: still on its way to it, or another node's, or nobody's."""
    try:
        session = await client.get(Session, namespace, session_id)
    except NotFound as err:
        sentence = f"there is no session {session_id} in the namespace {namespace}"
        raise Refusal(Code.NO_SUCH_SESSION, sentence) from err
    node = session.status.node or session.spec.node_name
    if node is None or node == facade.node_name or session.status.phase.terminal:
        return session
    try:
        endpoint = (await client.get(ForkNode, None, node)).status.endpoint
    except NotFound:
        endpoint = None
    where = f"send this request to {endpoint}" if endpoint else "the address of its agent is not known"
    raise Refusal(Code.WRONG_NODE, f"session {session_id} runs on node {node}: {where}")


def _settled(session: Session) -> bool:
    status = session.status
    return session.metadata.deleting or status.phase is SessionPhase.RUNNING or status.phase.terminal
