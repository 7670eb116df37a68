"""Every closed set of words in the API: phases and which may follow which, reasons, modes, levels.

Phases are for eyes. What programs wait for are conditions, but both come from the same step, so a step that
the table does not have is a defect and raises `WrongStep`.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final, TypeVar


class SessionPhase(StrEnum):
    """Where a session stands. `Failed` and `Released` are final."""

    PENDING = "Pending"
    STARTING = "Starting"
    RUNNING = "Running"
    PAUSED = "Paused"
    FAILED = "Failed"
    RELEASED = "Released"

    @property
    def terminal(self) -> bool:
        return not SESSION_STEPS[self]


class SessionState(StrEnum):
    """What a session is asked to be. `Released` is final."""

    RUNNING = "Running"
    PAUSED = "Paused"
    RELEASED = "Released"


class ForkPhase(StrEnum):
    """Where a fork stands. `Complete` and `Failed` are final."""

    PENDING = "Pending"
    FORKING = "Forking"
    RUNNING = "Running"
    COMPLETE = "Complete"
    FAILED = "Failed"

    @property
    def terminal(self) -> bool:
        return not FORK_STEPS[self]


class BakePhase(StrEnum):
    """Where a template stands on one node. Never final: a rebooted node bakes again."""

    BAKING = "Baking"
    READY = "Ready"
    FAILED = "Failed"


SESSION_STEPS: Final[Mapping[SessionPhase, frozenset[SessionPhase]]] = {
    SessionPhase.PENDING: frozenset(
        # A child's object is written after its machine runs, so it goes to Running at once, or to Paused.
        {
            SessionPhase.STARTING,
            SessionPhase.RUNNING,
            SessionPhase.PAUSED,
            SessionPhase.FAILED,
            SessionPhase.RELEASED,
        }
    ),
    SessionPhase.STARTING: frozenset(
        # Asked to be paused before it was started, it is never said to run.
        {SessionPhase.RUNNING, SessionPhase.PAUSED, SessionPhase.FAILED, SessionPhase.RELEASED}
    ),
    SessionPhase.RUNNING: frozenset({SessionPhase.PAUSED, SessionPhase.FAILED, SessionPhase.RELEASED}),
    SessionPhase.PAUSED: frozenset({SessionPhase.RUNNING, SessionPhase.FAILED, SessionPhase.RELEASED}),
    SessionPhase.FAILED: frozenset(),
    SessionPhase.RELEASED: frozenset(),
}
FORK_STEPS: Final[Mapping[ForkPhase, frozenset[ForkPhase]]] = {
    # One write tells all when a fork succeeds, so Forking is seen only where it takes long, and Running only
    # where its children's objects or commands are awaited.
    ForkPhase.PENDING: frozenset(
        {ForkPhase.FORKING, ForkPhase.RUNNING, ForkPhase.COMPLETE, ForkPhase.FAILED}
    ),
    ForkPhase.FORKING: frozenset({ForkPhase.RUNNING, ForkPhase.COMPLETE, ForkPhase.FAILED}),
    ForkPhase.RUNNING: frozenset({ForkPhase.COMPLETE, ForkPhase.FAILED}),
    ForkPhase.COMPLETE: frozenset(),
    ForkPhase.FAILED: frozenset(),
}
BAKE_STEPS: Final[Mapping[BakePhase, frozenset[BakePhase]]] = {
    BakePhase.BAKING: frozenset({BakePhase.READY, BakePhase.FAILED}),
    BakePhase.READY: frozenset({BakePhase.BAKING}),
    BakePhase.FAILED: frozenset({BakePhase.BAKING}),
}

Phase = TypeVar("Phase", SessionPhase, ForkPhase, BakePhase)


class WrongStep(ValueError):
    """A phase was asked to become one that may not follow it."""

    def __init__(self, seen: StrEnum, wanted: StrEnum, allowed: frozenset[StrEnum]) -> None:
        names = ", ".join(sorted(allowed)) or "nothing"
        super().__init__(f"{type(seen).__name__} {seen} cannot become {wanted}: only {names} may follow")
        self.seen, self.wanted, self.allowed = seen, wanted, allowed


def session_step(seen: SessionPhase, wanted: SessionPhase) -> SessionPhase:
    """Return `wanted` if it is `seen` or may follow it; raise `WrongStep` otherwise."""
    return _step(SESSION_STEPS, seen, wanted)


def fork_step(seen: ForkPhase, wanted: ForkPhase) -> ForkPhase:
    """Return `wanted` if it is `seen` or may follow it; raise `WrongStep` otherwise."""
    return _step(FORK_STEPS, seen, wanted)


def bake_step(seen: BakePhase, wanted: BakePhase) -> BakePhase:
    """Return `wanted` if it is `seen` or may follow it; raise `WrongStep` otherwise."""
    return _step(BAKE_STEPS, seen, wanted)


def _step(table: Mapping[Phase, frozenset[Phase]], seen: Phase, wanted: Phase) -> Phase:
    # Staying is never wrong: an event may come twice, and the rest of a status may be written again.
    if wanted != seen and wanted not in table[seen]:
        raise WrongStep(seen, wanted, frozenset[StrEnum](table[seen]))
    return wanted


class Mode(StrEnum):
    """How a machine really came to be. A clean start is never reported as a fork."""

    FORK = "Fork"
    CLEAN = "Clean"


class Level(StrEnum):
    """How much of the source's state a machine carried on: its memory, its memory and GPU, or none."""

    MEMORY = "Memory"
    GPU = "Gpu"
    NONE = "None"


