"""The Grafana dashboard: one table of panels, laid out row by row."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

WIDTH: Final = 24
"""Columns of Grafana's grid."""
HEIGHT: Final = 8
_SOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
_SECONDS, _BYTES, _PER_SECOND, _COUNT = "s", "bytes", "ops", "short"


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One query of a panel."""

    expr: str
    legend: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One picture."""

    title: str
    unit: str
    lines: tuple[Line, ...]
    says: str
    """What to read in it."""
    single: bool = False
    """A number in place of a curve."""
    good_from: int | None = None
    """The least number that is as it should be. None: any is."""
    stacked: bool = False
    logarithmic: bool = False
    """Where one line may be a thousand times as high as another."""


@dataclass(frozen=True, slots=True)
class Row:
    """Panels side by side, under a heading."""

    title: str
    panels: tuple[Panel, ...]


_HERE: Final = 'instance=~"$instance"'


def _quantile(share: float, metric: str, by: str) -> str:
    rate = f"rate({metric}_bucket{{{_HERE}}}[$__rate_interval])"
    return f"histogram_quantile({share}, sum by (le, {by}) ({rate}))"


def _rate(metric: str, by: str, where: str = "") -> str:
    matching = f"{_HERE}{', ' if where else ''}{where}"
    return f"sum by ({by}) (rate({metric}{{{matching}}}[$__rate_interval]))"


def _rate_of_those_seen(metric: str, by: str, where: str = _HERE) -> str:
    """Without what has not happened in the time that is looked at: a counter begins with all its labels."""
    rate = f"sum by ({by}) (rate({metric}{{{where}}}[$__rate_interval]))"
    return f"{rate} and sum by ({by}) (increase({metric}{{{where}}}[$__range])) > 0"


