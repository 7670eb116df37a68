"""Forks as the HTTP API shows them."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

from forktree.kube.client import KubeClient
from forktree.models import Fork, ForkPhase
from forktree.models.conditions import ConditionType, holds
from forktree.models.names import CHECKPOINT_LABEL
from forktree.wire_trees import ForkChildInfo, ForkInfo
from forktree_agent.http.describing import FORKS_ABOVE, source_name


def describe_fork(fork: Fork, now: datetime, *, parent: str | None) -> ForkInfo:
    """`fork`, whose instant is one of the session `parent`."""
    status, source = fork.status, fork.spec.source.fork
    children = sorted(status.children, key=lambda child: child.index)
    return ForkInfo(
        fork_id=fork.metadata.name,
        parent_session_id=parent,
        source_fork_id=None if source is None else source.name,
        phase=status.phase,
        ready=status.ready,
        complete=status.phase is ForkPhase.COMPLETE,
        reason=status.reason,
        message=status.message,
        node=status.node,
        age_secs=age(fork, now),
        replicas=fork.spec.replicas,
        recorded=status.recorded or 0,
        best_session_id=status.best,
        best_score=status.best_score,
        checkpoint=fork.metadata.labels.get(CHECKPOINT_LABEL),
        point_available=holds_point(fork),
        point_bytes=status.point_bytes,
        pause_time_ms=status.pause_ms,
        fork_time_ms=status.fork_ms,
        ready_time_ms=status.ready_ms,
        children=tuple(
            ForkChildInfo(
                session_id=child.name,
                index=child.index,
                branch=child.branch,
                phase=child.phase,
                argv=_command(fork, child.index),
                exit_code=child.exit_code,
                score=child.score,
                seed=child.seed,
                reason=child.reason,
            )
            for child in children
        ),
    )


def _command(fork: Fork, index: int) -> tuple[str, ...] | None:
    command = fork.spec.branch(index).exec
    return None if command is None else command.argv


def age(fork: Fork, now: datetime) -> float:
    """Seconds since its object was made."""
    return max(0.0, (now - (fork.metadata.creation_timestamp or now)).total_seconds())


def holds_point(fork: Fork) -> bool:
    return holds(fork.status.conditions, ConditionType.POINT_AVAILABLE)


async def parent_of(client: KubeClient, fork: Fork) -> str | None:
    """The session whose instant it holds, asked for as far as it takes."""
    source = fork.spec.source
    if source.session is not None:
        return source.session.name
    return (
        None if source.fork is None else await source_name(client, fork.metadata.namespace, source.fork.name)
    )


def parent_among(fork: Fork, forks: Mapping[str, Fork]) -> str | None:
    """The same, where those that lead there are among `forks`, by their names."""
    current: Fork | None = fork
    for _ in range(FORKS_ABOVE):
        if current is None:
            return None
        source = current.spec.source
        if source.session is not None:
            return source.session.name
        current = None if source.fork is None else forks.get(source.fork.name)
    return None
