"""What a search knows of the sessions it has made."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

S = TypeVar("S")
"""`forktree.Session` or `forktree.AsyncSession`."""
A = TypeVar("A")
"""What an action is: a move, a command, a prompt."""


@dataclass(eq=False, slots=True, kw_only=True)
class Node(Generic[S, A]):
    """A session as a search sees it."""

    session: S
    action: A | None = None
    """What led here from `parent`. None for the root."""
    parent: Node[S, A] | None = None
    score: float = -math.inf
    children: list[Node[S, A]] = field(default_factory=list["Node[S, A]"])
    visits: int = 0
    value: float = 0.0
    """Sum of what was found at and below it, over all its visits."""
    pruned: bool = False
    """Its session is deleted."""

    @property
    def depth(self) -> int:
        return sum(1 for _ in self.ancestors())

    @property
    def actions(self) -> list[A]:
        """From the root to here."""
        taken = [node.action for node in (self, *self.ancestors()) if node.action is not None]
        return taken[::-1]

    def ancestors(self) -> Iterator[Node[S, A]]:
        """From its parent up to the root."""
        above = self.parent
        while above is not None:
            yield above
            above = above.parent

    def below(self) -> Iterator[Node[S, A]]:
        """Itself and all below it, each before those below it."""
        yield self
        for child in self.children:
            yield from child.below()


@dataclass(slots=True, kw_only=True)
class Found(Generic[S, A]):
    """What a search came to. The sessions of `best` and of all above it run; the others are deleted."""

    best: Node[S, A]
    root: Node[S, A]
    expanded: int
    """Nodes whose actions were tried."""

    @property
    def session(self) -> S:
        return self.best.session

    @property
    def score(self) -> float:
        return self.best.score

    @property
    def actions(self) -> list[A]:
        """What leads from the root to the best."""
        return self.best.actions


def backpropagate(node: Node[S, A], value: float) -> None:
    """Count a visit that found `value`, here and at all above."""
    for each in (node, *node.ancestors()):
        each.visits += 1
        each.value += value


def best_of(root: Node[S, A]) -> Node[S, A]:
    """The highest score; of equal ones the first that was found. The root only where there is nothing
    else."""
    live = [node for node in root.below() if not node.pruned]
    return max(live, key=lambda node: node.score)


def uct(node: Node[S, A], exploration: float, lowest: float, highest: float) -> float:
    """How much a visit to `node` promises: its mean value, from 0 for `lowest` to 1 for `highest`, and a
    bonus for having been visited little."""
    if node.visits == 0 or node.parent is None:
        return math.inf
    span = highest - lowest
    mean = (node.value / node.visits - lowest) / span if span > 0 else 0.5
    return mean + exploration * math.sqrt(math.log(node.parent.visits) / node.visits)
