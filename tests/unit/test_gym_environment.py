"""What the environment program of image `gym` makes of an environment, without Gymnasium.

The pond stands for one here; `test_guest_images.py` runs the program on real ones.
"""

from __future__ import annotations

import json
import socket
from dataclasses import dataclass, field

import pytest

from forktree_dev.images.gym.environment import Environment, Refused, distance, serve


@dataclass
class Luck:
    state: dict[str, object] = field(default_factory=lambda: {"drawn": 0})

    @property
    def bit_generator(self) -> Luck:
        return self


@dataclass
class Pond:
    """A row of fields, hole first, goal last; action 1 goes right, 0 left. Draws luck at every step."""

    desc: list[list[bytes]] = field(default_factory=lambda: [[b"H", b"S", b"F", b"G"]])
    np_random: Luck = field(default_factory=Luck)
    at: int = 1

    @property
    def unwrapped(self) -> Pond:
        return self

    @property
    def action_space(self) -> Pond:
        return self

    def __str__(self) -> str:
        return "Two()"

    def contains(self, x: object) -> bool:
        return x in (0, 1)

    def reset(self, *, seed: int | None = None) -> tuple[object, dict[str, object]]:
        self.np_random.state["seed"] = seed
        return self.at, {}

    def step(self, action: int) -> tuple[object, float, bool, bool, dict[str, object]]:
        drawn = self.np_random.state["drawn"]
        assert isinstance(drawn, int)
        self.np_random.state["drawn"] = drawn + 1
        self.at += 2 * action - 1
        return self.at, float(self.at == 3), self.at in (0, 3), False, {}


def playing(seed: int = 7) -> Environment:
    return Environment("Pond", Pond(), seed)


def test_equal_actions_from_equal_seeds_give_equal_states_and_others_do_not() -> None:
    first, second = playing(), playing()
    for environment in (first, second):
        environment.answer(["step", "1"])
    assert first.state() == second.state()
    second.answer(["step", "0"])
    second.answer(["step", "1"])
    assert (first.observation, first.total) == (second.observation, second.total)
    assert first.state() != second.state()  # The way there was another.
    assert playing(1).state()["random"] != playing(2).state()["random"]


def test_asking_changes_nothing() -> None:
    environment = playing()
    before = environment.state()
    environment.answer(["score"])
    assert json.loads(environment.answer(["state"])) == before


def test_the_score_rises_towards_the_goal_and_is_lowest_in_a_hole() -> None:
    environment = playing()
    scores = [environment.score()]
    for _ in range(2):
        environment.answer(["step", "1"])
        scores.append(environment.score())
    assert scores == [-0.5, -0.25, 1.0]
    drowned = playing()
    drowned.answer(["step", "0"])
    assert drowned.score() == -1.0


def test_the_score_of_an_environment_that_is_no_lake_is_its_rewards() -> None:
    pond = Pond()
    del pond.desc
    environment = Environment("Line", pond, None)
    environment.answer(["step", "1", "1"])
    assert environment.answer(["score"]) == "1.0"


@pytest.mark.parametrize(
    ("question", "why"),
    [
        ([], "ask for one of"),
        (["dance"], "ask for one of"),
        (["step"], "ask for one of"),
        (["step", "left"], "ask for one of"),
        (["step", "-1"], "ask for one of"),
        (["step", "2"], r"2 is not an action of Two\(\)"),
    ],
)
def test_a_question_that_makes_no_sense_is_refused_and_nothing_happens(question: list[str], why: str) -> None:
    environment = playing()
    before = environment.state()
    with pytest.raises(Refused, match=why):
        environment.answer(question)
    assert environment.state() == before


def test_an_episode_that_has_ended_takes_no_further_action() -> None:
    environment = playing()
    environment.answer(["step", "1", "1"])
    with pytest.raises(Refused, match="ended after 2 actions"):
        environment.answer(["step", "1"])


@pytest.mark.parametrize(
    ("sent", "answered"),
    [
        (b"score\n", b"ok -0.5\n"),
        (b"sing\n", b"refused ask for one of: step ACTION..., score, state; actions are numbers\n"),
        (b"", b"refused ask for one of: step ACTION..., score, state; actions are numbers\n"),
    ],
)
def test_each_client_gets_one_line_that_begins_with_the_verdict(sent: bytes, answered: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours:
        ours.sendall(sent)
        ours.shutdown(socket.SHUT_WR)
        serve(playing(), theirs)
        assert ours.makefile("rb").read() == answered


@pytest.mark.parametrize(("position", "steps"), [(0, 6), (14, 1), (15, 0), (5, 16), (12, 16)])
def test_distance_on_the_lake_of_the_examples(position: int, steps: int) -> None:
    lake = [[bytes([field]) for field in row] for row in (b"SFFF", b"FHFH", b"FFFH", b"HFFG")]
    assert distance(lake, position) == steps