ROWS: Final[tuple[Row, ...]] = (
    Row(
        "At a glance",
        (
            Panel(
                title="Leader",
                unit=_COUNT,
                single=True,
                good_from=1,
                lines=(Line(expr="sum(forktree_operator_leader)", legend="leads"),),
                says="1 operator leads. 0: new roots and Fork objects get no node.",
            ),
            Panel(
                title="Nodes",
                unit=_COUNT,
                single=True,
                lines=(Line(expr="max by (state) (forktree_operator_nodes)", legend="{{state}}"),),
                says="Nodes by how they stand with the operator that leads.",
            ),
            Panel(
                title="Canary",
                unit=_COUNT,
                single=True,
                good_from=1,
                lines=(Line(expr=f"min(forktree_canary_passed{{{_HERE}}})", legend="passed"),),
                says="1: every agent has booted and forked a machine by way of trial.",
            ),
            Panel(
                title="Machines",
                unit=_COUNT,
                single=True,
                lines=(
                    Line(expr=f"sum(forktree_machines{{{_HERE}}})", legend="machines"),
                    Line(expr=f"sum(forktree_points{{{_HERE}}})", legend="instants"),
                    Line(expr=f"sum(forktree_execs_running{{{_HERE}}})", legend="commands"),
                ),
                says="What runs or is held now.",
            ),
        ),
    ),
    Row(
        "Forks",
        (
            Panel(
                title="Fork time by stage, median and 99 of 100",
                unit=_SECONDS,
                logarithmic=True,
                lines=(
                    Line(expr=_quantile(0.5, "forktree_fork_seconds", "stage"), legend="{{stage}} p50"),
                    Line(expr=_quantile(0.99, "forktree_fork_seconds", "stage"), legend="{{stage}} p99"),
                ),
                says="pause: the parent stood still. fork: every child ran. ready: every child answered. "
                "total: the caller was told.",
            ),
            Panel(
                title="Forks by road and mode",
                unit=_PER_SECOND,
                lines=(
                    Line(
                        expr=_rate("forktree_fork_seconds_count", "road, mode", 'stage="fork"'),
                        legend="{{road}} {{mode}}",
                    ),
                ),
                says="early: over HTTP; object: by Fork objects; root: sessions started from their template.",
            ),
            Panel(
                title="Failures and refusals",
                unit=_PER_SECOND,
                lines=(
                    Line(
                        expr=_rate_of_those_seen("forktree_fork_failures_total", "reason"),
                        legend="{{reason}}",
                    ),
                    Line(
                        expr=_rate_of_those_seen("forktree_at_capacity_refusals_total", "road"),
                        legend="no room, {{road}}",
                    ),
                ),
                says="Refusals for want of room are tried again; failures are for good.",
            ),
        ),
    ),
    Row(
        "What runs",
        (
            Panel(
                title="Sessions by phase",
                unit=_COUNT,
                stacked=True,
                lines=(Line(expr=f"sum by (phase) (forktree_sessions{{{_HERE}}})", legend="{{phase}}"),),
                says="Of those that are not over.",
            ),
            Panel(
                title="Memory by the worst case",
                unit=_BYTES,
                lines=(
                    Line(expr=f"sum(forktree_memory_capacity_bytes{{{_HERE}}})", legend="may be promised"),
                    Line(expr=f"sum(forktree_memory_reserved_bytes{{{_HERE}}})", legend="is promised"),
                    Line(expr=f"sum(forktree_point_bytes{{{_HERE}}})", legend="of that, instants"),
                ),
                says="What is promised stays below what may be: else AtCapacity.",
            ),
            Panel(
                title="Machines",
                unit=_COUNT,
                lines=(
                    Line(expr=f"sum by (instance) (forktree_machines{{{_HERE}}})", legend="{{instance}}"),
                    Line(
                        expr=f"sum by (instance) (forktree_standby_machines{{{_HERE}}})",
                        legend="{{instance}}, in wait",
                    ),
                    Line(
                        expr=f"sum by (instance) (increase(forktree_machines_lost_total{{{_HERE}}}[15m]))",
                        legend="{{instance}}, lost in 15 min",
                    ),
                ),
                says="Those in wait make the next fork fast, and give way to whoever needs their room.",
            ),
        ),
    ),
    Row(
        "Commands and HTTP",
        (
            Panel(
                title="Commands",
                unit=_PER_SECOND,
                lines=(
                    Line(
                        expr=_rate_of_those_seen("forktree_execs_ended_total", "outcome"),
                        legend="{{outcome}}",
                    ),
                ),
                says="How commands ended.",
            ),
            Panel(
                title="Requests",
                unit=_PER_SECOND,
                stacked=True,
                lines=(Line(expr=_rate("forktree_http_requests_total", "status"), legend="{{status}}"),),
                says="By class of status.",
            ),
            Panel(
                title="Slowest requests, 99 of 100",
                unit=_SECONDS,
                logarithmic=True,
                lines=(
                    Line(
                        expr=f"topk(8, {_quantile(0.99, 'forktree_http_request_seconds', 'method, route')})",
                        legend="{{method}} {{route}}",
                    ),
                ),
                says="Streams and waits take as long as they are asked to.",
            ),
        ),
    ),
    Row(
        "Under the surface",
        (
            Panel(
                title="Writes to the API server",
                unit=_PER_SECOND,
                lines=(
                    Line(
                        expr=_rate_of_those_seen("forktree_api_writes_total", "verb, outcome"),
                        legend="{{verb}} {{outcome}}",
                    ),
                ),
                says="Conflicts are tried again. refused and unavailable are trouble.",
            ),
            Panel(
                title="Forks without objects, sweeps",
                unit=_COUNT,
                lines=(
                    Line(
                        expr=f"sum by (instance) (forktree_unrecorded_forks{{{_HERE}}})",
                        legend="{{instance}}, without objects",
                    ),
                    Line(
                        expr=f"sum by (what) (increase(forktree_swept_total{{{_HERE}}}[1h]))",
                        legend="{{what}} ended by sweeps in 1 h",
                    ),
                    Line(
                        expr=f'sum(increase(forktree_sweeps_total{{{_HERE}, outcome="given_up"}}[1h]))',
                        legend="sweeps given up in 1 h",
                    ),
                ),
                says="What comes late, and what had to be put right.",
            ),
            Panel(
                title="Lag of the agents' event loops, 99 of 100",
                unit=_SECONDS,
                logarithmic=True,
                lines=(
                    Line(
                        expr=_quantile(0.99, "forktree_event_loop_lag_seconds", "instance"),
                        legend="{{instance}}",
                    ),
                ),
                says="Every fork waits this long more than once.",
            ),
        ),
    ),
    Row(
        "Operator",
        (
            Panel(
                title="Decisions",
                unit=_PER_SECOND,
                lines=(
                    Line(
                        expr="sum(rate(forktree_operator_placements_total[$__rate_interval]))",
                        legend="placed",
                    ),
                    Line(expr="sum(rate(forktree_operator_routes_total[$__rate_interval]))", legend="routed"),
                    Line(
                        expr=_rate_of_those_seen("forktree_operator_rejections_total", "reason", ""),
                        legend="rejected, {{reason}}",
                    ),
                ),
                says="Roots placed, forks sent to their source's node, forks failed for good.",
            ),
            Panel(
                title="Created to decided, 99 of 100",
                unit=_SECONDS,
                logarithmic=True,
                lines=(
                    Line(
                        expr="histogram_quantile(0.99, sum by (le, kind) "
                        "(rate(forktree_operator_decision_seconds_bucket[$__rate_interval])))",
                        legend="{{kind}}",
                    ),
                ),
                says="Whole seconds at best, waiting for room and sources included.",
            ),
            Panel(
                title="Sweeps, 99 of 100",
                unit=_SECONDS,
                logarithmic=True,
                lines=(
                    Line(
                        expr="histogram_quantile(0.99, sum by (le) "
                        "(rate(forktree_operator_sweep_seconds_bucket[$__rate_interval])))",
                        legend="operator",
                    ),
                ),
                says="How long the operator takes to look at all that has no node.",
            ),
        ),
    ),
)


