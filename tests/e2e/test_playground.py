"""`make up` and `make down`, as a person types them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from forktree_dev import system
from forktree_dev.processes import running_recorded
from leftovers import Traces, left_behind


def playground(command: str, state: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "forktree_dev.playground", command],
        env=os.environ | {"STATE": str(state)},
        check=True,
        capture_output=True,
        text=True,
        timeout=300,
    )


def in_its_shell(state: Path, script: str) -> str:
    command = ["bash", "-c", f"source {state}/env; {script}"]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


def crash(state: Path, part: str, *, says: str) -> None:
    """End the program of a part, which is started again: wait until its next run `says` the same."""
    folder, name = (state / part).parent, (state / part).name
    log = folder / "logs" / f"{name}.log"
    supervisor = json.loads((folder / "records" / f"{name}.json").read_text())["pid"]
    (program,) = map(int, Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split())
    said = log.read_text().count(says)
    assert said > 0
    os.kill(program, signal.SIGKILL)
    deadline = time.monotonic() + 120
    while log.read_text().count(says) == said:
        assert time.monotonic() < deadline, log.read_text()[-2000:]
        time.sleep(0.2)  # A file tells nobody when it grows.


def test_the_playground_is_ready_to_use_stays_and_goes_without_a_trace(tmp_path: Path) -> None:
    state = tmp_path / "playground"
    before = Traces.now()
    try:
        told = playground("up", state).stdout
        assert f"source {state}/env" in told
        assert in_its_shell(state, "kubectl get sessiontemplates -o name").split() == [
            "sessiontemplate.forktree.dev/python",
            "sessiontemplate.forktree.dev/tiny",
        ]
        ask = 'curl --silent --show-error --cacert "$FORKTREE_CA" --header "Authorization: Bearer $token"'
        token = "token=$(kubectl create token player --audience=forktree.dev)"
        listed = in_its_shell(
            state, f'{token}; {ask} --write-out "%{{http_code}}" "$FORKTREE_URL/v1/sessions"'
        )
        assert listed.endswith("200")

        assert in_its_shell(state, "forktree get").strip() == "There are no sessions."
        assert in_its_shell(state, "kubectl forktree templates -o name").split() == ["python", "tiny"]

        crash(state, "operator", says="leading")
        crash(state, "node-1/agent", says="http_serving")
        running = running_recorded(state)
        assert "is up already" in playground("up", state).stdout
        assert running_recorded(state) == running
    finally:
        playground("down", state)
    assert not state.exists()
    assert left_behind(before, [str(state), system.name_of(state)]).lines() == []
    assert playground("down", state).stdout == ""
