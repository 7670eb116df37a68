"""Writes what stands on the metrics: `python -m forktree_dev.monitoring`.

The page about them in the docs, and what the chart brings along: alerts, and a dashboard.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import yaml

from forktree.metrics.table import METRICS, Kind, Metric, Program
from forktree_dev.checkout import CHECKOUT
from forktree_dev.generated import write_or_check
from forktree_dev.monitoring import alerts, dashboard

PAGE: Final = CHECKOUT / "docs" / "metrics.md"
MONITORING: Final = CHECKOUT / "charts" / "forktree" / "files" / "monitoring"
RULE: Final = MONITORING / "prometheusrule.yaml"
DASHBOARD: Final = MONITORING / "dashboard.json"
MANY: Final = 12
"""Values of a label that are listed elsewhere."""
_HEAD: Final = """\
<!-- Generated from sdk/forktree/metrics/table.py by `make generate`; change that file, not this one. -->
# Metrics

What agents and operators serve at `/metrics`, in Prometheus' text format ([how to have it
scraped](operate.md#metrics)). No label is ever a name, a uid or a namespace, so how many series there are
depends on this page alone. Counters of which every label's values are known begin at 0 with the program.
"""
_ALERTS: Final = """\
## Alerts

In `charts/forktree/files/monitoring/prometheusrule.yaml`, beside a dashboard for Grafana
([what it shows](operate.md#the-dashboard)).

| alert | severity | when | what to do |
|---|---|---|---|
"""


def render() -> dict[Path, str]:
    """What each file must say."""
    head = "# Generated from dev/forktree_dev/monitoring/alerts.py by `make generate`; change that file.\n"
    rule: str = yaml.safe_dump(  # pyright: ignore[reportUnknownMemberType]  (a parameter of its has no type)
        alerts.manifest(), sort_keys=False, width=1000
    )
    return {
        PAGE: _page(),
        RULE: head + rule,
        DASHBOARD: json.dumps(dashboard.document(), indent=1, ensure_ascii=False) + "\n",
    }


def _page() -> str:
    parts = [_HEAD]
    for program, title in ((Program.AGENT, "Agent"), (Program.OPERATOR, "Operator")):
        parts.append(f"## {title}\n")
        parts += ["\n".join(_section(metric)) for metric in METRICS if program in metric.programs]
    rows = [
        f"| `{each.name}` | {each.severity} | {_cell(each.summary)} For {each.lasts}. | "
        f"{_cell(each.advice)} |"
        for each in alerts.ALERTS
    ]
    return "\n".join(parts) + "\n" + _ALERTS + "\n".join(rows) + "\n"


def _section(metric: Metric) -> Iterator[str]:
    yield f"### `{metric.name}`\n"
    yield f"{metric.kind.capitalize()}. {metric.help}"
    if metric.labels:
        yield "\n| label | values | meaning |\n|---|---|---|"
        for label in metric.labels:
            values = ", ".join(f"`{value}`" for value in label.values) if len(label.values) < MANY else ""
            yield f"| `{label.name}` | {values} | {_cell(label.meaning)} |"
    if metric.kind is Kind.HISTOGRAM:
        yield f"\nBuckets: {', '.join(f'{bound:g}' for bound in metric.buckets)}."
    yield ""


def _cell(text: str) -> str:
    """As it stands in a table: Prometheus' own variables become words, and nothing ends the cell."""
    words = re.sub(r"\{\{ \$labels\.(\w+) \}\}", r"*\1*", text)
    return re.sub(r"\{\{ \$value[^}]*\}\}", "*N*", words).replace("|", "\\|")


def main() -> int:
    return write_or_check(
        render(), prog="python -m forktree_dev.monitoring", description="Write what stands on the metrics."
    )


if __name__ == "__main__":
    sys.exit(main())
