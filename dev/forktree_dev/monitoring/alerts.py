"""What somebody should look at. Each says what is wrong, for how long, and what to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """One rule."""

    name: str
    severity: str
    """`critical`: sessions cannot be had or are being lost; `warning`: it will come to that, or is odd."""
    expr: str
    lasts: str
    """For how long, before anybody is told."""
    summary: str
    """May use `{{ $labels.… }}` and `{{ $value }}`."""
    advice: str


ALERTS: Final[tuple[Alert, ...]] = (
    Alert(
        name="ForktreeOperatorWithoutLeader",
        severity="critical",
        expr="(sum(forktree_operator_leader) or vector(0)) < 1",
        lasts="2m",
        summary="No forktree operator leads: new root sessions and Fork objects get no node.",
        advice="Look at the operator's pods and at the Lease forktree-operator in their namespace. Machines "
        "run on, and forks over HTTP still work.",
    ),
    Alert(
        name="ForktreeNodeNotReady",
        severity="warning",
        expr='sum by (state) (forktree_operator_nodes{state!="ready"}) > 0',
        lasts="5m",
        summary="{{ $value }} nodes are {{ $labels.state }} and take no sessions.",
        advice="kubectl get forknodes -o wide says which and why; for a silent one, look at its agent's pod.",
    ),
    Alert(
        name="ForktreeCanaryFailed",
        severity="critical",
        expr="forktree_canary_passed == 0",
        lasts="10m",
        summary="Node of {{ $labels.instance }}: no machine could be booted and forked by way of trial.",
        advice="kubectl get forknode NODE -o yaml has the sentence; the agent's log has more. The "
        "verdict holds until the node's next boot, or until QEMU, the guest or the agent's options change.",
    ),
    Alert(
        name="ForktreeAtCapacity",
        severity="warning",
        expr="sum by (instance) (rate(forktree_at_capacity_refusals_total[5m])) > 0",
        lasts="15m",
        summary="Node of {{ $labels.instance }} has refused forks for want of room for 15 minutes.",
        advice="Prune trees, set idle limits on templates, raise --memory-limit, or add nodes.",
    ),
    Alert(
        name="ForktreeForksFailing",
        severity="warning",
        expr="sum by (reason) (increase(forktree_fork_failures_total"
        '{reason=~"ForkFailed|Internal|MachineLost|ParentLost"}[15m])) > 0',
        lasts="1m",
        summary="Forks fail with reason {{ $labels.reason }}.",
        advice="The message in the Fork's status says how; so does fork_failed in the agent's log.",
    ),
    Alert(
        name="ForktreeMachinesLost",
        severity="warning",
        expr="sum by (instance) (increase(forktree_machines_lost_total[15m])) > 0",
        lasts="1m",
        summary="Machines of {{ $labels.instance }} ended although nobody asked for it.",
        advice="machine_lost in the agent's log says how each ended. SIGKILL from outside is most often the "
        "kernel's OOM killer: treeLimits.memory, or a --memory-limit above what the node has.",
    ),
    Alert(
        name="ForktreeOrphansEnded",
        severity="warning",
        expr='sum by (instance, what) (increase(forktree_swept_total{what=~"machine|point"}[1h])) > 0',
        lasts="1m",
        summary="A sweep of {{ $labels.instance }} ended what no object stood for ({{ $labels.what }}).",
        advice="Expected after an agent was killed in the middle of a fork. Without that it is a defect: "
        "stray in the agent's log names the owners.",
    ),
    Alert(
        name="ForktreeJournalBacklog",
        severity="warning",
        expr="forktree_unrecorded_forks > 32 and deriv(forktree_unrecorded_forks[10m]) > 0",
        lasts="5m",
        summary="{{ $value }} forks of {{ $labels.instance }} run without an object, and they become more.",
        advice="The API server does not take writes as fast as forks are made. From 256 on callers wait.",
    ),
    Alert(
        name="ForktreeApiWritesFailing",
        severity="warning",
        expr='sum by (instance) (rate(forktree_api_writes_total{outcome=~"refused|unavailable"}[5m]))'
        " / sum by (instance) (rate(forktree_api_writes_total[5m])) > 0.05",
        lasts="10m",
        summary="{{ $value | humanizePercentage }} of the API writes of {{ $labels.instance }} fail.",
        advice="unavailable: the API server or the way to it. refused: roles, policies or a quota; the "
        "message is in the log.",
    ),
)


def manifest() -> dict[str, Any]:
    """The PrometheusRule; its namespace is for whoever installs it to say."""
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "forktree", "labels": {"app.kubernetes.io/name": "forktree"}},
        "spec": {"groups": [{"name": "forktree", "rules": [_rule(each) for each in ALERTS]}]},
    }


def _rule(alert: Alert) -> dict[str, Any]:
    return {
        "alert": alert.name,
        "expr": alert.expr,
        "for": alert.lasts,
        "labels": {"severity": alert.severity},
        "annotations": {"summary": alert.summary, "description": alert.advice},
    }
