"""A Fork's place in its tree: one owner reference, to what it is forked from, written by the agent alone."""

from __future__ import annotations

import logging

from forktree.kube.errors import Conflict, Forbidden, Invalid, NotFound
from forktree.models import Fork, Session, Uid
from forktree.models.names import ROOT_LABEL
from forktree_agent.control.decide_fork import belongs_below
from forktree_agent.control.records import ForkRecord
from forktree_agent.control.sources import above_of, source_of
from forktree_agent.control.status_writer import Outdated, Vanished
from forktree_agent.control.world import World

log = logging.getLogger(__name__)


async def adopted(world: World, fork: Fork, record: ForkRecord) -> None:
    """Make the Fork's one owner what it was forked from, unless it is already."""
    above = above_of(world, record)
    if above is None:
        raise Vanished(f"{record.above_kind} {record.above_name} is not there any more")
    await _adopt(world, fork, above, record.lineage.root)


async def adopted_refused(world: World, fork: Fork) -> None:
    """A Fork that comes to nothing hangs below its source all the same, if it can, and so goes with it.

    One that has an owner or had one stays as it is.
    """
    if fork.metadata.owner_references or fork.status.parent_uid is not None:
        return
    above = belongs_below(fork, await source_of(world, fork), world.node)
    if above is None:
        return
    own_root = isinstance(above, Session) and above.spec.is_root
    try:
        await _adopt(world, fork, above, above.metadata.uid if own_root else above.status.root)
    except (Outdated, Forbidden) as err:
        # It can still be told why it failed, and that matters more.
        log.warning("refused_fork_not_adopted uid=%s error=%r", fork.metadata.uid, err.message)


async def _adopt(world: World, fork: Fork, above: Session | Fork, root: Uid | None) -> None:
    fork = world.forks.get(fork.metadata.uid) or fork
    owner = above.owner_reference()
    if fork.metadata.owner_references == (owner,):
        return
    body = {
        # The uid must still hold, so another Fork of this name is never taken in.
        "metadata": {
            "uid": fork.metadata.uid,
            "ownerReferences": [owner.to_json()],
            **({} if root is None else {"labels": {ROOT_LABEL: root}}),
        }
    }
    try:
        taken_in = await world.client.merge_patch(Fork, fork.metadata.namespace, fork.metadata.name, body)
    except NotFound as err:
        raise Vanished(f"Fork {fork.metadata.name} is not there: {err.message}") from err
    except (Conflict, Invalid) as err:
        world.observed(await world.writer.newest(fork))
        raise Outdated(f"Fork {fork.metadata.name} was not adopted: {err.message}") from err
    world.observed(taken_in)
