"""Many things of one kind at once, within a bound, and each to its end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


async def each_of(
    items: Iterable[Item], work: Callable[[Item], Awaitable[Result]], *, at_once: int
) -> list[Result]:
    """What `work` gives for each, in their order; `at_once` at a time. One that fails stops no other.

    Raises the first failure once all others are done.
    """
    turns = asyncio.Semaphore(at_once)

    async def one(item: Item) -> Result:
        async with turns:
            return await work(item)

    outcomes = await asyncio.gather(*(one(item) for item in items), return_exceptions=True)
    done: list[Result] = []
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
        done.append(outcome)
    return done
