"""Ending machines and instants, many at once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from forktree.models import Uid
from forktree_agent.control.owners import child_owner
from forktree_agent.engine.contract import Engine, Machine, Point


async def reap(engine: Engine, machines: Sequence[Machine], points: Sequence[Point]) -> None:
    """End all of them, and return when they are reaped. What fails does not keep the others alive.

    Raises the first failure once all others are done; calling it again is safe.
    """
    outcomes = await asyncio.gather(
        *(engine.release(each.id) for each in machines),
        *(engine.drop_point(each.id) for each in points),
        return_exceptions=True,
    )
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome


def machines_of_fork(engine: Engine, uid: Uid, replicas: int) -> list[Machine]:
    """All machines that a fork started and that still run."""
    owners = (child_owner(uid, index) for index in range(replicas))
    return [machine for owner in owners if (machine := engine.machine_of(owner)) is not None]
