"""`demo.json` has the keys that others read, whatever the demo came to."""

from __future__ import annotations

import json
from pathlib import Path

from forktree.models import Fork
from forktree_dev.demo.report import ForkClocks, Report

KEYS = {"forks", "stateEqual", "replaySeconds", "leftovers"}


def written(report: Report, folder: Path) -> dict[str, object]:
    report.write(folder / "made" / "by it")
    body: dict[str, object] = json.loads((folder / "made" / "by it" / "demo.json").read_text())
    return body


def test_a_demo_that_came_to_nothing_claims_nothing(tmp_path: Path) -> None:
    report = Report()
    body = written(report, tmp_path)
    assert body.keys() == KEYS
    assert body == {"forks": [], "stateEqual": False, "replaySeconds": None, "leftovers": None}
    assert not report.nothing_left


def test_a_whole_demo_says_what_each_fork_took_and_what_replaying_takes(tmp_path: Path) -> None:
    fork = Fork.model_validate(
        {
            "metadata": {"name": "first"},
            "spec": {"source": {"session": {"name": "root"}}, "replicas": 3},
            "status": {"depth": 1, "replicas": 3, "mode": "Fork", "pauseMs": 8.5, "forkMs": 94.8},
        }
    )
    report = Report(
        forks=[ForkClocks.of(fork)], state_equal=True, replay_seconds=12.5, leftovers={"processes": 0}
    )
    assert written(report, tmp_path) == {
        "forks": [
            {
                "name": "first",
                "depth": 1,
                "children": 3,
                "mode": "Fork",
                "pauseMs": 8.5,
                "forkMs": 94.8,
                "readyMs": None,
                "totalMs": None,
            }
        ],
        "stateEqual": True,
        "replaySeconds": 12.5,
        "leftovers": {"processes": 0},
    }
    assert report.nothing_left
