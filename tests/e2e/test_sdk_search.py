"""Searches and a Gymnasium environment on a real guest: a frozen lake in image `gym`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Generator
from contextlib import aclosing, contextmanager

import pytest
import pytest_asyncio
import yaml
from gymnasium import spaces

from e2e.whole import SECONDS, Whole
from forktree import AsyncClient, AsyncSession, Client, errors, search
from forktree.gym import ForktreeEnv, GymAsk
from forktree_dev.checkout import CHECKOUT

LAKE = CHECKOUT / "examples" / "beam-search" / "lake.yaml"
DOWN, RIGHT, UP = 1, 2, 3

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest_asyncio.fixture(loop_scope="session")
async def client(whole: Whole) -> AsyncIterator[AsyncClient]:
    template, _ = yaml.safe_load_all(LAKE.read_text())
    template["metadata"]["namespace"] = whole.namespace
    await whole.system.kubectl.apply(template)
    async with AsyncClient(whole.node.url, token=whole.token, ca=whole.node.ca_path) as client:
        yield client


async def moves(session: AsyncSession) -> list[str]:
    state = GymAsk().state(await session.exec(["gym-ask", "state"], check=True))
    return [] if state["ended"] else [str(DOWN), str(RIGHT), str(UP)]


async def move(session: AsyncSession, action: str) -> object:
    return await session.exec(["gym-ask", "step", action], check=True)


async def rating(session: AsyncSession) -> float:
    return float((await session.exec(["gym-ask", "score"], check=True)).stdout)


async def test_a_beam_search_crosses_the_lake_and_leaves_only_its_way(
    client: AsyncClient, whole: Whole
) -> None:
    machines = whole.machines()
    root = await client.sessions.create("lake")
    found = await search.async_beam(root, propose=moves, act=move, score=rating, width=2, depth=8, goal=1.0)
    assert (found.score, len(found.actions)) == (1.0, 6)
    async with asyncio.timeout(SECONDS), aclosing((await root.tree()).watch()) as trees:
        async for tree in trees:  # What is below a deleted session goes at the collector's pace.
            if [node.id for node in tree.path(found.session.id)] == [node.id for node in tree]:
                break
    assert len(whole.machines() - machines) == 7

    await client.prune([root])
    await whole.machines_are(machines)


@contextmanager
def lake(client: Client) -> Generator[ForktreeEnv[int, int]]:
    origin = client.sessions.create("lake")
    environment = ForktreeEnv[int, int](origin, GymAsk(), spaces.Discrete(16), spaces.Discrete(4))  # type: ignore[arg-type]
    yield environment
    environment.close()
    origin.delete()


async def test_an_environment_goes_back_to_a_state_as_often_as_wanted(
    client: AsyncClient, whole: Whole
) -> None:
    machines = whole.machines()

    def play() -> None:
        with (
            Client(whole.node.url, token=whole.token, ca=whole.node.ca_path) as sync,
            lake(sync) as environment,
        ):
            with pytest.raises(Exception, match="reset"):
                environment.step(DOWN)
            observation, info = environment.reset()
            assert (observation, info["actions"]) == (0, [])
            assert environment.step(DOWN)[:4] == (4, 0.0, False, False)
            state = environment.clone_state()
            assert environment.step(RIGHT)[:4] == (5, 0.0, True, False)  # A hole.
            with pytest.raises(errors.CommandFailed, match="ended"):
                environment.step(RIGHT)
            for _ in range(2):
                environment.restore_state(state)
                for action, field in ((DOWN, 8), (RIGHT, 9)):
                    observation, *_, info = environment.step(action)
                    assert observation == field
                assert info["actions"] == [DOWN, DOWN, RIGHT]
            for action in (DOWN, RIGHT):
                environment.step(action)
            assert environment.step(RIGHT)[:3] == (15, 1.0, True)
            assert environment.reset()[0] == 0
            assert len(whole.machines() - machines) == 2  # The origin and the episode.

    await asyncio.to_thread(play)
    await whole.machines_are(machines)
