"""What machines and instants are called towards the engine, so that either side finds the other again.

The name follows from an object's spec alone: whoever holds the object knows the machine, also after a restart
and without asking anybody.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Final

from forktree.models import Session, Uid
from forktree_agent.engine.contract import Owner

_EARLY: Final = "early-"
"""No uid of the API server begins so."""


def early_uid() -> Uid:
    """What a fork is called whose object is not written yet, here and by its machines' owners."""
    return Uid(f"{_EARLY}{uuid.uuid4().hex}")


def is_early(fork: Uid) -> bool:
    """Whether that is no uid of an object."""
    return fork.startswith(_EARLY)


@dataclass(frozen=True, slots=True)
class RootMachine:
    """The machine of a session that was started from a template."""

    session: Uid


@dataclass(frozen=True, slots=True)
class ChildMachine:
    """The machine of one child of a Fork, whether its Session object exists yet or not."""

    fork: Uid
    index: int


@dataclass(frozen=True, slots=True)
class ForkPoint:
    """The instant that a Fork froze."""

    fork: Uid


def root_owner(session: Uid) -> Owner:
    return Owner(f"session/{session}")


def child_owner(fork: Uid, index: int) -> Owner:
    return Owner(f"fork/{fork}/{index}")


def point_owner(fork: Uid) -> Owner:
    return Owner(f"fork/{fork}")


def owner_of(session: Session) -> Owner:
    """What the machine of `session` is called."""
    reference = session.spec.fork_ref
    if reference is None:
        return root_owner(session.metadata.uid)
    return child_owner(Uid(reference.uid), reference.index)


def meaning(owner: Owner) -> RootMachine | ChildMachine | ForkPoint | None:
    """What `owner` names; None for a name that is not control's (a canary, a baseline)."""
    match owner.split("/"):
        case ["session", uid] if uid:
            return RootMachine(Uid(uid))
        case ["fork", uid] if uid:
            return ForkPoint(Uid(uid))
        case ["fork", uid, index] if uid and index.isdecimal():
            return ChildMachine(Uid(uid), int(index))
        case _:
            return None
