"""Checkpoints are Forks without children that carry a name for their session.

The Fork's own name follows from both, so that the API server lets a session have one checkpoint of a name.
"""

from __future__ import annotations

import hashlib
import time
from contextlib import suppress
from datetime import datetime

from forktree.kube.errors import Conflict, NotFound
from forktree.models import Fork, ForkPhase, Session
from forktree.models.names import CHECKPOINT_AT_LABEL, CHECKPOINT_LABEL, CHECKPOINT_OF_LABEL
from forktree.wire import ForkSession
from forktree.wire_trees import CheckpointInfo
from forktree_agent.control.together import each_of
from forktree_agent.http.describing_forks import age, holds_point
from forktree_agent.http.errors import Code, Refusal
from forktree_agent.http.forking import SourceName, Wanted, fork_object
from forktree_agent.http.table import Asked

_DIGITS = 24
_DELETES_AT_ONCE = 8


async def make(asked: Asked, session: Session, name: str) -> tuple[Fork, bool]:
    """The checkpoint, and whether this call made it. Raises `Refusal`."""
    uid, status = session.metadata.uid, session.status
    if status.phase.terminal or session.metadata.deleting:
        raise Refusal(Code.SESSION_GONE, f"session {session.metadata.name} no longer runs")
    digest = hashlib.sha256(f"{uid}/{name}".encode()).hexdigest()
    wanted = Wanted(
        namespace=asked.namespace,
        source=SourceName(Session, session.metadata.name),
        body=ForkSession(replicas=0),
        name=f"c-{digest[:_DIGITS]}",
        called=f"checkpoint {name}",
        seen=asked.seen,
        complete=True,
        labels={
            CHECKPOINT_LABEL: name,
            CHECKPOINT_OF_LABEL: uid,
            CHECKPOINT_AT_LABEL: str(time.time_ns() // 1000),
        },
    )
    return await fork_object(asked.client, asked.facade, session, wanted)


async def of(asked: Asked, session: Session) -> list[Fork]:
    """Those of a session, the oldest first."""
    selector = f"{CHECKPOINT_OF_LABEL}={session.metadata.uid}"
    forks, _ = await asked.client.list(Fork, asked.namespace, label_selector=selector)
    kept = [each for each in forks if _is_kept(each, session)]
    return sorted(kept, key=_asked_at)


async def named(asked: Asked, session: Session, name: str) -> Fork:
    """Raises `Refusal`."""
    found = [each for each in await of(asked, session) if each.metadata.labels[CHECKPOINT_LABEL] == name]
    if not found:
        sentence = f"session {session.metadata.name} has no checkpoint {name}"
        raise Refusal(Code.NOT_FOUND, sentence)
    return found[-1]


async def thin_out(asked: Asked, session: Session, *, keep: Fork, count: int) -> None:
    """Delete the oldest beyond `count`, but for `keep` and for those that something was forked from."""
    known = await of(asked, session)
    forks, _ = await asked.client.list(Fork, asked.namespace)
    used = {
        source.name
        for each in forks
        if (source := each.spec.source.fork) is not None and each.status.phase is not ForkPhase.FAILED
    }
    old = [
        each
        for each in known[: max(0, len(known) - count)]
        if each.metadata.uid != keep.metadata.uid and each.metadata.name not in used
    ]
    await each_of(old, lambda each: delete(asked, each), at_once=_DELETES_AT_ONCE)


async def delete(asked: Asked, fork: Fork) -> None:
    """Of exactly this one."""
    metadata = fork.metadata
    with suppress(NotFound, Conflict):
        await asked.client.delete(Fork, metadata.namespace, metadata.name, uid=metadata.uid)


def describe(fork: Fork, now: datetime) -> CheckpointInfo:
    return CheckpointInfo(
        checkpoint=fork.metadata.labels[CHECKPOINT_LABEL],
        fork_id=fork.metadata.name,
        created_secs_ago=age(fork, now),
        point_bytes=fork.status.point_bytes,
        available=holds_point(fork),
    )


def _is_kept(fork: Fork, session: Session) -> bool:
    """Labels can be given to any Fork: what counts is that it is a Fork of this very session."""
    source = fork.spec.source.session
    return (
        source is not None
        and source.uid == session.metadata.uid
        and CHECKPOINT_LABEL in fork.metadata.labels
        and not fork.metadata.deleting
        and fork.status.phase is not ForkPhase.FAILED
    )


def _asked_at(fork: Fork) -> tuple[int, str]:
    metadata = fork.metadata
    told = metadata.labels.get(CHECKPOINT_AT_LABEL, "")
    created = metadata.creation_timestamp
    seconds = 0.0 if created is None else created.timestamp()
    at = int(told) if told.isascii() and told.isdigit() else round(seconds * 1_000_000)
    return at, metadata.name
