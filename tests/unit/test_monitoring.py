"""What stands on the metrics is up to date, is PromQL, and names only what there is."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import promql_parser
import pytest
import yaml

from forktree.metrics.table import METRICS, Kind, Metric
from forktree_dev.monitoring import alerts, dashboard
from forktree_dev.monitoring.__main__ import DASHBOARD, PAGE, RULE, render
from forktree_dev.monitoring.picture import written

BY_NAME = {metric.name: metric for metric in METRICS}
SERIES = {
    series: metric
    for metric in METRICS
    for series in (
        [f"{metric.name}{end}" for end in ("_bucket", "_sum", "_count")]
        if metric.kind is Kind.HISTOGRAM
        else [metric.name]
    )
}


def expressions() -> Iterator[tuple[str, str]]:
    for alert in alerts.ALERTS:
        yield alert.name, alert.expr
    for row in dashboard.ROWS:
        for panel in row.panels:
            for line in panel.lines:
                yield panel.title, dashboard.asked(line.expr, window="5m", span="1h")


def used(expr: str) -> list[tuple[Metric, str]]:
    """Each metric in an expression, and the selector that follows it."""
    return [
        (SERIES[name], selector)
        for name, selector in re.findall(r"\b(forktree_\w+)(\{[^}]*\})?", expr)
        if name in SERIES or pytest.fail(f"{name} is no series of any metric")
    ]


def test_the_committed_files_are_what_the_tables_say() -> None:
    for file, text in render().items():
        assert file.read_text() == text, f"{file.name} is stale: run make generate"


@pytest.mark.parametrize(("where", "expr"), [*expressions()])
def test_every_expression_is_promql_about_metrics_and_labels_that_exist(where: str, expr: str) -> None:
    promql_parser.parse(expr)
    found = used(expr)
    assert found, where
    known = {"instance", "le", *(label.name for metric, _ in found for label in metric.labels)}
    for labels in re.findall(r"by \(([^)]*)\)", expr):
        assert set(re.split(r",\s*", labels)) <= known, where
    for metric, selector in found:
        for name, operator, value in re.findall(r'(\w+)(=~|!=|=)"([^"]*)"', selector):
            if name != "instance":
                label = next(each for each in metric.labels if each.name == name)
                assert set(value.split("|")) <= set(label.values), (where, operator)


def test_every_metric_is_in_the_dashboard_or_an_alert_or_at_least_on_the_page() -> None:
    shown = {metric.name for _, expr in expressions() for metric, _ in used(expr)}
    assert shown == BY_NAME.keys()
    page = PAGE.read_text()
    assert all(f"### `{name}`" in page for name in BY_NAME)


def test_an_alert_says_what_is_wrong_and_what_to_do_by_labels_that_its_expression_has() -> None:
    rules = yaml.safe_load(RULE.read_text())["spec"]["groups"][0]["rules"]
    assert len({rule["alert"] for rule in rules}) == len(rules)
    for rule in rules:
        assert rule["labels"]["severity"] in {"critical", "warning"}
        assert re.fullmatch(r"\d+m", rule["for"])
        notes: dict[str, str] = rule["annotations"]
        assert all(text.endswith(".") for text in notes.values())
        for label in re.findall(r"\$labels\.(\w+)", " ".join(notes.values())):
            assert re.search(rf"by \([^)]*\b{label}\b", rule["expr"]) or "by (" not in rule["expr"], label


def test_no_two_panels_lie_on_each_other_and_every_row_is_full() -> None:
    document: dict[str, Any] = json.loads(DASHBOARD.read_text())
    panels: list[dict[str, Any]] = document["panels"]
    assert [panel["id"] for panel in panels] == list(range(1, len(panels) + 1))
    for one, next_one in pairwise(panels):
        here, there = one["gridPos"], next_one["gridPos"]
        assert (there["y"], there["x"]) in {(here["y"], here["x"] + here["w"]), (here["y"] + here["h"], 0)}
        if there["y"] != here["y"]:
            assert here["x"] + here["w"] == dashboard.WIDTH


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.0123, "s", "12.3 ms"),
        (0.0, "s", "0 s"),
        (2.0, "s", "2 s"),
        (0.00005, "s", "50 µs"),
        (6 << 30, "bytes", "6 GiB"),
        (512, "bytes", "512 B"),
        (0.25, "ops", "0.25 ops/s"),
        (float("nan"), "ops", "none"),
        (4, "short", "4"),
    ],
)
def test_numbers_of_the_picture_have_their_units(value: float, unit: str, text: str) -> None:
    assert written(value, unit) == text


def test_a_panel_of_counters_has_no_line_for_what_never_happened() -> None:
    """Counters begin with all their labels: without this there would be forty lines at zero."""
    for row in dashboard.ROWS:
        for panel in row.panels:
            for line in panel.lines:
                for metric, _ in used(line.expr):
                    begins = metric.kind is Kind.COUNTER and all(label.values for label in metric.labels)
                    many = begins and any(
                        len(label.values) > 4
                        for label in metric.labels
                        if f"{{{{{label.name}}}}}" in line.legend
                    )
                    assert not many or "$__range" in line.expr, (panel.title, line.legend)
