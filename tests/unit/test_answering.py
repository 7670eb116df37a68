"""How long a QEMU is waited for: each command anew, and not for what the agent itself did not see pass."""

from __future__ import annotations

import asyncio
import time

import pytest

from forktree_agent.engine.microvm.answering import Answering, NotAnswering

SECONDS = 0.2


async def never() -> None:
    await asyncio.get_running_loop().create_future()


async def some_turns_of(answer: asyncio.Future[str]) -> str:
    """As a reply does that goes through a reader, a queue and a task."""
    said = await answer
    for _ in range(10):
        await asyncio.sleep(0)
    return said


async def test_silence_for_all_of_a_commands_time_is_said_and_nothing_more_is_asked() -> None:
    answering = Answering(SECONDS)
    with pytest.raises(NotAnswering, match=r"QEMU did not answer stop for 0\.2 s"):
        await answering.to(never(), "stop")
    with pytest.raises(NotAnswering, match="did not answer stop"):
        await answering.to(asyncio.sleep(0), "cont")


async def test_commands_that_take_long_together_are_answered_each_in_its_own_time() -> None:
    answering = Answering(SECONDS)
    for _ in range(4):
        assert await answering.to(asyncio.sleep(SECONDS / 2, "done"), "stop") == "done"


async def test_a_command_that_goes_through_memory_has_time_for_it() -> None:
    answering = Answering(SECONDS)
    assert (
        await answering.to(asyncio.sleep(3 * SECONDS, "done"), "the shim's DUMP", work_bytes=1 << 30)
        == "done"
    )


async def test_an_agent_that_stood_still_itself_does_not_take_its_machine_for_lost() -> None:
    answering = Answering(SECONDS)
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[str] = loop.create_future()
    loop.call_soon(time.sleep, 3 * SECONDS)
    loop.call_later(
        2 * SECONDS, answer.set_result, "done"
    )  # Meanwhile: it lies there when the agent goes on.
    assert await answering.to(some_turns_of(answer), "stop") == "done"


async def test_what_a_command_fails_with_is_its_own() -> None:
    async def refused() -> None:
        raise ValueError("no")

    answering = Answering(SECONDS)
    with pytest.raises(ValueError, match="no"):
        await answering.to(refused(), "stop")
    assert await answering.to(asyncio.sleep(0, "done"), "cont") == "done"
