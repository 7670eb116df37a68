"""The object of a session, for whoever changes it or looks at its tree."""

from __future__ import annotations

from aiohttp import web

from forktree.kube.errors import NotFound
from forktree.models import Fork, Session
from forktree_agent.http import locating
from forktree_agent.http.errors import Code, Refusal
from forktree_agent.http.locating import no_such_session
from forktree_agent.http.table import Asked

WAIT_SECONDS = 60.0
"""For the object of a session that was just forked: it is on its way."""


async def session_object(asked: Asked, session_id: str) -> Session:
    """The session as the API server has it, once it does. Raises `Refusal`.

    `wrong_node` for a child that another node made and that has no object yet: only its own agent knows it.
    """
    found = await look(asked, session_id)
    if isinstance(found, str):
        sentence = f"session {session_id} has no object yet: ask the agent of node {found}"
        raise Refusal(Code.WRONG_NODE, sentence)
    return found


async def session_or_answer(asked: Asked, what: str) -> Session | web.StreamResponse:
    """The session of the path as the API server has it; or the answer of the only agent that knows it.

    `what` follows its name in the path. Raises `Refusal`.
    """
    found = await look(asked, asked.session_id)
    if isinstance(found, str):
        return await asked.session_elsewhere(found, what, end_by=asked.seen + WAIT_SECONDS)
    return found


async def look(asked: Asked, session_id: str) -> Session | str:
    """The session as the API server has it, once it does; or the node whose agent alone knows it."""
    known = asked.facade.session(asked.namespace, session_id)
    if known is not None and not known.metadata.uid:
        return await locating.recorded(asked.facade, known, deadline=asked.seen + WAIT_SECONDS)
    try:
        return await asked.client.get(Session, asked.namespace, session_id)
    except NotFound as err:
        found = await locating.find(asked.client, asked.facade, asked.namespace, session_id)
        if node := locating.other_node(asked.facade, found):
            return node
        raise no_such_session(session_id, asked.namespace) from err


async def fork_object(asked: Asked, fork_id: str) -> Fork:
    """The fork as the API server has it, once it does. Raises `Refusal`."""
    try:
        return await asked.client.get(Fork, asked.namespace, fork_id)
    except NotFound as err:
        sentence = f"there is no fork {fork_id} in the namespace {asked.namespace}"
        raise Refusal(Code.NOT_FOUND, sentence) from err
