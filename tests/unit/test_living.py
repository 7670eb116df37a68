"""The limit of sessions alive at once, also for forks that begin together."""

from __future__ import annotations

from typing import cast

import pytest

from forktree.models import Reason, Uid
from forktree_agent.control.living import LiveLimit, Living
from forktree_agent.control.owners import child_owner, root_owner
from forktree_agent.control.records import Limits, Lineage
from forktree_agent.engine.contract import Engine, Machine, Owner, TreeId
from unit.control_facts import ROOT, machine

ONE, TWO = Uid("fork-one"), Uid("fork-two")


class Machines:
    """What `Living` asks of an engine."""

    def __init__(self, *owners: Owner, tree: str = ROOT) -> None:
        self.all = [self.of(owner, tree) for owner in owners]

    @staticmethod
    def of(owner: Owner, tree: str = ROOT) -> Machine:
        made = machine(owner)
        return Machine(
            id=made.id, owner=owner, tree=TreeId(tree), baseline=made.baseline,
            generation=made.generation, mode=made.mode, level=made.level,
        )  # fmt: skip

    def machines(self) -> tuple[Machine, ...]:
        return tuple(self.all)


def living(machines: Machines) -> Living:
    return Living(cast("Engine", machines))


def lineage(live: int | None, root: Uid = ROOT) -> Lineage:
    limits = Limits(depth=9, memory_bytes=None, live=live)
    return Lineage(root=root, parent=root, depth=1, template_uid=Uid("t"), limits=limits)


@pytest.mark.parametrize(
    ("live", "children", "fits"),
    [(None, 256, True), (3, 1, True), (3, 2, True), (3, 3, False), (1, 1, False), (1, 0, True)],
)
def test_the_root_counts_and_what_goes_beyond_is_refused(live: int | None, children: int, fits: bool) -> None:
    counted = living(Machines(root_owner(ROOT)))
    if fits:
        with counted.starting(ONE, children, lineage(live)):
            pass
        return
    with (
        pytest.raises(LiveLimit, match=r"treeLimits\.live") as refused,
        counted.starting(ONE, children, lineage(live)),
    ):
        pass
    assert refused.value.reason is Reason.LIVE_LIMIT
    assert "has 1 sessions alive" in refused.value.message


def test_two_forks_that_begin_together_share_the_room() -> None:
    counted = living(Machines(root_owner(ROOT)))
    with counted.starting(ONE, 2, lineage(4)):
        with pytest.raises(LiveLimit), counted.starting(TWO, 2, lineage(4)):
            pass
        with counted.starting(TWO, 1, lineage(4)):
            pass
    with counted.starting(TWO, 3, lineage(4)):  # The first one came to nothing.
        pass


def test_children_that_run_already_are_not_counted_twice_while_their_fork_is_under_way() -> None:
    machines = Machines(root_owner(ROOT))
    counted = living(machines)
    with counted.starting(ONE, 2, lineage(4)):
        machines.all += [Machines.of(child_owner(ONE, index)) for index in range(2)]
        with counted.starting(TWO, 1, lineage(4)):
            pass
    with pytest.raises(LiveLimit), counted.starting(TWO, 2, lineage(4)):
        pass


def test_other_trees_do_not_count() -> None:
    counted = living(Machines(root_owner(Uid("other")), tree="other"))
    with counted.starting(ONE, 5, lineage(5, Uid("other-still"))), counted.starting(TWO, 2, lineage(2)):
        pass
