"""Names and labels that more than one part must make alike."""

from __future__ import annotations

from typing import Final

from forktree.models.base import Uid

OUR_LABELS: Final = "forktree.dev/"
"""What the names of our own labels begin with."""
ROOT_LABEL: Final = "forktree.dev/root"
"""On every Session and Fork below a root: the root's uid."""
FORK_LABEL: Final = "forktree.dev/fork"
"""On every child: the name of the Fork it was started by."""
CHECKPOINT_LABEL: Final = "forktree.dev/checkpoint"
"""On a Fork that is a checkpoint: what its session's user calls it."""
CHECKPOINT_OF_LABEL: Final = "forktree.dev/checkpoint-of"
"""On the same: the uid of the session."""
CHECKPOINT_AT_LABEL: Final = "forktree.dev/checkpoint-at"
"""On the same: when it was asked for, in microseconds of its agent's clock. Objects know seconds."""
HEARTBEAT_LABEL: Final = "forktree.dev/heartbeat"
"""On a Lease that an agent renews for its caller. Agents write no others but their own."""
HEARTBEAT_ANNOTATION: Final = "forktree.dev/heartbeat-lease"
"""On a root, set by its user: the name of a Lease in its namespace, by custom `<root>-heartbeat`. While that
is renewed the tree lives; not renewed for its `leaseDurationSeconds`, the tree is deleted."""

FORK_NAME_MAX: Final = 52
"""So that a child's name, which is longer by up to 10, still fits a label and a host name."""
REPLICAS_MAX: Final = 256
NAME_RULES: Final = (
    (
        "self.metadata.name.size() <= 63",
        "metadata.name must have at most 63 characters: choose a shorter name",
    ),
    (
        "!self.metadata.name.contains('.')",
        "metadata.name must not contain dots, because it becomes a host name: use hyphens",
    ),
)
"""CEL rule and message for what users name, so that a name fits a label and a host name."""


BORN_ANNOTATION: Final = "forktree.dev/born"
"""On a Fork whose machines were there before it: what the agent that made them called it until then."""
BORN_ON_ANNOTATION: Final = "forktree.dev/born-on"
"""On the same: the node they run on. Only that node's agent can set either, so nobody else need route it."""

TRACE_ANNOTATION: Final = "forktree.dev/traceparent"
"""On a Session or Fork, set by its user: the span that started it, as W3C Trace Context writes it."""


def child_name(fork_name: str, index: int, fork_uid: Uid) -> str:
    """The name of a Fork's child. A Fork made again under the same name gives other names.

    `fork_uid`: for children that were there before their Fork, what that was called until then. At most 63
    characters for any Fork name that the API server accepts.
    """
    return f"{fork_name}-{index}-{fork_uid[-5:]}"


def agent_lease_name(node_name: str) -> str:
    """The Lease by which a node's agent shows that it lives."""
    return f"agent-{node_name}"
