"""Ending machines and instants, many at once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from forktree.models import Uid
from forktree_agent.control.owners import ChildMachine, meaning
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


def machines_of_fork(engine: Engine, uid: Uid) -> list[Machine]:
    """All machines that a Fork started and that still run."""
    return machines_of_forks(engine, {uid})


def machines_of_forks(engine: Engine, uids: Iterable[Uid]) -> list[Machine]:
    """All machines that these Forks started and that still run."""
    wanted = set(uids)
    found: list[Machine] = []
    for machine in engine.machines():
        named = meaning(machine.owner)
        if isinstance(named, ChildMachine) and named.fork in wanted:
            found.append(machine)
    return found
