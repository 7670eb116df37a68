"""Checkpoints: instants of a session that have a name, and going back to one."""

from __future__ import annotations

from datetime import UTC, datetime
from http import HTTPStatus
from typing import Final

from aiohttp import web

from forktree.models import Fork, Session, SessionState
from forktree.wire import ForkSession, SessionForked
from forktree.wire_trees import Checkpoint, CheckpointDeleted, CheckpointInfo, Rollback
from forktree_agent.http import bodies, changing, checkpointing, finding, forking, repeating
from forktree_agent.http.forking import SourceName, Wanted
from forktree_agent.http.table import Asked, Each, Right, Route


async def _make(asked: Asked) -> web.StreamResponse:
    wanted = await asked.body(Checkpoint)
    if wanted.keep_last is not None:
        await asked.permit("delete", "forks")
    session = await finding.session_or_answer(asked, "checkpoints")
    if isinstance(session, web.StreamResponse):
        return session
    fork, made = await checkpointing.make(asked, session, wanted.name)
    if wanted.keep_last is not None:
        await checkpointing.thin_out(asked, session, keep=fork, count=wanted.keep_last)
    body = checkpointing.describe(fork, datetime.now(UTC))
    return await bodies.answer(body, HTTPStatus.CREATED if made else HTTPStatus.OK)


async def _list(asked: Asked) -> web.StreamResponse:
    session = await finding.session_or_answer(asked, "checkpoints")
    if isinstance(session, web.StreamResponse):
        return session
    now = datetime.now(UTC)
    return bodies.array(
        [checkpointing.describe(fork, now) for fork in await checkpointing.of(asked, session)]
    )


async def _delete(asked: Asked) -> web.StreamResponse:
    name = asked.named("checkpoint")
    session = await finding.session_or_answer(asked, f"checkpoints/{name}")
    if isinstance(session, web.StreamResponse):
        return session
    fork = await checkpointing.named(asked, session, name)
    await checkpointing.delete(asked, fork)
    body = CheckpointDeleted(deleted=True, checkpoint=name, fork_id=fork.metadata.name)
    return await bodies.answer(body)


async def _rollback(asked: Asked) -> web.StreamResponse:
    wanted = await asked.body(Rollback)
    if wanted.release:
        await asked.permit("patch", "sessions", asked.session_id)
    session = await finding.session_or_answer(asked, "rollback")
    if isinstance(session, web.StreamResponse):
        return session
    point = await checkpointing.named(asked, session, wanted.checkpoint)
    name = repeating.name_of(asked.request, asked.caller, None)
    fork = Wanted(
        namespace=asked.namespace,
        source=SourceName(Fork, point.metadata.name),
        body=ForkSession(replicas=wanted.replicas),
        name=name,
        called=repeating.called(asked.request, "fork", name or ""),
        seen=asked.seen,
    )
    answered = await forking.fork_by_object(asked.client, asked.facade, fork)
    if wanted.release:
        session = await asked.client.get(Session, asked.namespace, session.metadata.name)
        await changing.become(asked, session, SessionState.RELEASED)
    return await bodies.answer(*answered)


_PATH: Final = "/sessions/{session_id}/checkpoints"

ROUTES: Final = (
    Route(
        method="POST",
        path=_PATH,
        summary="Keep this instant of a session under a name",
        handler=_make,
        rights=(Right("create", "forks"),),
        body=Checkpoint,
        answers={HTTPStatus.CREATED: (CheckpointInfo,), HTTPStatus.OK: (CheckpointInfo,)},
    ),
    Route(
        method="GET",
        path=_PATH,
        summary="The checkpoints of a session, the oldest first",
        handler=_list,
        rights=(Right("list", "forks"),),
        answers={HTTPStatus.OK: (Each(CheckpointInfo),)},
    ),
    Route(
        method="DELETE",
        path=f"{_PATH}/{{checkpoint}}",
        summary="Let a checkpoint go, and all that was started from it",
        handler=_delete,
        rights=(Right("delete", "forks"),),
        answers={HTTPStatus.OK: (CheckpointDeleted,)},
    ),
    Route(
        method="POST",
        path="/sessions/{session_id}/rollback",
        summary="Start children from a checkpoint, answered when every one runs",
        handler=_rollback,
        rights=(Right("create", "forks"),),
        body=Rollback,
        repeatable=True,
        answers={HTTPStatus.CREATED: (SessionForked,), HTTPStatus.OK: (SessionForked,)},
    ),
)
