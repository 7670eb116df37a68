"""Each alert fires when it must and not before, by Prometheus' own tester."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from forktree_dev.monitoring import alerts, programs
from forktree_dev.monitoring.__main__ import RULE


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """What happens, minute by minute, and what is said of it."""

    alert: str
    series: Mapping[str, str]
    """In promtool's notation: `0x3 1+2x10` is 0 four times, then 1, 3, 5…"""
    quiet: tuple[int, ...]
    """Minutes at which nobody is told."""
    fires: int | None = None
    """A minute at which somebody is. None: nobody ever is."""
    labels: Mapping[str, str] | None = None
    summary: str = ""
    """As it reads then."""


COURSES = (
    Course(
        alert="ForktreeOperatorWithoutLeader",
        series={
            'forktree_operator_leader{instance="a"}': "1x5 0x20",
            'forktree_operator_leader{instance="b"}': "0x25",
        },
        quiet=(5, 6, 7),
        fires=8,
        summary="No forktree operator leads: new root sessions and Fork objects get no node.",
    ),
    Course(  # Nobody is scraped at all.
        alert="ForktreeOperatorWithoutLeader",
        series={},
        quiet=(1,),
        fires=2,
        summary="No forktree operator leads: new root sessions and Fork objects get no node.",
    ),
    Course(  # One hands over to the other.
        alert="ForktreeOperatorWithoutLeader",
        series={
            'forktree_operator_leader{instance="a"}': "1x5 0x20",
            'forktree_operator_leader{instance="b"}': "0x6 1x20",
        },
        quiet=(6, 7, 8, 9),
    ),
    Course(
        alert="ForktreeNodeNotReady",
        series={
            'forktree_operator_nodes{instance="a",state="silent"}': "0x3 2x20",
            'forktree_operator_nodes{instance="b",state="silent"}': "0x24",
            'forktree_operator_nodes{instance="a",state="ready"}': "3x3 1x20",
        },
        quiet=(4, 8),
        fires=9,
        labels={"state": "silent"},
        summary="2 nodes are silent and take no sessions.",
    ),
    Course(  # A node boots.
        alert="ForktreeNodeNotReady",
        series={'forktree_operator_nodes{state="not_ready"}': "0x3 1x4 0x20"},
        quiet=(4, 8, 9, 10),
    ),
    Course(
        alert="ForktreeCanaryFailed",
        series={
            'forktree_canary_passed{instance="node-7"}': "0x20",
            'forktree_canary_passed{instance="n"}': "1x20",
        },
        quiet=(0, 9),
        fires=10,
        labels={"instance": "node-7"},
        summary="Node of node-7: no machine could be booted and forked by way of trial.",
    ),
    Course(
        alert="ForktreeAtCapacity",
        series={
            'forktree_at_capacity_refusals_total{instance="node-7",road="object"}': "0+1x30",
            'forktree_at_capacity_refusals_total{instance="n",road="object"}': "0x30",
        },
        quiet=(1, 15),
        fires=16,
        labels={"instance": "node-7"},
        summary="Node of node-7 has refused forks for want of room for 15 minutes.",
    ),
    Course(  # One burst.
        alert="ForktreeAtCapacity",
        series={'forktree_at_capacity_refusals_total{instance="node-7",road="early"}': "0x5 90x40"},
        quiet=(6, 20, 25, 30),
    ),
    Course(
        alert="ForktreeForksFailing",
        series={
            'forktree_fork_failures_total{instance="n",reason="MachineLost"}': "0x5 1x20",
            'forktree_fork_failures_total{instance="n",reason="ForkFailed"}': "0x25",
        },
        quiet=(5, 6),
        fires=7,
        labels={"reason": "MachineLost"},
        summary="Forks fail with reason MachineLost.",
    ),
    Course(  # Who asks for what cannot be is told so, and nobody else.
        alert="ForktreeForksFailing",
        series={'forktree_fork_failures_total{instance="n",reason="AtCapacity"}': "0+1x20"},
        quiet=(5, 10, 20),
    ),
    Course(
        alert="ForktreeMachinesLost",
        series={
            'forktree_machines_lost_total{instance="node-7"}': "0x5 1x60",
            'forktree_machines_lost_total{instance="n"}': "4x60",
        },
        quiet=(5, 6, 30),
        fires=7,
        labels={"instance": "node-7"},
        summary="Machines of node-7 ended although nobody asked for it.",
    ),
    Course(
        alert="ForktreeOrphansEnded",
        series={
            'forktree_swept_total{instance="node-7",what="machine"}': "0x5 2x90",
            'forktree_swept_total{instance="node-7",what="vanished"}': "0+1x90",
            'forktree_swept_total{instance="node-7",what="point"}': "0x90",
        },
        quiet=(5, 6, 80),
        fires=7,
        labels={"instance": "node-7", "what": "machine"},
        summary="A sweep of node-7 ended what no object stood for (machine).",
    ),
    Course(
        alert="ForktreeJournalBacklog",
        series={'forktree_unrecorded_forks{instance="node-7"}': "30+1x60"},
        quiet=(3, 7),
        fires=8,
        labels={"instance": "node-7"},
        summary="38 forks of node-7 run without an object, and they become more.",
    ),
    Course(  # Many, and they become fewer.
        alert="ForktreeJournalBacklog",
        series={'forktree_unrecorded_forks{instance="node-7"}': "250-5x40"},
        quiet=(5, 10, 30),
    ),
    Course(
        alert="ForktreeApiWritesFailing",
        series={
            'forktree_api_writes_total{instance="n",outcome="ok",verb="patch"}': "0+9x40",
            'forktree_api_writes_total{instance="n",outcome="refused",verb="create"}': "0+1x40",
        },
        quiet=(1, 10),
        fires=11,
        labels={"instance": "n"},
        summary="10% of the API writes of n fail.",
    ),
    Course(  # Conflicts are tried again, and one failure in a hundred is nothing.
        alert="ForktreeApiWritesFailing",
        series={
            'forktree_api_writes_total{instance="n",outcome="ok",verb="patch"}': "0+49x40",
            'forktree_api_writes_total{instance="n",outcome="conflict",verb="patch"}': "0+50x40",
            'forktree_api_writes_total{instance="n",outcome="unavailable",verb="patch"}': "0+1x40",
        },
        quiet=(5, 11, 20, 40),
    ),
)


