"""How many sessions of a tree are alive: those with a machine, and those that a fork is about to give one."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import ClassVar

from forktree.errors import ForktreeError
from forktree.models import Reason, Uid
from forktree_agent.control.owners import ChildMachine, meaning
from forktree_agent.control.records import Lineage
from forktree_agent.engine.contract import Engine, Owner, TreeId


class LiveLimit(ForktreeError):
    """The tree may not have so many sessions alive at once. Nothing was started."""

    reason: ClassVar[Reason] = Reason.LIVE_LIMIT


class Living:
    """Counts, so that forks that begin together cannot do together what neither may do alone."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._promised: dict[Uid, tuple[Uid, int]] = {}
        """Of each fork under way: its tree's root, and how many children it will have."""

    @contextmanager
    def starting(self, fork: Uid, children: int, lineage: Lineage) -> Generator[None]:
        """Within, `fork` may start its `children`. Raises `LiveLimit` at once where their tree is full."""
        limit = lineage.limits.live
        if limit is not None and children:
            alive = self._alive(lineage.root)
            if alive + children > limit:
                raise LiveLimit(
                    f"the tree has {alive} sessions alive and may have {limit} at once, so {children} more do"
                    " not fit: delete or release some, or use a template with a higher treeLimits.live"
                )
        self._promised[fork] = (lineage.root, children)
        try:
            yield
        finally:
            del self._promised[fork]

    def _alive(self, root: Uid) -> int:
        promised = sum(children for tree, children in self._promised.values() if tree == root)
        # Those of a fork under way are counted as promised, however many of them run already.
        running = (each for each in self._engine.machines() if each.tree == TreeId(root))
        return promised + sum(1 for each in running if not self._under_way(each.owner))

    def _under_way(self, owner: Owner) -> bool:
        match meaning(owner):
            case ChildMachine(fork=fork):
                return fork in self._promised
            case _:
                return False
