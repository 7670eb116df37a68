"""Gymnasium's Taxi for the search: kept in memory, played on loopback by one line for each question.

    pace SECONDS     from now on a step takes so long: it stands for a page to load, a test to run
    replay ACTION... begin again from the seed and take these actions
    step ACTION      take this one
    state            where it stands

All but `pace` answer with the state, one line of JSON. Two states with equal `history` and `random` did the
same, and will do the same.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import socket
import time
from collections.abc import Mapping
from typing import Protocol, SupportsFloat, SupportsInt, cast

PORT = 7000
SEED = 7
NAME = "Taxi-v4"


class BitGenerator(Protocol):
    @property
    def state(self) -> Mapping[str, object]: ...


class Generator(Protocol):
    @property
    def bit_generator(self) -> BitGenerator: ...


class Unwrapped(Protocol):
    @property
    def np_random(self) -> Generator: ...


class Gym(Protocol):
    """As much of `gymnasium.Env` as is used here."""

    @property
    def unwrapped(self) -> Unwrapped: ...
    def reset(self, *, seed: int) -> tuple[SupportsInt, dict[str, object]]: ...
    def step(self, action: int) -> tuple[SupportsInt, SupportsFloat, bool, bool, dict[str, object]]: ...


def digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


class Game:
    def __init__(self, gym: Gym) -> None:
        self.gym = gym
        self.pace_seconds = 0.0
        self.reset()

    def reset(self) -> None:
        self.observation = int(self.gym.reset(seed=SEED)[0])
        self.steps = 0
        self.total = 0.0
        self.ended = False
        self.history = digest(self.observation)

    def step(self, action: int) -> None:
        due = time.monotonic() + self.pace_seconds
        observation, reward, terminated, truncated, _ = self.gym.step(action)
        self.observation = int(observation)
        self.steps += 1
        self.total += float(reward)
        self.ended = bool(terminated or truncated)
        self.history = digest([self.history, action, self.observation, float(reward), self.ended])
        time.sleep(max(0.0, due - time.monotonic()))

    def state(self) -> str:
        return json.dumps(
            {
                "observation": self.observation,
                "steps": self.steps,
                "total": self.total,
                "ended": self.ended,
                "history": self.history,
                "random": digest(self.gym.unwrapped.np_random.bit_generator.state),
            }
        )

    def answer(self, words: list[str]) -> str:
        match words:
            case ["pace", seconds]:
                self.pace_seconds = float(seconds)
                return "done"
            case ["replay", *actions]:
                self.reset()
                for action in actions:
                    self.step(int(action))
            case ["step", action]:
                self.step(int(action))
            case ["state"]:
                pass
            case _:
                raise ValueError(f"not understood: {words}")
        return self.state()


def serve(game: Game, client: socket.socket) -> None:
    client.settimeout(5)
    with client, client.makefile("rw") as lines:
        try:
            verdict = f"ok {game.answer(lines.readline().split())}"
        except ValueError as error:
            verdict = f"refused {error}"
        lines.write(f"{verdict}\n")
        lines.flush()


def main() -> None:
    # Not an import statement: the checkout, where this is checked, has no Gymnasium.
    game = Game(cast("Gym", importlib.import_module("gymnasium").make(NAME)))
    with socket.create_server(("127.0.0.1", PORT)) as server:
        while True:
            try:
                serve(game, server.accept()[0])
            except OSError:
                continue  # A client that hung up must not end the environment.


if __name__ == "__main__":
    main()
