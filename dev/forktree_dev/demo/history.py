"""Judging what the demo's programs say about themselves: pure, and in no need of trust in them.

A history is the lines of a program's file. Each has `step luck total note digest`, where the digest covers
the one before it, so that a history is valid as a whole or not at all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict

from forktree_dev.demo.workload.program import BLOCK_BYTES, BLOCKS


class Awakening(BaseModel):
    """A program found its machine under a new name: it was forked."""

    model_config = ConfigDict(frozen=True)

    name: str
    step: int
    """The last step taken before."""


class State(BaseModel):
    """What a program knows of itself at one step."""

    model_config = ConfigDict(frozen=True)

    name: str
    step: int
    total: int
    """Its child process's counter."""
    digest: str
    memory_sha256: str
    pids: tuple[int, int]
    connection: tuple[int, int]
    """Ports of its loopback connection."""
    awakenings: tuple[Awakening, ...]
    slowest_step_ms: float
    """Longest time between two steps since it was asked last."""
    history: tuple[str, ...]


class Contradiction(Exception):
    """A program's state is not what its history says, or not what its parent's was."""


@dataclass(frozen=True, slots=True)
class Continued:
    """A child that went on from its parent's instant."""

    name: str
    at_step: int


def check_consistent(state: State) -> None:
    """Memory, counter and file of one program agree. Raises `Contradiction`."""
    memory, digest, total = bytearray(BLOCKS * BLOCK_BYTES), "", 0
    for number, line in enumerate(state.history, start=1):
        words, _, written = line.rpartition(" ")
        step, luck, counted, _note = words.split(" ")
        digest = hashlib.sha256(f"{digest} {words}".encode()).hexdigest()
        total += int(luck, 16)
        _agree(
            state, f"line {number} of its file", (int(step), written, int(counted)), (number, digest, total)
        )
        at = number % BLOCKS * BLOCK_BYTES
        memory[at : at + 32] = bytes.fromhex(digest)
    _agree(state, "the length of its file", state.step, len(state.history))
    _agree(state, "its running hash", state.digest, digest)
    _agree(state, "its child process's counter", state.total, total)
    _agree(state, "its memory", state.memory_sha256, hashlib.sha256(memory).hexdigest())


def check_continued(child: State, before: State, after: State) -> Continued:
    """`child` went on from an instant of the parent that was seen `before` and `after` the fork.

    Everything up to that instant is the parent's, to the byte, and so are processes and connection.
    Raises `Contradiction`.
    """
    if not child.awakenings or child.awakenings[-1].name != child.name:
        raise Contradiction(f"{child.name} never noticed that it is a machine of its own")
    at = child.awakenings[-1].step
    if not before.step <= at <= after.step:
        raise Contradiction(
            f"{child.name} went on from step {at}, but {before.name} was forked between its steps"
            f" {before.step} and {after.step}"
        )
    _agree(child, f"its past up to step {at}", child.history[:at], after.history[:at])
    _agree(child, "its forks before this one", child.awakenings[:-1], before.awakenings)
    _agree(child, "its processes", child.pids, before.pids)
    _agree(child, "its connection", child.connection, before.connection)
    return Continued(child.name, at)


def check_unmoved(before: State, after: State) -> None:
    """A parent noticed nothing of being forked. Raises `Contradiction`."""
    _agree(after, "its name", after.name, before.name)
    _agree(after, "its own forks", after.awakenings, before.awakenings)
    _agree(after, "its processes", after.pids, before.pids)
    _agree(after, "its connection", after.connection, before.connection)
    _agree(after, "its past", after.history[: before.step], before.history)


def check_apart(siblings: Sequence[State], notes: Sequence[str]) -> None:
    """Each of `siblings` wrote its own note after it was forked, and none has another's."""
    for state, note in zip(siblings, notes, strict=True):
        own = {line.split(" ")[3] for line in state.history[state.awakenings[-1].step :]}
        _agree(state, "what it was told", own & set(notes), {note})


def _agree(state: State, what: str, seen: object, expected: object) -> None:
    if seen != expected:
        raise Contradiction(f"{state.name}: {what} is not what it must be")