class EventReason(StrEnum):
    """What a Kubernetes Event tells people about a tree."""

    SCHEDULED = "Scheduled"
    """A root has its node."""
    UNSCHEDULED = "Unscheduled"
    """There is no node for it yet; it waits."""
    AT_CAPACITY = "AtCapacity"
    """Its node has no room for it; it waits."""
    FORKED = "Forked"
    """A Fork's children all run."""
    COMPLETE = "Complete"
    """A Fork's commands are done, scored and pruned."""
    FAILED = "Failed"
    """It is over: it cannot be, or its machine ended by itself."""
    PRUNED = "Pruned"
    """An object was deleted, and the machines of all below it were ended."""
    RELEASED = "Released"
    """A session's machine was ended because its user asked for it."""
    EXPIRED = "Expired"
    """A clock of the tree ran out: a session's idleness, the tree's life, or its trainer's heartbeat."""
    REJECTED = "Rejected"
    """A child runs no more, as it could not be recorded."""
    NODE_LOST = "NodeLost"
    """A node is gone or was rebooted, and its machines with it."""


class Reason(StrEnum):
    """Why something is as it is, in one word; the message beside it says the rest."""

    UNSCHEDULED = "Unscheduled"
    """No node can take it now."""
    BAKING = "Baking"
    """Its template is being made ready on the node."""
    STARTING = "Starting"
    """Its machine is being started."""
    AT_CAPACITY = "AtCapacity"
    """The node has no room; nothing was started, and it is tried again."""
    DEPTH_LIMIT = "DepthLimit"
    """The tree may not become deeper."""
    MEMORY_LIMIT = "MemoryLimit"
    """The tree may not take more memory."""
    LIVE_LIMIT = "LiveLimit"
    """The tree may not have more sessions alive at once."""
    IMAGE_NOT_FOUND = "ImageNotFound"
    """Neither the node nor the registry has an image of that name."""
    PULLING_IMAGE = "PullingImage"
    """Its image is being fetched from a registry and unpacked."""
    IMAGE_PULL_FAILED = "ImagePullFailed"
    """The registry refused the image, may not be asked, or could not be reached after several tries."""
    IMAGE_INVALID = "ImageInvalid"
    """What the registry has is no image that can be run here, or is broken."""
    IMAGE_TOO_LARGE = "ImageTooLarge"
    """The node keeps no images as large as this one, or has no room beside those in use."""
    TEMPLATE_NOT_FOUND = "TemplateNotFound"
    """There is no template of that name in the namespace."""
    EGRESS_FORBIDDEN = "EgressForbidden"
    """Its template asks for egress, and the node lets no machine reach the outside."""
    NEVER_READY = "NeverReady"
    """The readiness probe did not succeed in time."""
    PIN_MISMATCH = "PinMismatch"
    """A pinned version is another one."""
    BAKE_FAILED = "BakeFailed"
    """The template's machine did not boot, or its command did not start."""
    SECRET_UNREADABLE = "SecretUnreadable"
    """A Secret that environment or image name is not there, lacks the entry, or the agent may not read it."""
    HOOK_FAILED = "HookFailed"
    """A hook of the template failed or was not done in time; nothing of the fork is left."""
    PAUSED = "Paused"
    """It was asked to stand still."""
    SOURCE_NOT_FOUND = "SourceNotFound"
    """What is to be forked is not there."""
    SOURCE_NOT_READY = "SourceNotReady"
    """What is to be forked does not run yet."""
    SOURCE_FAILED = "SourceFailed"
    """What is to be forked has failed."""
    SOURCE_GONE = "SourceGone"
    """The source was released, is being deleted, or is another object of the same name."""
    FOREIGN_OWNER = "ForeignOwner"
    """The Fork has a controller that is not its source."""
    FORK_FAILED = "ForkFailed"
    """A child did not come up; no child is left."""
    PAUSE_BUDGET = "PauseBudget"
    """The source would have stood still for longer than the template allows; it was not stopped."""
    TOO_FRAGMENTED = "TooFragmented"
    """A child would need more memory mappings than the kernel grants safely."""
    DEADLINE_EXCEEDED = "DeadlineExceeded"
    """It was not done in time."""
    MACHINE_LOST = "MachineLost"
    """The machine ended although nobody asked for it."""
    NETWORK_LOST = "NetworkLost"
    """The machine runs, and does not reach the outside any more; forks of it do."""
    NODE_LOST = "NodeLost"
    """The node is gone or was rebooted, and its machines with it."""
    PARENT_LOST = "ParentLost"
    """The machine to be forked ended before or during the fork."""
    POINT_LOST = "PointLost"
    """The instant to be forked is not held any more."""
    EXPIRED = "Expired"
    """Nothing was done in it for as long as its template allows, and its machine was ended."""
    EXEC_FAILED = "ExecFailed"
    """A branch's command ended with another exit code than 0."""
    EXEC_TIMED_OUT = "ExecTimedOut"
    """A branch's command was ended because its time was over."""
    EXEC_NOT_STARTED = "ExecNotStarted"
    """A branch's command could not be started."""
    INTERRUPTED = "Interrupted"
    """The node's agent ended while a branch's command or scorer ran; neither is ever run twice."""
    NO_SCORE = "NoScore"
    """The scorer failed, or did not print one number on its last line."""
    PRUNED = "Pruned"
    """Others of its fork had a better score."""
    AGENT_LOST = "AgentLost"
    """The node's agent does not answer; its machines may well run."""
    INVALID = "Invalid"
    """The request itself is wrong."""
    INTERNAL = "Internal"
    """A defect of forktree, or of what it stands on."""
