"""Tree searches over live sessions, and the steps they are made of.

    found = search.beam(
        client.sessions.create("lake"),
        propose=lambda session: ["1", "2", "3"],
        act=lambda session, action: session.exec(["gym-ask", "step", action], check=True),
        score=lambda session: float(session.exec(["gym-ask", "score"], check=True).stdout),
        width=2, depth=6,
    )
    print(found.actions, found.score)

A search that fails leaves what it had made below its root, to be looked at and pruned with it. Every one has
an `async_` form for an `AsyncSession`, whose functions are awaited. A search of your own is a loop over
`expand`, `prune` and `keep_only`.
"""

from __future__ import annotations

from forktree._async.searching import (
    AsyncAct,
    AsyncPropose,
    AsyncScore,
    async_beam,
    async_best_first,
    async_expand,
    async_keep_only,
    async_mcts,
    async_prune,
)
from forktree._nodes import Found, Node, backpropagate, best_of, uct
from forktree._progress import Progress, Step
from forktree._sync.searching import (
    Act,
    Propose,
    Score,
    beam,
    best_first,
    expand,
    keep_only,
    mcts,
    prune,
)

__all__ = [
    "Act",
    "AsyncAct",
    "AsyncPropose",
    "AsyncScore",
    "Found",
    "Node",
    "Progress",
    "Propose",
    "Score",
    "Step",
    "async_beam",
    "async_best_first",
    "async_expand",
    "async_keep_only",
    "async_mcts",
    "async_prune",
    "backpropagate",
    "beam",
    "best_first",
    "best_of",
    "expand",
    "keep_only",
    "mcts",
    "prune",
    "uct",
]
