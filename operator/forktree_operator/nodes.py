"""The nodes that can take sessions, and how much room each has left."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from forktree.metrics.table import NodeState
from forktree.models.base import Uid
from forktree.models.fork_node import ForkNode
from forktree_operator.decide.agents import AgentState
from forktree_operator.decide.placement import NodeRoom
from forktree_operator.lifesigns import Lifesigns

PROMISE_SECONDS: Final = 30.0
"""After this a placed session counts no more by itself: its agent counts it, or it is gone."""
BAKE_PROMISE_SECONDS: Final = 300.0
"""The same where its template has to be baked first: until then the agent counts none that wait for that."""


@dataclass(frozen=True, slots=True)
class _Promise:
    """Memory promised to a session or a template that the node's agent may not have counted yet."""

    memory_bytes: int
    until: float


class Nodes:
    """Every ForkNode, and the memory promised there since its agent last counted."""

    def __init__(self, lifesigns: Lifesigns) -> None:
        self._lifesigns = lifesigns
        self._nodes: dict[str, ForkNode] = {}
        self._departed: dict[str, ForkNode] = {}
        self._promises: dict[str, dict[Uid, _Promise]] = {}

    def names(self) -> frozenset[str]:
        """Those that are there, and those whose ForkNode went away while sessions may still name them."""
        return frozenset(self._nodes.keys() | self._departed.keys())

    def boot_id(self, name: str) -> str:
        """The boot under which the node's agent last reported; empty if it never did."""
        node = self._nodes.get(name) or self._departed.get(name)
        return (node.status.boot_id if node else None) or ""

    def rebooted(self, name: str, boot_id: str) -> bool:
        """Whether `boot_id` shows that the node runs another boot than the one that its agent reported."""
        known = self.boot_id(name)
        return bool(boot_id and known and boot_id != known)

    def observe(self, node: ForkNode) -> bool:
        """Take note of a ForkNode. True if more may fit there than before."""
        name = node.metadata.name
        old = self._nodes.get(name)
        if old is not None and _version(node) < _version(old):
            return False  # A watch and a list are two streams: this one is behind.
        self._nodes[name] = node
        self._departed.pop(name, None)
        if old is None:
            return node.status.ready
        counted_bytes = (node.status.reserved_bytes or 0) - (old.status.reserved_bytes or 0)
        self._settle(name, counted_bytes)
        became_ready = node.status.ready and not old.status.ready
        return became_ready or (node.status.ready and _unreserved_bytes(node) > _unreserved_bytes(old))

    def forget(self, name: str) -> None:
        """Its ForkNode is gone. It takes no more sessions; those there may have to be told of a loss."""
        node = self._nodes.pop(name, None)
        if node is not None:
            self._departed[name] = node
        self._promises.pop(name, None)

    def bury(self, name: str) -> None:
        """Nobody is left to be told of the loss of a node whose ForkNode is gone."""
        self._departed.pop(name, None)

    def relist(self, nodes: Iterable[ForkNode]) -> None:
        """Take note of all ForkNodes there are, so that one whose deletion was missed is forgotten."""
        present = {node.metadata.name: node for node in nodes}
        for name in self._nodes.keys() - present.keys():
            self.forget(name)
        for node in present.values():
            self.observe(node)

    def promise(self, name: str, holder: Uid, memory_bytes: int, *, until: float) -> None:
        """Count `memory_bytes` on that node until its agent does, so that a burst does not overfill it.

        Monotonic time `until` at the latest. `holder` is a session's uid, or that of a template whose
        baseline has to be made there.
        """
        self._promises.setdefault(name, {})[holder] = _Promise(memory_bytes, until)

    def withdraw(self, name: str, *holders: Uid) -> None:
        """Take promises back: the session did not go there after all."""
        for holder in holders:
            self._promises.get(name, {}).pop(holder, None)

    def rooms(self, now: float) -> list[NodeRoom]:
        """Every node as placement sees it at monotonic time `now`."""
        return [
            NodeRoom(
                name=name,
                usable=node.status.ready and self._lifesigns.state(name, now) is AgentState.FRESH,
                free_bytes=_unreserved_bytes(node) - self._promised_bytes(name, now),
                promised=frozenset(self._promises.get(name, ())),
            )
            for name, node in self._nodes.items()
        ]

    def states(self, now: float) -> list[NodeState]:
        """How each node that is there stands at monotonic time `now`."""
        return [self._state(node, now) for node in self._nodes.values()]

    def _state(self, node: ForkNode, now: float) -> NodeState:
        if self._lifesigns.state(node.metadata.name, now) is not AgentState.FRESH:
            return NodeState.SILENT
        return NodeState.READY if node.status.ready else NodeState.NOT_READY

    def _promised_bytes(self, name: str, now: float) -> int:
        promises = self._promises.get(name, {})
        for holder in [h for h, promise in promises.items() if now > promise.until]:
            del promises[holder]
        return sum(promise.memory_bytes for promise in promises.values())

    def _settle(self, name: str, counted_bytes: int) -> None:
        """Drop the oldest promises that the agent's new count can stand for. It does not say for whom it
        counts; dropping too few only leaves room unused until the promise ends by itself."""
        promises = self._promises.get(name, {})
        for holder, promise in list(promises.items()):
            if promise.memory_bytes > counted_bytes:
                break
            counted_bytes -= promise.memory_bytes
            del promises[holder]


def _unreserved_bytes(node: ForkNode) -> int:
    return (node.status.capacity_bytes or 0) - (node.status.reserved_bytes or 0)


def _version(node: ForkNode) -> int:
    # Resource versions of one kind are numbers that grow, by the API's rules since Kubernetes 1.35 and in
    # fact for every server on etcd before.
    return int(node.metadata.resource_version or 0)