def asked(expr: str, *, window: str, span: str) -> str:
    """As Grafana sends it to Prometheus: for all agents, rates over `window`, and `span` the time in view."""
    filled = expr.replace("$__rate_interval", window).replace("$__range", span)
    return filled.replace("$instance", ".*")


def labels_of(legend: str) -> list[str]:
    """The labels that a line is called by."""
    return re.findall(r"\{\{(\w+)\}\}", legend)


def called(legend: str, labels: Mapping[str, str]) -> str:
    """What Grafana calls a line."""
    return re.sub(r"\{\{(\w+)\}\}", lambda match: labels.get(match[1], ""), legend)


def document() -> dict[str, Any]:
    """What Grafana imports; 10 and newer."""
    return {
        "uid": "forktree",
        "title": "forktree",
        "tags": ["forktree"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [
                {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"},
                {
                    "name": "instance",
                    "type": "query",
                    "label": "Agent",
                    "datasource": _SOURCE,
                    "query": "label_values(forktree_machines, instance)",
                    "refresh": 2,
                    "includeAll": True,
                    "allValue": ".*",
                    "multi": True,
                    "current": {"text": "All", "value": "$__all"},
                },
            ]
        },
        "panels": list(_panels()),
    }


def _panels() -> Iterator[dict[str, Any]]:
    top, number = 0, 1
    for row in ROWS:
        yield {
            "id": number,
            "type": "row",
            "title": row.title,
            "collapsed": False,
            "gridPos": {"x": 0, "y": top, "w": WIDTH, "h": 1},
            "panels": [],
        }
        top, number = top + 1, number + 1
        height = HEIGHT // 2 if all(panel.single for panel in row.panels) else HEIGHT
        width = WIDTH // len(row.panels)
        for index, panel in enumerate(row.panels):
            where = {"x": index * width, "y": top, "w": width, "h": height}
            yield {"id": number, "gridPos": where, **_panel(panel)}
            number += 1
        top += height


def _look(panel: Panel) -> dict[str, Any]:
    """Its unit, axis and colours."""
    if panel.single:
        green: dict[str, Any] = {"color": "green", "value": panel.good_from}
        steps = [green] if panel.good_from is None else [{"color": "red", "value": None}, green]
        return {"unit": panel.unit, "thresholds": {"mode": "absolute", "steps": steps}}
    custom: dict[str, Any] = {
        "fillOpacity": 20 if panel.stacked else 0,
        "stacking": {"mode": "normal" if panel.stacked else "none"},
        "spanNulls": True,  # While nothing happens there is no median of it.
        "scaleDistribution": {"type": "log", "log": 10} if panel.logarithmic else {"type": "linear"},
    }
    return {"unit": panel.unit, **({} if panel.logarithmic else {"min": 0}), "custom": custom}


def _panel(panel: Panel) -> dict[str, Any]:
    return {
        "type": "stat" if panel.single else "timeseries",
        "title": panel.title,
        "description": panel.says,
        "datasource": _SOURCE,
        "fieldConfig": {"defaults": _look(panel), "overrides": []},
        "options": {"reduceOptions": {"calcs": ["lastNotNull"]}} if panel.single else {},
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": _SOURCE,
                "expr": line.expr,
                "legendFormat": line.legend,
            }
            for index, line in enumerate(panel.lines)
        ],
    }
