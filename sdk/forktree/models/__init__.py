"""The API `forktree.dev/v1alpha1` as frozen pydantic models: the source of the CRDs and of every decision.

Nothing in this package does input or output, so all that stands on it can be tested alone.
"""

from forktree.models.base import (
    API_VERSION,
    GROUP,
    VERSION,
    ApiModel,
    ApiObject,
    ObjectMeta,
    OwnerReference,
    Uid,
)
from forktree.models.conditions import Condition
from forktree.models.fork import Fork, ForkSpec, ForkStatus
from forktree.models.fork_node import ForkNode, ForkNodeStatus
from forktree.models.reasons import (
    BakePhase,
    EventReason,
    ForkPhase,
    Level,
    Mode,
    Reason,
    SessionPhase,
    SessionState,
)
from forktree.models.session import Session, SessionSpec, SessionStatus
from forktree.models.session_template import SessionTemplate, SessionTemplateSpec, SessionTemplateStatus

__all__ = [
    "API_VERSION",
    "GROUP",
    "VERSION",
    "ApiModel",
    "ApiObject",
    "BakePhase",
    "Condition",
    "EventReason",
    "Fork",
    "ForkNode",
    "ForkNodeStatus",
    "ForkPhase",
    "ForkSpec",
    "ForkStatus",
    "Level",
    "Mode",
    "ObjectMeta",
    "OwnerReference",
    "Reason",
    "Session",
    "SessionPhase",
    "SessionSpec",
    "SessionState",
    "SessionStatus",
    "SessionTemplate",
    "SessionTemplateSpec",
    "SessionTemplateStatus",
    "Uid",
]
