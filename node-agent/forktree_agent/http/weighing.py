"""What memory a session takes, asked of its machine when somebody wants to know."""

from __future__ import annotations

import asyncio

from forktree.models import Session
from forktree.wire import SessionMemory
from forktree_agent.control.facade import Facade
from forktree_agent.http.errors import Code, Refusal

WEIGH_SECONDS = 15.0
"""For an answer that takes a millisecond."""


async def weigh(facade: Facade, session: Session) -> SessionMemory:
    """`session` is this node's. Raises `Refusal` where it has no machine, and what the engine raises."""
    name, status = session.metadata.name, session.status
    if session.metadata.deleting or status.phase.terminal:
        raise Refusal(Code.SESSION_GONE, status.message or f"session {name} has ended and takes no memory")
    if facade.machine(session) is None:
        raise Refusal(Code.NOT_READY, f"session {name} does not run yet, and takes no memory")
    memory = await facade.memory(session, deadline=asyncio.get_running_loop().time() + WEIGH_SECONDS)
    return SessionMemory(session_id=name, unique_bytes=memory.unique_bytes, shared_bytes=memory.shared_bytes)
