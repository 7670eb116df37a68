"""Which children of a fork are kept, and which is the best. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from forktree_agent.control.branch_records import Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One child as it stands when all commands of its fork are done."""

    index: int
    score: float | None
    alive: bool
    """It has a machine. One without cannot go on, so it takes nobody's place."""
    present: bool
    """Its Session object is there."""
    forked: bool
    """Something was forked from it."""


def judge(candidates: Sequence[Candidate], keep_top: int | None) -> Verdict:
    """Who is deleted. `keep_top` None: nobody."""
    lost = tuple(each.index for each in candidates if not each.alive)
    if keep_top is None:
        return Verdict(losers=(), lost=lost, pruned=True)
    ranked = sorted((each for each in candidates if each.alive), key=_rank)
    kept = {each.index for each in ranked[:keep_top]}
    losers = tuple(
        each.index for each in candidates if each.index not in kept and each.present and not each.forked
    )
    return Verdict(losers=losers, lost=lost)


def best(scores: Iterable[tuple[int, float | None]], out: Collection[int]) -> tuple[int, float] | None:
    """Index and score of the best child that is not `out`; of equals the first."""
    found: tuple[int, float] | None = None
    for index, score in sorted(scores, key=lambda each: each[0]):
        if score is not None and index not in out and (found is None or score > found[1]):
            found = (index, score)
    return found


def _rank(candidate: Candidate) -> tuple[bool, float, int]:
    """The less, the better."""
    return candidate.score is None, -(candidate.score or 0.0), candidate.index
