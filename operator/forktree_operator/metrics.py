"""What an operator tells Prometheus: one object, handed to whoever has something to say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from datetime import UTC, datetime

from forktree.metrics import table
from forktree.metrics.instruments import Instruments
from forktree.metrics.table import Decided, NodeState, Program
from forktree.models.base import ObjectMeta
from forktree.models.reasons import Reason


class Metrics:
    """One operator's."""

    def __init__(self) -> None:
        made = self.instruments = Instruments(Program.OPERATOR)
        self._leader = made.gauge(table.LEADER)
        self._placements = made.counter(table.PLACEMENTS)
        self._routes = made.counter(table.ROUTES)
        self._rejections = made.counter(table.REJECTIONS)
        self._decision_seconds = made.histogram(table.DECISION_SECONDS)
        self._nodes = made.gauge(table.NODES)
        self._sweep_seconds = made.histogram(table.SWEEP_SECONDS)

    @contextmanager
    def leading(self) -> Generator[None]:
        """Within, this operator leads. Outside it knows nothing of nodes."""
        self._leader.set(1)
        try:
            yield
        finally:
            self._leader.set(0)
            self.nodes_are(())

    def placed(self, session: ObjectMeta) -> None:
        """A root has its node."""
        self._placements.inc()
        self._decided(Decided.SESSION, session)

    def routed(self, fork: ObjectMeta) -> None:
        """A fork has the node of its source."""
        self._routes.inc()
        self._decided(Decided.FORK, fork)

    def rejected(self, reason: Reason) -> None:
        """A fork was failed for good."""
        self._rejections.labels(reason).inc()

    def swept(self, seconds: float) -> None:
        """A round is over, however it ended."""
        self._sweep_seconds.observe(seconds)

    def nodes_are(self, states: Iterable[NodeState]) -> None:
        """How each node stands."""
        there = Counter(states)
        for state in NodeState:
            self._nodes.labels(state).set(there[state])

    def _decided(self, kind: Decided, metadata: ObjectMeta) -> None:
        if metadata.creation_timestamp is not None:
            seconds = (datetime.now(UTC) - metadata.creation_timestamp).total_seconds()
            self._decision_seconds.labels(kind).observe(max(0.0, seconds))
