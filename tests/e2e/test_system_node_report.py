"""What a newcomer reads of a node."""

from __future__ import annotations

import json

from forktree_dev.system import System


async def test_a_node_that_works_reads_so_whether_it_emulates_or_not_and_says_why(system: System) -> None:
    answer = await system.kubectl.run("get", "forknode", system.node, "--output=json")
    status = json.loads(answer)["status"]
    assert status["ready"] is True
    printed = await system.kubectl.run("get", "forknode", system.node, "--output=wide")
    titles, values = printed.splitlines()
    for title in ("READY", "ACCELERATOR", "CANARY", "WHY"):
        assert title in titles
    word = {"kvm": "CanaryPassed", "tcg": "Emulated"}[status["accelerator"]]
    assert word in values
    assert "NoKvm" not in values
    assert "compared equal" in values
