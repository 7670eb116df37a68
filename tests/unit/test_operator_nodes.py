"""How much room a node has, between what its agent counts and what was promised there."""

from __future__ import annotations

from datetime import UTC, datetime

from forktree.models.base import ObjectMeta, Uid
from forktree.models.fork_node import ForkNode, ForkNodeStatus
from forktree_operator.cluster import Lease, LeaseSpec
from forktree_operator.lifesigns import Lifesigns
from forktree_operator.nodes import PROMISE_SECONDS, Nodes

WALL = datetime(2026, 5, 1, tzinfo=UTC)


def fork_node(
    reserved: int, *, version: int, capacity: int = 1000, ready: bool = True, boot: str = "b1"
) -> ForkNode:
    status = ForkNodeStatus(ready=ready, capacity_bytes=capacity, reserved_bytes=reserved, boot_id=boot)
    return ForkNode(metadata=ObjectMeta(name="n1", resource_version=str(version)), status=status)


def nodes(first: ForkNode) -> Nodes:
    """One node whose agent was heard from at 0."""
    lifesigns = Lifesigns()
    spec = LeaseSpec(holder_identity="agent", lease_duration_seconds=3600, renew_time=WALL)
    lifesigns.observe(Lease(metadata=ObjectMeta(name="agent-n1"), spec=spec), 0.0, WALL)
    known = Nodes(lifesigns)
    known.observe(first)
    return known


def free(known: Nodes, now: float = 1.0) -> int:
    (room,) = known.rooms(now)
    return room.free_bytes


def test_a_promise_takes_room_until_the_agent_counts_it() -> None:
    known = nodes(fork_node(100, version=1))
    known.promise("n1", Uid("a"), 300, until=1.0 + PROMISE_SECONDS)
    known.promise("n1", Uid("b"), 300, until=1.0 + PROMISE_SECONDS)
    assert free(known) == 300
    known.observe(fork_node(400, version=2))
    assert free(known) == 300
    known.observe(fork_node(700, version=3))
    assert free(known) == 300


def test_a_count_that_stands_for_less_than_a_promise_pays_none() -> None:
    known = nodes(fork_node(0, version=1))
    known.promise("n1", Uid("a"), 300, until=1.0 + PROMISE_SECONDS)
    known.observe(fork_node(299, version=2))
    assert free(known) == 1000 - 299 - 300


def test_a_promise_can_be_withdrawn_and_ends_by_itself() -> None:
    known = nodes(fork_node(0, version=1))
    known.promise("n1", Uid("a"), 300, until=1.0 + PROMISE_SECONDS)
    known.promise("n1", Uid("b"), 200, until=1.0 + PROMISE_SECONDS)
    known.withdraw("n1", Uid("a"))
    known.withdraw("n1", Uid("a"))
    known.withdraw("elsewhere", Uid("a"))
    assert free(known) == 800
    assert free(known, 1.0 + PROMISE_SECONDS) == 800
    assert free(known, 1.1 + PROMISE_SECONDS) == 1000


def test_the_promises_of_a_first_session_are_paid_as_its_agent_bakes_and_starts_it() -> None:
    known = nodes(fork_node(0, version=1))
    known.promise("n1", Uid("template"), 200, until=1.0 + PROMISE_SECONDS)
    known.promise("n1", Uid("a"), 300, until=1.0 + PROMISE_SECONDS)
    known.promise("n1", Uid("b"), 300, until=1.0 + PROMISE_SECONDS)
    (room,) = known.rooms(1.0)
    assert room.promised == {"template", "a", "b"}
    for version, (counted, left) in enumerate([(300, 100), (200, 200), (500, 200), (800, 200)], 2):
        # The machine that boots takes more than the baseline it becomes; nobody else may have the difference.
        known.observe(fork_node(counted, version=version))
        assert free(known) == left
    known.promise("n1", Uid("c"), 100, until=2.0 + PROMISE_SECONDS)
    known.promise("n1", Uid("d"), 100, until=2.0 + PROMISE_SECONDS)
    known.withdraw("n1", Uid("c"), Uid("d"))
    assert free(known) == 200


def test_an_event_from_behind_changes_nothing() -> None:
    known = nodes(fork_node(0, version=1))
    known.promise("n1", Uid("a"), 300, until=1.0 + PROMISE_SECONDS)
    known.observe(fork_node(300, version=5))
    known.observe(fork_node(0, version=4))
    assert free(known) == 700


def test_only_more_room_is_worth_asking_again() -> None:
    known = nodes(fork_node(500, version=1, ready=False))
    assert known.observe(fork_node(500, version=2))
    assert not known.observe(fork_node(600, version=3))
    assert known.observe(fork_node(400, version=4))
    assert known.observe(fork_node(400, version=5, capacity=2000))
    assert not known.observe(fork_node(0, version=6, ready=False))


def test_a_node_whose_record_went_is_remembered_until_nobody_is_left_there() -> None:
    known = nodes(fork_node(0, version=1, boot="b7"))
    known.relist([])
    assert known.rooms(1.0) == []
    assert (known.names(), known.boot_id("n1")) == (frozenset({"n1"}), "b7")
    known.bury("n1")
    assert known.names() == frozenset()


def test_a_node_is_seen_to_be_rebooted_only_when_both_boots_are_known() -> None:
    known = nodes(fork_node(0, version=1, boot="b1"))
    assert known.rebooted("n1", "b2")
    assert not known.rebooted("n1", "b1")
    assert not known.rebooted("n1", "")
    assert not known.rebooted("unknown", "b2")
