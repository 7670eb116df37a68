"""Which agents are heard from, by the Leases that they renew.

Times of renewal are the agents' clocks, which may be wrong. So what counts is how long a Lease has stayed the
same on this process's monotonic clock, and no silence counts during which this process could not look.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Final

from forktree.models.names import agent_lease_name
from forktree_operator.cluster import Lease
from forktree_operator.decide.agents import AgentState, agent_state

DURATION_SECONDS: Final = 15.0
"""Of a Lease that does not exist or does not say its own."""


@dataclass(frozen=True, slots=True)
class _Sign:
    """What a Lease said, and since when it says the same."""

    renewed: datetime | None
    """None: no such Lease."""
    held: bool
    duration_seconds: float
    since: float
    """Monotonic seconds."""


class Lifesigns:
    """The last sign of life of every agent. As many records as there are nodes."""

    def __init__(self) -> None:
        self._signs: dict[str, _Sign] = {}
        self._last_look = float("-inf")

    def observe(self, lease: Lease, now: float, wall_clock: datetime) -> bool:
        """Take note of a Lease. True if its agent was silent until now."""
        self._last_look = now
        name, spec = lease.metadata.name, lease.spec
        old = self._signs.get(name)
        duration_seconds = float(spec.lease_duration_seconds or DURATION_SECONDS)
        held = bool(spec.holder_identity)
        if old is not None and old.renewed == spec.renew_time:
            self._signs[name] = replace(old, held=held, duration_seconds=duration_seconds)
            return False
        since = now
        if old is None and spec.renew_time is not None:
            # Seen for the first time: an old date makes the agent stale at once, but a verdict takes a
            # further duration, because the date may be wrong and the next renewal is seconds away.
            age_seconds = (wall_clock - spec.renew_time).total_seconds()
            since -= min(max(0.0, age_seconds), duration_seconds)
        self._signs[name] = _Sign(spec.renew_time, held, duration_seconds, since)
        return old is None or self._state(old, now) is not AgentState.FRESH

    def relist(self, leases: Iterable[Lease], nodes: Iterable[str], now: float, wall_clock: datetime) -> bool:
        """Take note of all Leases there are. Agents of `nodes` without one are silent from the first look.

        True if any agent was silent until now and is heard.
        """
        looked_seconds_ago = now - self._last_look
        heard = False
        present: set[str] = set()
        for lease in leases:
            if not lease.metadata.name.startswith(agent_lease_name("")):
                continue  # The operator's own lives in the same namespace.
            present.add(lease.metadata.name)
            heard |= self.observe(lease, now, wall_clock)
        wanted = {agent_lease_name(node) for node in nodes} - present
        for name in self._signs.keys() - present - wanted:
            del self._signs[name]
        for name in wanted:
            old = self._signs.get(name)
            if old is None or old.renewed is not None:
                self._signs[name] = _Sign(None, False, DURATION_SECONDS, now)
        for name, sign in self._signs.items():
            if looked_seconds_ago > sign.duration_seconds:
                # Nobody can renew a Lease while the API server is away: give each one more duration.
                self._signs[name] = replace(sign, since=max(sign.since, now - sign.duration_seconds))
        self._last_look = now
        return heard

    def state(self, node: str, now: float) -> AgentState:
        """How `node`'s agent stands. One that nothing is known of is `Stale`."""
        sign = self._signs.get(agent_lease_name(node))
        return AgentState.STALE if sign is None else self._state(sign, now)

    @staticmethod
    def _state(sign: _Sign, now: float) -> AgentState:
        return agent_state(now - sign.since, sign.duration_seconds, held=sign.held)
