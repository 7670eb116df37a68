"""The tree that a session is in: once, or as it grows."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Final

from aiohttp import web

from forktree.errors import ForktreeError
from forktree.models import Session, Uid
from forktree.wire_trees import Alive, Broken, ForkSeen, Gone, SessionSeen, Synced, TreeInfo, TreeQuery
from forktree_agent.control.together import each_of
from forktree_agent.engine.contract import MemoryUse
from forktree_agent.http import bodies, finding, lines, tree_watching, trees, weighing
from forktree_agent.http.describing import root_of
from forktree_agent.http.errors import Code, Refusal
from forktree_agent.http.table import Asked, Lines, Right, Route

WEIGHED_AT_ONCE = 16

_LARGE = 512
"""Sessions from which on an answer is encoded beside the loop."""


async def _tree(asked: Asked) -> web.StreamResponse:
    query = asked.query(TreeQuery)
    if query.watch and (query.memory or query.below):
        raise Refusal(Code.BAD_REQUEST, "`watch` shows whole trees, and no memory: leave the others out")
    what = "&".join(
        f"{name}=1" for name in ("below", "memory", "watch") if getattr(query, name) and name != "watch"
    )
    session = await finding.session_or_answer(asked, f"tree?{what}" if what else "tree")
    if isinstance(session, web.StreamResponse):
        return session
    if query.watch:
        return await _watch(asked, session)
    tree = await trees.grown(asked.client, asked.facade, session, below=query.below)
    memory = await _memory(asked, tree) if query.memory else {}
    body = trees.shown(tree, datetime.now(UTC), memory)
    about = bodies.LARGE_ANSWER_BYTES if len(tree.sessions) > _LARGE else 0
    return await bodies.answer(body, about_bytes=about)


async def _memory(asked: Asked, tree: trees.Grown) -> dict[Uid, MemoryUse]:
    """Of those that run here. One that ends meanwhile takes none."""
    here = [each for each in tree.sessions if asked.facade.machine(each) is not None]
    deadline = asyncio.get_running_loop().time() + weighing.WEIGH_SECONDS

    async def one(session: Session) -> MemoryUse | None:
        try:
            return await asked.facade.memory(session, deadline=deadline)
        except ForktreeError:
            return None

    weighed = await each_of(here, one, at_once=WEIGHED_AT_ONCE)
    return {each.metadata.uid: use for each, use in zip(here, weighed, strict=True) if use is not None}


_WORDS = lines.Words(Alive(), lambda refusal: Broken(error=refusal.sentence, code=refusal.code))


async def _watch(asked: Asked, session: Session) -> web.StreamResponse:
    root = await root_of(asked.client, asked.facade, session)
    if root is None:
        sentence = f"the root of the tree of session {session.metadata.name} is gone or not known yet"
        raise Refusal(Code.NOT_READY, sentence)

    async def tell(say: lines.Say) -> None:
        await tree_watching.follow(asked.client, root, say)

    with asked.parts.watchers.one_more(asked.namespace):
        return await lines.answer(asked.request, tell, _WORDS, still=asked.still_may)


ROUTES: Final = (
    Route(
        method="GET",
        path="/sessions/{session_id}/tree",
        summary="The whole tree that a session is in, once or as it grows",
        handler=_tree,
        rights=(Right("list", "sessions"), Right("list", "forks")),
        query=TreeQuery,
        answers={
            HTTPStatus.OK: (TreeInfo, Lines((SessionSeen, ForkSeen, Gone, Synced, Alive, Broken))),
        },
    ),
)
