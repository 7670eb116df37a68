"""The searches find what they should, keep what they say and leave nothing else."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from forktree import AsyncClient, AsyncSession, Session, errors, search
from forktree.search import Step
from unit.toy_agent import ToyAgent

WANTED = "badca"


@pytest.fixture
async def agent(tmp_path: Path) -> AsyncIterator[ToyAgent]:
    async with ToyAgent.running(tmp_path / "tls") as running:
        yield running


@pytest.fixture
async def client(agent: ToyAgent) -> AsyncIterator[AsyncClient]:
    async with agent.client() as client:
        yield client


async def letters(session: AsyncSession) -> str:
    return "" if len(await text_of(session)) >= len(WANTED) else "abcd"


async def add(session: AsyncSession, letter: str) -> object:
    return await session.exec(["add", letter], check=True)


async def alike(session: AsyncSession) -> float:
    return likeness(await text_of(session))


async def text_of(session: AsyncSession) -> str:
    return (await session.exec(["show"])).stdout


def likeness(text: str) -> float:
    """Letters that are right, less half of those that are not."""
    return sum(1.0 if a == b else -0.5 for a, b in zip(text, WANTED, strict=False))


async def test_beam_search_keeps_the_width_and_in_the_end_the_winner_alone(
    agent: ToyAgent, client: AsyncClient
) -> None:
    root = await client.sessions.create("t")
    steps: list[Step] = []
    found = await search.async_beam(
        root, propose=letters, act=add, score=alike, width=2, depth=9, progress=steps.append
    )
    assert "".join(found.actions) == agent.texts[found.session.id] == WANTED
    assert found.score == len(WANTED)
    assert len(agent.texts) == 1 + len(WANTED)  # The root and the winner's own line.
    assert agent.most <= 1 + len(WANTED) * 2 + 2 * 4
    assert [step.best_score for step in steps] == [1, 2, 3, 4, 5]


async def test_best_first_goes_deep_where_it_pays_and_stops_at_the_goal(
    agent: ToyAgent, client: AsyncClient
) -> None:
    root = await client.sessions.create("t")
    found = await search.async_best_first(
        root, propose=letters, act=add, score=alike, budget=50, goal=len(WANTED)
    )
    assert ("".join(found.actions), found.expanded) == (WANTED, len(WANTED))
    assert len(agent.texts) == 1 + len(WANTED)


async def test_best_first_keeps_no_more_open_than_it_may(agent: ToyAgent, client: AsyncClient) -> None:
    root = await client.sessions.create("t")
    found = await search.async_best_first(
        root, propose=letters, act=add, score=alike, budget=50, open_most=1, goal=len(WANTED)
    )
    assert "".join(found.actions) == WANTED
    assert agent.most <= 1 + len(WANTED) + 4


async def test_uct_finds_what_greed_does_not(agent: ToyAgent, client: AsyncClient) -> None:
    async def late(session: AsyncSession) -> float:
        """Three bad steps first: who follows the score never gets there."""
        text = await text_of(session)
        return 10.0 if text == "dd" else 1.0 if text.startswith("a") else -1.0

    async def three(session: AsyncSession) -> str:
        return "" if len(await text_of(session)) >= 2 else "abd"

    root = await client.sessions.create("t")
    found = await search.async_mcts(root, propose=three, act=add, score=late, iterations=40, goal=10)
    assert "".join(found.actions) == "dd"
    assert found.root.visits >= sum(child.visits for child in found.root.children)
    assert math.isclose(found.root.value, sum(child.value for child in found.root.children))
    assert len(agent.texts) == 3
    best_child = found.best.parent
    assert best_child is not None
    assert best_child.value / best_child.visits > -1.0  # What lies below was told to it.


async def test_a_failed_action_leaves_none_of_its_children(agent: ToyAgent, client: AsyncClient) -> None:
    async def fails(session: AsyncSession, letter: str) -> object:
        return await session.exec(["fail"] if letter == "c" else ["add", letter], check=True)

    root = await client.sessions.create("t")
    with pytest.raises(errors.CommandFailed):
        await search.async_beam(root, propose=letters, act=fails, score=alike, width=2, depth=9)
    assert list(agent.texts) == [root.id]


async def test_a_search_with_nothing_to_do_is_over(agent: ToyAgent, client: AsyncClient) -> None:
    async def nothing(_: AsyncSession) -> list[str]:
        return []

    root = await client.sessions.create("t")
    for found in (
        await search.async_beam(root, propose=nothing, act=add, score=alike, width=2, depth=9),
        await search.async_best_first(root, propose=nothing, act=add, score=alike, budget=9),
        await search.async_mcts(root, propose=nothing, act=add, score=alike, iterations=9),
    ):
        assert (found.session, found.actions) == (root, [])
    assert list(agent.texts) == [root.id]


async def test_the_sync_searches_do_the_same(agent: ToyAgent) -> None:
    def show(session: Session) -> str:
        return session.exec(["show"]).stdout

    def propose(session: Session) -> str:
        return "" if len(show(session)) >= len(WANTED) else "abcd"

    def act(session: Session, letter: str) -> object:
        return session.exec(["add", letter], check=True)

    def score(session: Session) -> float:
        return likeness(show(session))

    def work() -> None:
        with agent.sync_client() as client:
            for found in (
                search.beam(
                    client.sessions.create("t"), propose=propose, act=act, score=score, width=2, depth=9
                ),
                search.best_first(
                    client.sessions.create("t"), propose=propose, act=act, score=score, budget=5
                ),
                search.mcts(
                    client.sessions.create("t"), propose=propose, act=act, score=score, iterations=30
                ),
            ):
                assert agent.texts[found.session.id] == "".join(found.actions)
                assert WANTED.startswith("".join(found.actions)[:3])

    await asyncio.to_thread(work)
