"""The agent's own start: what it is told, whom it locks out, what it says of its node."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from forktree.models import ForkNodeStatus
from forktree.models.conditions import ConditionType, holds
from forktree_agent.__main__ import main, take_descriptors
from forktree_agent.control.node_status import NodeFacts, material, node_status
from forktree_agent.engine.contract import Capability, Usage
from forktree_agent.main import CannotStart, locked, run
from forktree_agent.settings import Settings
from unit.control_facts import NOW


def test_a_state_directory_has_one_agent(tmp_path: Path) -> None:
    with (
        locked(tmp_path / "lock"),
        pytest.raises(CannotStart, match="another agent"),
        locked(tmp_path / "lock"),
    ):
        pass
    with locked(tmp_path / "lock"):
        pass
    with pytest.raises(CannotStart, match="state directory"), locked(tmp_path / "missing" / "lock"):
        pass


async def test_an_agent_that_cannot_start_says_why_and_asks_to_be_restarted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = Settings(
        node_name="n",
        state_directory=tmp_path,
        guest_directory=tmp_path,
        shim_library=tmp_path,
        kubeconfig=tmp_path / "missing",
    )
    with locked(tmp_path / "agent.lock"):
        assert await run(settings) == 1
    assert "another agent holds" in caplog.text


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--listen", "nowhere"],
        ["--memory-limit", "much"],
        ["--sweep-seconds", "0"],
        ["--sweep-seconds", "nan"],
        ["--metrics-listen", "0.0.0.0:65536"],
        ["--tls-cert", "c"],
        ["--egress", "--egress-allow", "10.0.0.1/8"],
        ["--egress-deny", "10.0.0.0/8"],
    ],
)
def test_arguments_that_make_no_sense_are_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    needed = ["--node-name=n", "--state-dir=s", "--guest-dir=g", "--shim-library=l"] if arguments else []
    with pytest.raises(SystemExit):
        main([*needed, *arguments])
    assert "usage" in capsys.readouterr().err


def facts(*, passed: bool) -> NodeFacts:
    capability = Capability(
        passed=passed,
        engine="microvm",
        accelerator="tcg",
        reason="Emulated" if passed else "NoKvm",
        message="there is no KVM",
        boot_ms=1.23456,
        fork_ms=2.0,
    )
    return NodeFacts(
        capability=capability,
        probed_at=NOW,
        boot_id="boot",
        version="0",
        endpoint="https://here",
        ca_bundle="a certificate",
    )


@pytest.mark.parametrize("passed", [True, False])
def test_a_node_is_ready_when_its_canary_passed(passed: bool) -> None:
    status = node_status(
        facts(passed=passed), Usage(capacity_bytes=10, reserved_bytes=3), ForkNodeStatus(), NOW
    )
    assert status.ready is passed
    assert holds(status.conditions, ConditionType.READY) is passed
    assert (status.capacity_bytes, status.reserved_bytes) == (10, 3)
    assert status.canary is not None
    assert status.canary.boot_ms == 1.235


@pytest.mark.parametrize(
    ("told", "now", "expected"),
    [(500, 500, False), (500, 501, False), (500, 600, True), (500, 0, True), (0, 1, True), (600, 500, True)],
)
def test_only_a_change_of_use_that_matters_is_reported(told: int, now: int, expected: bool) -> None:
    assert (
        material(
            Usage(capacity_bytes=1000, reserved_bytes=told), Usage(capacity_bytes=1000, reserved_bytes=now)
        )
        is expected
    )


def test_an_agent_takes_as_many_descriptors_as_it_may_have() -> None:
    limits = soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, hard - 1), hard))
    try:
        take_descriptors()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
