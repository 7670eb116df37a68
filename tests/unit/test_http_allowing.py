"""Long answers and the right to them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from forktree.kube.errors import Unavailable
from forktree_agent.http.allowing import while_allowed
from forktree_agent.http.errors import Code, Refusal


def asked(answers: list[Exception | None]) -> Callable[[], Awaitable[None]]:
    async def still() -> None:
        answer = answers.pop(0)
        if answer is not None:
            raise answer

    return still


async def test_what_is_refused_meanwhile_ends_it_and_is_said() -> None:
    left: list[Exception | None] = [None, Unavailable("no API server"), Refusal(Code.FORBIDDEN, "no more")]
    undone = asyncio.Event()
    with pytest.raises(Refusal, match="no more"):
        async with while_allowed(asked(left), seconds=0.001):
            try:
                await asyncio.Event().wait()
            finally:
                undone.set()
    assert undone.is_set()
    assert left == []


async def test_what_is_done_before_is_asked_about_no_more() -> None:
    before = asyncio.all_tasks()
    async with while_allowed(asked([])):
        await asyncio.sleep(0)
    assert asyncio.all_tasks() == before


async def test_its_own_errors_stay_what_they_are() -> None:
    for error in (TimeoutError("own"), Refusal(Code.NOT_READY, "own"), ValueError("own")):
        with pytest.raises(type(error), match="own"):
            async with while_allowed(asked([])):
                raise error


async def test_whoever_waits_for_it_can_give_it_up() -> None:
    async def long() -> None:
        async with while_allowed(asked([])):
            await asyncio.Event().wait()

    task = asyncio.create_task(long())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
