"""The searches that replay and fork are compared by: the same both ways, with what each costs counted."""

from __future__ import annotations

import hashlib

import pytest

from forktree.models import Level, Mode
from forktree.wire import ForkedChild, SessionForked
from forktree_bench.guest import ask
from forktree_bench.guest.game import Game
from forktree_bench.guest.worker import RUNS, Worker
from forktree_bench.suites.search import ByFork, ByReplay, Different, State, beam, best_first, way_left

WORDS_AT = len(ask())


class World:
    """Sessions that each keep a list of actions. Where one stands is computed from them."""

    def __init__(self, *names: str) -> None:
        self.actions: dict[str, list[str]] = {name: [] for name in names}
        self.most = 0
        self.lucky = False
        """Each replay comes to something else, as where a reset does not reset all."""
        self.luck = 0

    async def run(self, session: str, *argv: str) -> str:
        match argv[WORDS_AT:]:
            case ("replay", *actions):
                self.luck += self.lucky
                self.actions[session] = list(actions)
            case ("step", action):
                self.actions[session].append(action)
            case _:
                pass
        taken = " ".join(self.actions[session])
        digest = hashlib.sha256(f"{taken}{self.luck}".encode()).hexdigest()
        return State(
            observation=int(digest[:8], 16) % 500,
            steps=len(self.actions[session]),
            total=0.0,
            ended=False,
            history=digest,
            random=digest,
        ).model_dump_json()

    async def fork(self, session: str, replicas: int) -> SessionForked:
        children: list[ForkedChild] = []
        for index in range(replicas):
            name = f"{session}.{index}"
            assert name not in self.actions, f"{session} was forked before"
            self.actions[name] = list(self.actions[session])
            children.append(ForkedChild(session_id=name, index=index, mode=Mode.FORK, level=Level.MEMORY))
        self.most = max(self.most, len(self.actions))
        return SessionForked(
            parent_session_id=session,
            template_id="t",
            fork_id="f",
            recorded=True,
            total_time_ms=1.0,
            children=tuple(children),
        )

    async def delete(self, session: str) -> None:
        del self.actions[session]


async def test_a_beam_comes_to_the_same_state_by_replay_and_by_fork() -> None:
    replay, fork = ByReplay(World("a"), ("a",)), ByFork(World("a"), ("a",))
    parallel = ByReplay(World("a", "b", "c"), ("a", "b", "c"))
    found = [await beam(way, depth=10, branching=3) for way in (replay, parallel, fork)]
    assert found[0].state == found[1].state == found[2].state
    assert len(found[0].actions) == 10
    # By replay the way to each of the 30 branches is gone again, 3 * (0 + 1 + ... + 9), and then its step.
    for way in (replay, parallel):
        assert (way.resets, way.forks, way.steps) == (30, 0, 3 * 45 + 30)
    assert (fork.resets, fork.forks, fork.steps) == (0, 10, 30)
    assert sorted(replay.overhead) == sorted(fork.overhead) == list(range(1, 11))


async def test_losers_of_a_beam_are_pruned_before_the_next_fork() -> None:
    world = World("a")
    await beam(ByFork(world, ("a",)), depth=4, branching=3)
    assert world.most == 4 + 3  # The winners so far, the start among them, and the last three.
    assert len(world.actions) == 1 + 4


async def test_the_tree_search_of_web_agents_resets_105_times_and_forks_21_times() -> None:
    replay, fork = ByReplay(World("a"), ("a",)), ByFork(World("a"), ("a",))
    ends = [await best_first(way, depth=5, branching=5, budget=20) for way in (replay, fork)]
    assert ends[0].state == ends[1].state
    assert (replay.resets, fork.forks, fork.steps) == (105, 21, 105)
    assert max(fork.overhead) <= 5


async def test_a_replay_that_comes_to_something_else_is_no_comparison() -> None:
    world = World("a")
    world.lucky = True
    with pytest.raises(ExceptionGroup) as failed:
        await beam(ByReplay(world, ("a",)), depth=2, branching=2)
    assert failed.group_contains(Different)


def test_a_state_is_worth_more_the_nearer_the_passengers_goal_is() -> None:
    def observation(taxi: tuple[int, int], passenger: int, goal: int) -> int:
        return ((taxi[0] * 5 + taxi[1]) * 5 + passenger) * 4 + goal

    assert way_left(observation((4, 3), 4, 3)) == 0  # On board, and there.
    assert way_left(observation((0, 0), 4, 3)) == 7
    assert way_left(observation((0, 0), 0, 3)) == 8  # Still to be picked up.
    assert way_left(observation((2, 0), 0, 3)) == 10


def dirtied(worker: Worker) -> int:
    return len(worker.memory) - bytes(worker.memory).count(b"\x01")


def test_the_worker_dirties_as_much_as_it_is_told_and_each_time_other_bytes() -> None:
    worker = Worker()
    worker.answer(["dirty", "0"])
    assert dirtied(worker) == 0
    assert worker.answer(["dirty", "512"]) == "done"
    first = bytes(worker.memory[: 1 << 20])
    assert dirtied(worker) == 512 << 10
    run = (512 << 10) // RUNS
    assert first[run : run + run // 2] == b"\x01" * (run // 2)
    worker.answer(["dirty", "512"])
    again = bytes(worker.memory[: 1 << 20])
    assert set(first) - {1} != set(again) - {1}
    assert dirtied(worker) == 512 << 10
    worker.answer(["dirty", "65536"])
    assert dirtied(worker) == 64 << 20


def test_the_worker_tells_each_step_once() -> None:
    worker = Worker()
    worker.step()
    worker.step()
    assert worker.steps().count(",") == 2  # Two that it took, and one that came after another.
    assert worker.steps() == '{"took": [], "late": []}'


def test_a_game_is_replayed_from_its_seed() -> None:
    class Bits:
        def __init__(self) -> None:
            self.state: dict[str, object] = {"at": 1}

    class Random:
        bit_generator = Bits()

    class Unwrapped:
        np_random = Random()

    class Line:
        """Counts up, and forgets on reset."""

        unwrapped = Unwrapped()
        at = 0

        def reset(self, *, seed: int) -> tuple[int, dict[str, object]]:
            self.at = seed
            return self.at, {}

        def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, object]]:
            self.at += action
            return self.at, 1.0, False, False, {}

    game = Game(Line())
    start = game.answer(["state"])
    for action in ("1", "2"):
        led = game.answer(["step", action])
    game.answer(["step", "3"])
    assert game.answer(["replay", "1", "2"]) == led
    assert game.answer(["replay"]) == start
    with pytest.raises(ValueError, match="not understood"):
        game.answer(["nonsense"])
