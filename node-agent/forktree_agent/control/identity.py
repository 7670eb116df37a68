"""What a machine is told about itself: its host name and the variables that its commands see."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

from forktree.models import Fork, Session
from forktree.models.names import child_name
from forktree_agent.control.owners import child_owner, owner_of
from forktree_agent.control.records import Lineage
from forktree_agent.engine.contract import ChildOrder

SESSION_VARIABLE: Final = "FORKTREE_SESSION"
NAMESPACE_VARIABLE: Final = "FORKTREE_NAMESPACE"
ROOT_VARIABLE: Final = "FORKTREE_ROOT"
DEPTH_VARIABLE: Final = "FORKTREE_DEPTH"
FORK_VARIABLE: Final = "FORKTREE_FORK"
INDEX_VARIABLE: Final = "FORKTREE_INDEX"
BRANCH_VARIABLE: Final = "FORKTREE_BRANCH"
SEED_VARIABLE: Final = "FORKTREE_SEED"

HOSTNAME_MAX: Final = 64


def root_order(session: Session, env: Mapping[str, str]) -> ChildOrder:
    """The machine of a root. `env` is what its user says, secrets read; our own variables win."""
    return ChildOrder(
        owner=owner_of(session),
        hostname=hostname(session.metadata.name),
        env={
            **env,
            SESSION_VARIABLE: session.metadata.name,
            NAMESPACE_VARIABLE: session.metadata.namespace or "",
            ROOT_VARIABLE: session.metadata.uid,
            DEPTH_VARIABLE: "0",
            # Set in every machine, so that a child never shows its parent's.
            FORK_VARIABLE: "",
            INDEX_VARIABLE: "",
            BRANCH_VARIABLE: "",
            SEED_VARIABLE: session.spec.seed or "",
        },
    )


def child_orders(
    fork: Fork, lineage: Lineage, seeds: Sequence[str], told: Sequence[Mapping[str, str]]
) -> list[ChildOrder]:
    """The machines of a fork's children, in order of their index.

    `told` is what its user says to each, secrets read; our own variables win.
    """
    uid = fork.metadata.uid
    orders: list[ChildOrder] = []
    for index in range(fork.spec.replicas):
        name = child_name(fork.metadata.name, index, uid)
        env = {
            **told[index],
            SESSION_VARIABLE: name,
            NAMESPACE_VARIABLE: fork.metadata.namespace or "",
            ROOT_VARIABLE: lineage.root,
            DEPTH_VARIABLE: str(lineage.depth),
            FORK_VARIABLE: fork.metadata.name,
            INDEX_VARIABLE: str(index),
            BRANCH_VARIABLE: fork.spec.branch(index).name or "",
            SEED_VARIABLE: seeds[index],
        }
        orders.append(ChildOrder(owner=child_owner(uid, index), hostname=hostname(name), env=env))
    return orders


def hostname(name: str) -> str:
    """A host name for an object's name: of [a-z0-9-], at most 64."""
    return re.sub(r"[^a-z0-9-]", "-", name.lower())[:HOSTNAME_MAX]
