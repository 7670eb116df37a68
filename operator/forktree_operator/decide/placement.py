"""On which node a root session runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from forktree.models.base import Uid
from forktree.models.reasons import BakePhase, Reason
from forktree.models.session import Session
from forktree.models.session_template import Egress, SessionTemplate
from forktree_operator.decide.actions import Ignore, Place, Wait

MACHINE_OVERHEAD_BYTES: Final = 96 << 20
"""What an agent counts for a machine beside its guest's memory. With less here, a session could be sent to a
node that refuses it for good, because a session never moves."""
EGRESS_OVERHEAD_BYTES: Final = 48 << 20
"""And for the way to the outside of a machine that has one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRoom:
    """A node as placement sees it."""

    name: str
    usable: bool
    """The node can start machines, and its agent is heard from."""
    free_bytes: int
    """Memory that nobody has been promised, as far as the operator knows. The agent has the last word."""
    promised: frozenset[Uid] = frozenset()
    """For what of late: sessions, and templates that are to be baked there. Not in `free_bytes`."""


def place(
    session: Session, template: SessionTemplate | None, nodes: Sequence[NodeRoom]
) -> Place | Wait | Ignore:
    """Where `session` goes. Of the nodes with room, one that has the template baked, then the emptiest.

    Ties go by name, so asking twice gives the same answer. A node that failed to bake the template comes
    last: if there is no other, its agent says in the session's status what went wrong.
    """
    if session.spec.node_name or session.metadata.deleting or session.status.phase.terminal:
        return Ignore()
    if session.spec.template_ref is None:
        return Ignore()  # A child: the agent of its parent's node names the node when it makes the object.
    if template is None:
        name = session.spec.template_ref.name
        return Wait(Reason.TEMPLATE_NOT_FOUND, f"there is no session template named {name} in this namespace")
    usable = [node for node in nodes if node.usable]
    if not usable:
        return Wait(Reason.UNSCHEDULED, "no ready node")
    fitting = [node for node in usable if node.free_bytes >= needed_on(node, template)]
    if not fitting:
        return Wait(Reason.UNSCHEDULED, _no_room(template, usable))
    phases = {entry.node: entry.phase for entry in template.status.nodes}
    best = min(fitting, key=lambda node: (_reluctance(phases.get(node.name)), -node.free_bytes, node.name))
    return Place(best.name)


def needed(template: SessionTemplate) -> int:
    """Bytes that a session of `template` takes on its node, at worst."""
    egress = EGRESS_OVERHEAD_BYTES if template.spec.network.egress is Egress.OPEN else 0
    return template.spec.machine.memory_bytes + MACHINE_OVERHEAD_BYTES + egress


def needed_on(node: NodeRoom, template: SessionTemplate) -> int:
    """Bytes that the next session of `template` takes on `node`; the first there brings the baseline."""
    return needed(template) + (baseline(template) if brings_baseline(node, template) else 0)


def baseline(template: SessionTemplate) -> int:
    """Bytes that the baseline of `template` takes on each node that has it."""
    return template.spec.machine.memory_bytes


def brings_baseline(node: NodeRoom, template: SessionTemplate) -> bool:
    """Whether the next session of `template` is the first there: its baseline is counted by nobody yet."""
    known = any(entry.node == node.name for entry in template.status.nodes)
    return not known and template.metadata.uid not in node.promised


def baked_on(name: str, template: SessionTemplate) -> bool:
    """Whether node `name` has the template baked, so that a session starts there at once."""
    return any(entry.node == name and entry.phase is BakePhase.READY for entry in template.status.nodes)


def _reluctance(bake: BakePhase | None) -> int:
    match bake:
        case BakePhase.READY:
            return 0
        case BakePhase.BAKING | None:
            return 1
        case BakePhase.FAILED:
            return 2


def _no_room(template: SessionTemplate, nodes: Sequence[NodeRoom]) -> str:
    closest = min(nodes, key=lambda node: (needed_on(node, template) - node.free_bytes, node.name))
    first = " and the baseline of its template" if brings_baseline(closest, template) else ""
    # Needs are rounded up and room down: no sentence says that 512 MiB do not fit into 512 MiB.
    needed_mib = _mib_up(needed_on(closest, template))
    guest_mib, free_mib = _mib_up(template.spec.machine.memory_bytes), max(0, closest.free_bytes) >> 20
    return (
        f"no node has room: a machine of {guest_mib} MiB{first} takes {needed_mib} MiB, and node "
        f"{closest.name}, which comes closest, has {free_mib} MiB free"
    )


def _mib_up(size_bytes: int) -> int:
    return -(-size_bytes // (1 << 20))
