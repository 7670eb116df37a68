"""What callers label their sandboxes with. Labels of Kubernetes hold less, so annotations do.

A sandbox of its own has them on its Session. Those of a fork's children are on the Fork, so that they are
there as soon as any of the children is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from forktree.models import Fork, Session

SANDBOX_ANNOTATION: Final = "forktree.dev/sandbox-labels"
CHILDREN_ANNOTATION: Final = "forktree.dev/children-labels"


class Labels(msgspec.Struct, frozen=True, omit_defaults=True):
    """Those of one sandbox."""

    label: str | None = None
    labels: dict[str, str] | None = None


NONE: Final = Labels()


def of_sandbox(label: str | None, labels: Mapping[str, str]) -> dict[str, str]:
    """The annotations of its Session."""
    own = Labels(label, dict(labels) or None)
    return {} if own == NONE else {SANDBOX_ANNOTATION: msgspec.json.encode(own).decode()}


def of_children(labels: Sequence[str] | None) -> dict[str, str]:
    """The annotations of their Fork."""
    return {CHILDREN_ANNOTATION: msgspec.json.encode(list(labels)).decode()} if labels else {}


def found(session: Session, fork: Fork | None) -> Labels:
    """Those of a session that `fork` made, or that is a root. Whoever wrote nonsense there has none."""
    try:
        if written := session.metadata.annotations.get(SANDBOX_ANNOTATION):
            return msgspec.json.decode(written, type=Labels)
        reference = session.spec.fork_ref
        if fork is not None and reference is not None and reference.uid == fork.metadata.uid:
            written = fork.metadata.annotations.get(CHILDREN_ANNOTATION, "[]")
            return Labels(msgspec.json.decode(written, type=list[str])[reference.index])
    except (msgspec.MsgspecError, IndexError):
        pass
    return NONE