def promtool(*arguments: str, folder: Path) -> str:
    """What it printed. Fails when it fails."""
    command = [str(programs.folder() / "promtool"), *arguments]
    done = subprocess.run(command, cwd=folder, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    """The committed rules, as Prometheus itself reads them."""
    file = tmp_path / "rules.yaml"
    file.write_text(json.dumps(yaml.safe_load(RULE.read_text())["spec"]))
    return file


def test_prometheus_takes_the_rules(rules: Path) -> None:
    assert f"SUCCESS: {len(alerts.ALERTS)} rules found" in promtool(
        "check", "rules", rules.name, folder=rules.parent
    )


def test_every_alert_is_seen_firing_and_quiet() -> None:
    names = {each.name for each in alerts.ALERTS}
    assert {each.alert for each in COURSES if each.fires is not None} == names
    assert {each.alert for each in COURSES if each.quiet} == names


@pytest.mark.parametrize("course", COURSES, ids=[f"{each.alert}-{each.fires}" for each in COURSES])
def test_it_fires_when_it_must_and_not_before(course: Course, rules: Path) -> None:
    (alert,) = (each for each in alerts.ALERTS if each.name == course.alert)

    def at(minute: int, *told: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"eval_time": f"{minute}m", "alertname": course.alert, "exp_alerts": [*told]}

    checks = [at(minute) for minute in course.quiet]
    if course.fires is not None:
        labels = {"severity": alert.severity, **(course.labels or {})}
        annotations = {"summary": course.summary, "description": alert.advice}
        checks.append(at(course.fires, {"exp_labels": labels, "exp_annotations": annotations}))
    series = [{"series": name, "values": values} for name, values in course.series.items()]
    case = {"interval": "1m", "input_series": series, "alert_rule_test": checks}
    whole = {"rule_files": [rules.name], "evaluation_interval": "1m", "tests": [case]}
    (rules.parent / "course.yaml").write_text(json.dumps(whole))
    promtool("test", "rules", "course.yaml", folder=rules.parent)
