"""Runs in the guest: a game of the Atari 2600, its emulator kept in memory. Imports nothing of ours.

    serve       play on loopback, asked by one line: `begin ACTION...` is answered first and played then,
                `play ACTION...` is played, and answered with the state
    reference   read lineages on standard input, and write what each of their states must be

The reference never leaves its process: where the machines fork, it has the emulator clone its state and
restore it. Equal answers mean that a fork of the whole machine is as good as the emulator's own.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import socket
import sys
from collections.abc import Sequence
from typing import Protocol, cast

PORT = 7000
GAME = "breakout"
"""Played at random it is lost, and begun again, within a hundred and fifty actions."""
SEED = 2600
FRAMES_PER_ACTION = 4


class Bytes(Protocol):
    def tobytes(self) -> bytes: ...


class Snapshot(Protocol):
    def serialize(self) -> bytes: ...


class Emulator(Protocol):
    """As much of `ale_py.ALEInterface` as is used here."""

    def setInt(self, key: str, value: int) -> None: ...
    def setFloat(self, key: str, value: float) -> None: ...
    def loadROM(self, path: str) -> bool: ...
    def getMinimalActionSet(self) -> list[object]: ...
    def act(self, action: object) -> int: ...
    def reset_game(self) -> None: ...
    def game_over(self) -> bool: ...
    def lives(self) -> int: ...
    def getFrameNumber(self) -> int: ...
    def getEpisodeFrameNumber(self) -> int: ...
    def getRAM(self) -> Bytes: ...
    def getScreen(self) -> Bytes: ...
    def cloneState(self, *, include_rng: bool) -> Snapshot: ...
    def restoreState(self, state: Snapshot) -> None: ...


class Game:
    """The emulator, and the score, which is not the emulator's: it only tells what each action earned."""

    def __init__(self) -> None:
        # Not import statements: the checkout, where this is checked, has no emulator.
        ale_py = importlib.import_module("ale_py")
        roms = importlib.import_module("ale_py.roms")
        ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
        self.emulator = cast("Emulator", ale_py.ALEInterface())
        self.emulator.setInt("random_seed", SEED)
        self.emulator.setInt("frame_skip", FRAMES_PER_ACTION)
        # Sticky actions repeat the last one, which the emulator's own snapshots leave out.
        self.emulator.setFloat("repeat_action_probability", 0.0)
        self.emulator.loadROM(roms.get_rom_path(GAME))
        self.actions = self.emulator.getMinimalActionSet()
        self.score = 0
        self.episodes = 1

    def play(self, actions: Sequence[int]) -> None:
        for action in actions:
            if self.emulator.game_over():
                self.emulator.reset_game()
                self.episodes += 1
            self.score += self.emulator.act(self.actions[action % len(self.actions)])

    def state(self) -> dict[str, object]:
        emulator = self.emulator
        return {
            "ram": emulator.getRAM().tobytes().hex(),
            "score": self.score,
            "lives": emulator.lives(),
            "over": emulator.game_over(),
            "episodes": self.episodes,
            "frames": [emulator.getFrameNumber(), emulator.getEpisodeFrameNumber()],
            "screen": digest(emulator.getScreen().tobytes()),
            "emulator": digest(emulator.cloneState(include_rng=True).serialize()),
        }

    def save(self) -> tuple[Snapshot, int, int]:
        return self.emulator.cloneState(include_rng=True), self.score, self.episodes

    def restore(self, saved: tuple[Snapshot, int, int]) -> None:
        self.emulator.restoreState(saved[0])
        _, self.score, self.episodes = saved


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def serve(game: Game) -> None:
    with socket.create_server(("127.0.0.1", PORT)) as server:
        while True:
            client, _ = server.accept()
            with client, client.makefile("rw") as lines:
                verb, *actions = lines.readline().split()
                numbers = [int(action) for action in actions]
                if verb == "play":
                    game.play(numbers)
                lines.write("ok done\n" if verb == "begin" else f"ok {json.dumps(game.state())}\n")
            if verb == "begin":
                game.play(numbers)


def reference(game: Game, lineages: list[list[dict[str, list[int]]]]) -> list[list[dict[str, object]]]:
    """Of each generation of each lineage, its children's states and its parent's."""
    birth = game.save()
    told: list[list[dict[str, object]]] = []
    for lineage in lineages:
        game.restore(birth)
        told.append([])
        for generation in lineage:
            game.play(generation["before"])
            instant = game.save()
            states: dict[str, object] = {}
            heir = instant
            for who in ("heir", "other", "parent"):
                game.restore(instant)
                game.play(generation[who])
                states[who] = game.state()
                heir = game.save() if who == "heir" else heir
            told[-1].append(states)
            game.restore(heir)
    return told


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(Game())
    else:
        print(json.dumps(reference(Game(), json.load(sys.stdin))))
