#!/usr/bin/python3
"""Keeps one Gymnasium environment alive in memory and answers for it on loopback: `gym-environment ID`.

Started once, when a template is baked, and forked with its machine ever after. `gym-ask` is its client:

    gym-ask step ACTION...   takes these actions, one after the other, and prints the state
    gym-ask score            prints one number, the higher the better
    gym-ask state            prints the state, one line of JSON

Two environments of equal state did the same, and will do the same: the state has a digest over everything
that was seen on the way, and one over the random generator that decides what comes.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import socket
from collections.abc import Mapping, Sequence
from typing import Protocol, SupportsFloat, cast, runtime_checkable

PORT = 7000
SECONDS = 5.0
"""For a client to send its question: one that hangs must not stop the others for long."""


class BitGenerator(Protocol):
    @property
    def state(self) -> Mapping[str, object]: ...


class Generator(Protocol):
    @property
    def bit_generator(self) -> BitGenerator: ...


class Space(Protocol):
    def contains(self, x: object) -> bool: ...


class Unwrapped(Protocol):
    @property
    def np_random(self) -> Generator: ...


class Gym(Protocol):
    """As much of `gymnasium.Env` as is used here."""

    @property
    def action_space(self) -> Space: ...
    @property
    def unwrapped(self) -> Unwrapped: ...
    def reset(self, *, seed: int | None = None) -> tuple[object, dict[str, object]]: ...
    def step(self, action: int) -> tuple[object, SupportsFloat, bool, bool, dict[str, object]]: ...


@runtime_checkable
class Numbers(Protocol):
    """One of NumPy's arrays or numbers."""

    def tolist(self) -> object: ...


class Refused(Exception):
    """The question cannot be answered; the text says why, in one line."""


def plain(value: object) -> object:
    """An observation as JSON has it: NumPy's arrays and numbers become lists and numbers."""
    return value.tolist() if isinstance(value, Numbers) else value


def digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=plain).encode()).hexdigest()


class Environment:
    """The live state, and what happened since it was reset."""

    def __init__(self, name: str, gym: Gym, seed: int | None) -> None:
        self.name = name
        self.gym = gym
        self.observation = plain(gym.reset(seed=seed)[0])
        self.actions: list[int] = []
        self.total = 0.0
        self.ended = False
        self.history = digest(self.observation)

    def step(self, action: int) -> None:
        """Take one action. Raises `Refused`, and then nothing has happened."""
        if self.ended:
            raise Refused(f"the episode has ended after {len(self.actions)} actions")
        if not self.gym.action_space.contains(action):
            raise Refused(f"{action} is not an action of {self.gym.action_space}")
        observation, reward, terminated, truncated, _ = self.gym.step(action)
        self.observation = plain(observation)
        self.actions.append(action)
        self.total += float(reward)
        self.ended = bool(terminated or truncated)
        self.history = digest([self.history, action, self.observation, float(reward), self.ended])

    def score(self) -> float:
        """The rewards so far. On a frozen lake, less how far the goal is, which no reward tells before it."""
        lake = getattr(self.gym.unwrapped, "desc", None)
        if lake is None:
            return self.total
        fields = cast("list[list[bytes]]", plain(lake))
        return self.total - distance(fields, cast("int", self.observation)) / sum(map(len, fields))

    def state(self) -> dict[str, object]:
        return {
            "environment": self.name,
            "observation": self.observation,
            "actions": self.actions,
            "total": self.total,
            "ended": self.ended,
            "history": self.history,
            "random": digest(self.gym.unwrapped.np_random.bit_generator.state),
        }

    def answer(self, question: Sequence[str]) -> str:
        """One line. Raises `Refused`."""
        match question:
            case ["step", *words] if words and all(word.isdigit() for word in words):
                for word in words:
                    self.step(int(word))
                return json.dumps(self.state())
            case ["score"]:
                return repr(self.score())
            case ["state"]:
                return json.dumps(self.state())
            case _:
                raise Refused("ask for one of: step ACTION..., score, state; actions are numbers")


def distance(lake: Sequence[Sequence[bytes]], position: int) -> int:
    """Steps from `position`, counted row by row, to the goal; from a hole, more than from anywhere else."""
    width = len(lake[0])
    row, column = divmod(position, width)
    if lake[row][column] == b"H":
        return len(lake) * width
    goal = [(i, fields.index(b"G")) for i, fields in enumerate(lake) if b"G" in fields]
    return min(abs(row - i) + abs(column - j) for i, j in goal)


def serve(environment: Environment, client: socket.socket) -> None:
    """One question and its answer."""
    client.settimeout(SECONDS)
    with client, client.makefile("rw") as lines:
        try:
            verdict = f"ok {environment.answer(lines.readline().split())}"
        except Refused as error:
            verdict = f"refused {error}"
        lines.write(f"{verdict}\n")
        lines.flush()


def main() -> None:
    parser = argparse.ArgumentParser(prog="gym-environment")
    parser.add_argument("id", help="of the environment, as gymnasium.make takes it, like FrozenLake-v1")
    parser.add_argument("--seed", type=int, help="of its random generator (default: a fresh one each time)")
    parser.add_argument(
        "--options", type=json.loads, default={}, help='for gymnasium.make, as JSON: {"is_slippery": false}'
    )
    arguments = parser.parse_args()
    # Not an import statement: the checkout, where this is checked and tested, has no Gymnasium.
    gym = cast("Gym", importlib.import_module("gymnasium").make(arguments.id, **arguments.options))
    environment = Environment(arguments.id, gym, arguments.seed)
    with socket.create_server(("127.0.0.1", PORT)) as server:
        while True:
            try:
                serve(environment, server.accept()[0])
            except (OSError, ValueError):
                continue  # A client that hung up or sent no text must not end the environment.


if __name__ == "__main__":
    main()
