"""Agents are judged by what is seen of their Leases, never by their clocks alone."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from forktree.models.base import ObjectMeta
from forktree_operator.cluster import Lease, LeaseSpec
from forktree_operator.decide.agents import AgentState
from forktree_operator.lifesigns import Lifesigns

WALL = datetime(2026, 5, 1, tzinfo=UTC)


def lease(
    renewed_seconds: float, *, node: str = "n1", holder: str | None = "agent", duration: int = 15
) -> Lease:
    spec = LeaseSpec(
        holder_identity=holder,
        lease_duration_seconds=duration,
        renew_time=WALL + timedelta(seconds=renewed_seconds),
    )
    return Lease(metadata=ObjectMeta(name=f"agent-{node}", namespace="forktree-system"), spec=spec)


def states(signs: Lifesigns, *times: float) -> list[AgentState]:
    return [signs.state("n1", now) for now in times]


def test_silence_is_counted_from_the_last_change_seen() -> None:
    signs = Lifesigns()
    signs.observe(lease(0), 100.0, WALL)
    signs.observe(lease(5), 105.0, WALL)
    signs.observe(lease(5), 112.0, WALL)  # Seen again, not renewed.
    assert states(signs, 120, 121, 135, 136) == [
        AgentState.FRESH,
        AgentState.STALE,
        AgentState.STALE,
        AgentState.LOST,
    ]


def test_an_agent_with_a_wrong_clock_is_as_good_as_any() -> None:
    signs = Lifesigns()
    for step in range(10):
        signs.observe(lease(step * 5 - 86_400), 100.0 + step * 5, WALL)
    assert states(signs, 146) == [AgentState.FRESH]


def test_an_old_lease_gives_no_work_at_first_sight_but_no_verdict_either() -> None:
    signs = Lifesigns()
    signs.observe(lease(-3600), 100.0, WALL)
    assert states(signs, 100.1, 114, 115.1) == [AgentState.STALE, AgentState.STALE, AgentState.LOST]


def test_an_agent_that_comes_back_is_told_of() -> None:
    signs = Lifesigns()
    assert signs.observe(lease(0), 100.0, WALL)
    assert not signs.observe(lease(5), 105.0, WALL)
    assert signs.observe(lease(60), 160.0, WALL)
    assert states(signs, 161) == [AgentState.FRESH]


def test_an_agent_that_comes_back_is_told_of_also_where_a_list_shows_it() -> None:
    signs = Lifesigns()
    assert signs.relist([lease(0)], ["n1"], 100.0, WALL)
    assert not signs.relist([lease(5)], ["n1"], 105.0, WALL)
    assert signs.relist([lease(60)], ["n1"], 160.0, WALL)


def test_a_lease_without_a_holder_gives_no_work() -> None:
    signs = Lifesigns()
    signs.observe(lease(0, holder=""), 100.0, WALL)
    assert states(signs, 100, 131) == [AgentState.STALE, AgentState.LOST]


def test_a_node_without_a_lease_is_lost_after_a_while_and_one_that_is_unknown_is_not() -> None:
    signs = Lifesigns()
    signs.relist([], ["n1"], 100.0, WALL)
    signs.relist([], ["n1"], 110.0, WALL)
    signs.relist([], ["n1"], 120.0, WALL)
    assert states(signs, 101, 131) == [AgentState.STALE, AgentState.LOST]
    assert signs.state("n2", 1000.0) is AgentState.STALE


def test_a_lease_that_was_deleted_is_silence() -> None:
    signs = Lifesigns()
    signs.relist([lease(0)], ["n1"], 100.0, WALL)
    signs.relist([], ["n1"], 105.0, WALL)
    assert states(signs, 106, 136) == [AgentState.STALE, AgentState.LOST]


def test_silence_while_nobody_could_look_does_not_count() -> None:
    signs = Lifesigns()
    signs.relist([lease(0)], ["n1"], 100.0, WALL)
    signs.relist([lease(0)], ["n1"], 160.0, WALL)  # The API server was away for a minute.
    assert states(signs, 161, 174, 176) == [AgentState.STALE, AgentState.STALE, AgentState.LOST]
    signs.observe(lease(170), 170.0, WALL)
    assert states(signs, 171) == [AgentState.FRESH]


def test_what_is_no_agents_lease_and_what_is_gone_is_not_kept() -> None:
    signs = Lifesigns()
    other = Lease(metadata=ObjectMeta(name="forktree-operator", namespace="forktree-system"))
    signs.relist([other, lease(0)], [], 100.0, WALL)
    signs.relist([other], [], 105.0, WALL)
    assert signs.state("n1", 200.0) is AgentState.STALE  # As one that was never seen.


def test_times_of_a_lease_are_written_with_six_digits() -> None:
    spec = LeaseSpec(holder_identity="a", renew_time=WALL, acquire_time=WALL + timedelta(microseconds=7))
    written = spec.to_json()
    assert written["renewTime"] == "2026-05-01T00:00:00.000000Z"
    assert written["acquireTime"] == "2026-05-01T00:00:00.000007Z"
