"""Ways of waiting that must not be cut short, and failures of several things told as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

from forktree_agent.engine.contract import DeadlineExceeded

Result = TypeVar("Result")
Other = TypeVar("Other")


async def to_the_end(work: Coroutine[Any, Any, Result], name: str) -> Result:
    """Await `work` to its end also when the caller is cancelled meanwhile; the cancellation then goes on.

    For what must not be left half done, such as a stopped parent.
    """
    task = asyncio.create_task(work, name=name)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():  # Also when cancelled again: a subtree is ended from several sides.
            with suppress(asyncio.CancelledError):
                await asyncio.wait((task,))
        if not task.cancelled() and task.exception() is not None:
            raise task.exception() from None  # type: ignore[misc]  # It is not None.
        raise


@asynccontextmanager
async def first_failure() -> AsyncGenerator[asyncio.TaskGroup]:
    """Tasks of which the first that fails cancels the others and is raised alone, not as a group of one."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from failed


async def all_of(*work: Coroutine[Any, Any, Result]) -> list[Result]:
    """Results in order, or the first failure."""
    async with first_failure() as group:
        tasks = [group.create_task(each) for each in work]
    return [task.result() for task in tasks]


async def both(
    first: Coroutine[Any, Any, Result], second: Coroutine[Any, Any, Other]
) -> tuple[Result, Other]:
    """`all_of` two things of different kinds."""
    async with first_failure() as group:
        tasks = group.create_task(first), group.create_task(second)
    return tasks[0].result(), tasks[1].result()


async def each_to_its_end(*work: Awaitable[object]) -> None:
    """Wait for all, also after a failure; then raise the first that failed, in their order."""
    for outcome in await asyncio.gather(*work, return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome


@asynccontextmanager
async def until(deadline: float, what: str) -> AsyncGenerator[None]:
    """Raises `DeadlineExceeded` naming `what` when the body is not done by `deadline` (loop time)."""
    try:
        async with asyncio.timeout_at(deadline):
            yield
    except TimeoutError as err:
        raise DeadlineExceeded(f"{what} was not done in time") from err
