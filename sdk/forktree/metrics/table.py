"""Every metric there is. Programs, the page about them, alerts and dashboard are held against this table.

Labels are from closed sets: never a name, a uid or a namespace, which grow without end and are nobody's
business.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from forktree.models.reasons import Mode, Reason, SessionPhase


class Kind(StrEnum):
    """As Prometheus calls it."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Program(StrEnum):
    """Who serves it."""

    AGENT = "agent"
    OPERATOR = "operator"


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """One label, and all that it can be."""

    name: str
    values: tuple[str, ...] = ()
    """Empty: a set that is closed elsewhere, and `meaning` says where."""
    meaning: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One metric as it is scraped."""

    name: str
    kind: Kind
    programs: frozenset[Program]
    help: str
    """What it says, as a sentence."""
    labels: tuple[Label, ...] = ()
    buckets: tuple[float, ...] = ()
    """Upper bounds, of a histogram."""


class Stage(StrEnum):
    """A clock of a fork."""

    PAUSE = "pause"
    FORK = "fork"
    READY = "ready"
    TOTAL = "total"


class Road(StrEnum):
    """On which way a fork was asked for."""

    OBJECT = "object"
    EARLY = "early"
    ROOT = "root"


class Swept(StrEnum):
    """What a sweep ended."""

    MACHINE = "machine"
    POINT = "point"
    VANISHED = "vanished"


class Verb(StrEnum):
    """A way to write to the API server."""

    CREATE = "create"
    UPDATE = "update"
    PATCH = "patch"
    DELETE = "delete"


class WriteOutcome(StrEnum):
    """What became of a write."""

    OK = "ok"
    CONFLICT = "conflict"
    NOT_FOUND = "not_found"
    REFUSED = "refused"
    UNAVAILABLE = "unavailable"


class CommandEnd(StrEnum):
    """How a command ended."""

    OK = "ok"
    FAILED = "failed"
    TIMED_OUT = "timed_out"
    REFUSED = "refused"
    ABANDONED = "abandoned"
    LOST = "lost"


class SweepEnd(StrEnum):
    """How a sweep ended."""

    DONE = "done"
    GIVEN_UP = "given_up"


class NodeState(StrEnum):
    """How a node stands with the operator."""

    READY = "ready"
    NOT_READY = "not_ready"
    SILENT = "silent"


class Decided(StrEnum):
    """What was decided upon."""

    SESSION = "session"
    FORK = "fork"


LIVE_PHASES: Final = tuple(phase for phase in SessionPhase if not phase.terminal)
METHODS: Final = ("GET", "POST", "PUT", "DELETE", "other")
STATUS_CLASSES: Final = ("2xx", "3xx", "4xx", "5xx", "abandoned")

_AGENT: Final = frozenset({Program.AGENT})
_OPERATOR: Final = frozenset({Program.OPERATOR})
_CALL_BUCKETS: Final = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
_LAG_BUCKETS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
_SLOW_BUCKETS: Final = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)

_ROAD: Final = Label(
    name="road",
    values=tuple(Road),
    meaning="`object`: a Fork object asked for it; `early`: HTTP did, and the objects followed; `root`: a "
    "session was started from its template's baseline",
)
_REASON: Final = Label(name="reason", values=tuple(Reason), meaning="[reasons](reference.md#reasons)")
_METHOD: Final = Label(name="method", values=METHODS, meaning="of the request")
_ROUTE: Final = Label(
    name="route",
    meaning="pattern of the path without `/ns/{namespace}`: one of [these](http-reference.md#paths), or of "
    "those for [existing clients](existing-clients.md); else `unknown`",
)

FORK_SECONDS: Final = Metric(
    name="forktree_fork_seconds",
    kind=Kind.HISTOGRAM,
    programs=_AGENT,
    help="How long forks took, by their clocks; each clock that a fork has counts once.",
    labels=(
        Label(
            name="stage",
            values=tuple(Stage),
            meaning="`pause`: parent stopped to parent running; `fork`: parent stopped to every child "
            "running; `ready`: the same to every child answering; `total`: asked for to told",
        ),
        Label(name="mode", values=tuple(Mode), meaning="how the machines really came to be"),
        _ROAD,
    ),
    buckets=_CALL_BUCKETS,
)
FORK_FAILURES: Final = Metric(
    name="forktree_fork_failures_total",
    kind=Kind.COUNTER,
    programs=_AGENT,
    help="Forks, and starts of roots, that came to nothing for good.",
    labels=(_REASON,),
)
AT_CAPACITY: Final = Metric(
    name="forktree_at_capacity_refusals_total",
    kind=Kind.COUNTER,
    programs=_AGENT,
    help="Times that a fork or the start of a root was refused for want of room; most are tried again.",
    labels=(_ROAD,),
)
SESSIONS: Final = Metric(
    name="forktree_sessions",
    kind=Kind.GAUGE,
    programs=_AGENT,
    help="Sessions of this node that are not over, as their objects say.",
    labels=(Label(name="phase", values=LIVE_PHASES, meaning="[phases](reference.md#phases)"),),
)
MACHINES: Final = Metric(
    name="forktree_machines", kind=Kind.GAUGE, programs=_AGENT, help="Machines that run or are paused."
)
MACHINES_LOST: Final = Metric(
    name="forktree_machines_lost_total",
    kind=Kind.COUNTER,
    programs=_AGENT,
    help="Machines that ended although nobody asked for it.",
)
POINTS: Final = Metric(
    name="forktree_points", kind=Kind.GAUGE, programs=_AGENT, help="Instants held, baselines' included."
)
POINT_BYTES: Final = Metric(
    name="forktree_point_bytes",
    kind=Kind.GAUGE,
    programs=_AGENT,
    help="What holding all instants costs, as admission counts it.",
)
CAPACITY_BYTES: Final = Metric(
    name="forktree_memory_capacity_bytes",
    kind=Kind.GAUGE,
    programs=_AGENT,
    help="Memory that this node may promise: its --memory-limit.",
)
RESERVED_BYTES: Final = Metric(
    name="forktree_memory_reserved_bytes",
    kind=Kind.GAUGE,
    programs=_AGENT,
    help="Memory that this node has promised, by the worst case.",
)
STANDBY: Final = Metric(
    name="forktree_standby_machines",
    kind=Kind.GAUGE,
    programs=_AGENT,
    help="QEMUs that wait for a fork to come; they are nobody's and give way to whoever needs their room.",
)
EXECS_RUNNING: Final = Metric(
    name="forktree_execs_running", kind=Kind.GAUGE, programs=_AGENT, help="Commands that run in machines."
)
EXECS_ENDED: Final = Metric(
    name="forktree_execs_ended_total",
    kind=Kind.COUNTER,
    programs=_AGENT,
    help="Commands that ended in machines, those of branches, hooks and probes among them.",
    labels=(
        Label(
            name="outcome",
            values=tuple(CommandEnd),
            meaning="`ok`: exit code 0; `failed`: another one; `timed_out`; `refused`: it did not start; "
            "`abandoned`: whoever waited for it went away; `lost`: its machine ended first",
        ),
    ),
)
UNRECORDED: Final = Metric(
    name="forktree_unrecorded_forks",
    kind=Kind.GAUGE,
    programs=_AGENT,
    help="Forks made over HTTP that run, and that only the node's journal knows of: their objects are not "
    "written yet.",
)
SWEEPS: Final = Metric(
    name="forktree_sweeps_total",
    kind=Kind.COUNTER,
    programs=_AGENT,
    help="Comparisons of what the node has with what the API server has.",
    labels=(
        Label(
            name="outcome",
            values=tuple(SweepEnd),
            meaning="`given_up`: something could not be read, and nothing was ended for that",
        ),
    ),
)
SWEPT: Final = Metric(
    name="forktree_swept_total",
    kind=Kind.COUNTER,
    programs=_AGENT,
    help="What sweeps ended because no object stands for it.",
    labels=(
        Label(
            name="what",
            values=tuple(Swept),
            meaning="`machine`, `point`: nothing of its tree was known, as after a crash; `vanished`: an "
            "object whose deletion nobody had told of, with its machines",
        ),
    ),
)
API_WRITES: Final = Metric(
    name="forktree_api_writes_total",
    kind=Kind.COUNTER,
    programs=_AGENT | _OPERATOR,
    help="Writes to the API server: objects, statuses, Leases and Events, but not token and rights reviews.",
    labels=(
        Label(name="verb", values=tuple(Verb), meaning="how; server-side apply is a `patch`"),
        Label(
            name="outcome",
            values=tuple(WriteOutcome),
            meaning="`conflict`: the object was another one meanwhile, and it is tried again; `refused`: "
            "rights, a quota, a policy or the schema; `unavailable`: no answer in time, or come back later",
        ),
    ),
)
HTTP_REQUESTS: Final = Metric(
    name="forktree_http_requests_total",
    kind=Kind.COUNTER,
    programs=_AGENT,
    help="Requests to the HTTP API that were answered, or whose callers went away.",
    labels=(
        _METHOD,
        _ROUTE,
        Label(
            name="status", values=STATUS_CLASSES, meaning="class of the status; `abandoned`: the caller went"
        ),
    ),
)
HTTP_SECONDS: Final = Metric(
    name="forktree_http_request_seconds",
    kind=Kind.HISTOGRAM,
    programs=_AGENT,
    help="How long requests took, to the end of their answers.",
    labels=(_METHOD, _ROUTE),
    buckets=_CALL_BUCKETS,
)
LOOP_LAG: Final = Metric(
    name="forktree_event_loop_lag_seconds",
    kind=Kind.HISTOGRAM,
    programs=_AGENT,
    help="How much later than asked for the agent's event loop comes to a task, looked at every second.",
    buckets=_LAG_BUCKETS,
)
CANARY_PASSED: Final = Metric(
    name="forktree_canary_passed",
    kind=Kind.GAUGE,
    programs=_AGENT,
    help="1 if a machine was booted and forked here by way of trial; 0 if that failed, or until it is done.",
)
LEADER: Final = Metric(
    name="forktree_operator_leader",
    kind=Kind.GAUGE,
    programs=_OPERATOR,
    help="1 in the operator that leads, 0 in one that waits to.",
)
PLACEMENTS: Final = Metric(
    name="forktree_operator_placements_total",
    kind=Kind.COUNTER,
    programs=_OPERATOR,
    help="Root sessions that were given a node.",
)
ROUTES: Final = Metric(
    name="forktree_operator_routes_total",
    kind=Kind.COUNTER,
    programs=_OPERATOR,
    help="Forks that were given the node of their source.",
)
REJECTIONS: Final = Metric(
    name="forktree_operator_rejections_total",
    kind=Kind.COUNTER,
    programs=_OPERATOR,
    help="Forks that were failed for good before an agent saw them.",
    labels=(_REASON,),
)
DECISION_SECONDS: Final = Metric(
    name="forktree_operator_decision_seconds",
    kind=Kind.HISTOGRAM,
    programs=_OPERATOR,
    help="From an object's creation, of which the API server tells whole seconds, until it has a node: "
    "waiting for room and for sources included.",
    labels=(Label(name="kind", values=tuple(Decided), meaning="of the object"),),
    buckets=_SLOW_BUCKETS,
)
NODES: Final = Metric(
    name="forktree_operator_nodes",
    kind=Kind.GAUGE,
    programs=_OPERATOR,
    help="Nodes by how they stand with the operator that leads.",
    labels=(
        Label(
            name="state",
            values=tuple(NodeState),
            meaning="`ready`: takes sessions; `not_ready`: its agent says that it cannot; `silent`: its "
            "agent does not renew its Lease",
        ),
    ),
)
SWEEP_SECONDS: Final = Metric(
    name="forktree_operator_sweep_seconds",
    kind=Kind.HISTOGRAM,
    programs=_OPERATOR,
    help="How long rounds took in which the operator lists and decides all that has no node.",
    buckets=_SLOW_BUCKETS,
)

METRICS: Final[tuple[Metric, ...]] = (
    *(FORK_SECONDS, FORK_FAILURES, AT_CAPACITY, SESSIONS, MACHINES, MACHINES_LOST, POINTS, POINT_BYTES),
    *(CAPACITY_BYTES, RESERVED_BYTES, STANDBY, EXECS_RUNNING, EXECS_ENDED, UNRECORDED, SWEEPS, SWEPT),
    *(HTTP_REQUESTS, HTTP_SECONDS, LOOP_LAG, CANARY_PASSED),
    *(LEADER, PLACEMENTS, ROUTES, REJECTIONS, DECISION_SECONDS, NODES, SWEEP_SECONDS),
    API_WRITES,
)
