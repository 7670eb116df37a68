"""Trees with a pause budget: a parent that would stand still for longer is copied ahead, or not forked."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from component.node import Node, order, owner, running_node, settings, soon
from component.ram import chain_of
from forktree_agent.engine.contract import (
    NO_HOOKS,
    Command,
    ForkResult,
    Hooks,
    Machine,
    PauseOverBudget,
)
from forktree_agent.engine.microvm.precopying import MOST_COPIES

pytestmark = pytest.mark.asyncio(loop_scope="session")

NEVER_MS = 1e-9
LARGE_MS = 60_000.0
WRITTEN = "head -c 24000000 /dev/urandom > /tmp/big; md5sum < /tmp/big"
WRITES_ON = "(while true; do echo > /tmp/beat; done) >/dev/null 2>&1 &"
DEFAULT_MS = 24_000_000 / (1 << 30) * 1000
"""What is expected of that, as long as nothing was copied of the machine."""


async def fork(
    node: Node, parent: Machine, budget_ms: float | None, *, hooks: Hooks = NO_HOOKS
) -> ForkResult:
    limits = dataclasses.replace(node.tree, pause_budget_ms=budget_ms)
    return await node.engine.fork(parent.id, owner(), [order("child")], limits, hooks=hooks, deadline=soon())


async def test_what_cannot_be_kept_is_refused_and_the_parent_was_not_stopped(node: Node) -> None:
    parent = await node.root()
    written = await node.sh(parent, f"{WRITES_ON} {WRITTEN}")
    usage, chain, machines = node.engine.usage(), chain_of(node, parent), node.engine.machines()
    points = node.engine.points()
    with pytest.raises(PauseOverBudget, match=r"would stand still for about .* allows 1e-09 ms"):
        await fork(node, parent, NEVER_MS)
    assert (node.engine.machines(), node.engine.points()) == (machines, points)
    added = chain_of(node, parent)[len(chain) :]
    assert 0 < len(added) <= MOST_COPIES
    # All that it costs is what was copied ahead, which the next fork need not copy.
    assert node.engine.usage().reserved_bytes - usage.reserved_bytes < 40 << 20
    assert await node.sh(parent, "echo runs") == "runs\n"
    (child,) = (await fork(node, parent, LARGE_MS)).children
    assert await node.sh(child, "md5sum < /tmp/big") == written
    # By now it is known what a stop takes beside the copy: nothing that is copied ahead would help.
    chain = chain_of(node, parent)
    with pytest.raises(PauseOverBudget):
        await fork(node, parent, NEVER_MS)
    assert chain_of(node, parent) == chain


async def test_most_is_copied_ahead_where_that_keeps_to_the_budget(node: Node) -> None:
    parent = await node.root()
    written = await node.sh(parent, WRITTEN)
    chain = chain_of(node, parent)
    (child,) = (await fork(node, parent, DEFAULT_MS / 2)).children
    assert await node.sh(child, "md5sum < /tmp/big") == written
    assert len(chain_of(node, parent)) >= len(chain) + 2  # One ahead, and the instant's.


async def test_a_parent_that_wrote_much_while_its_children_were_started_is_not_stopped(node: Node) -> None:
    parent = await node.root()
    machines, points = node.engine.machines(), node.engine.points()
    writing = Hooks(pre=Command(argv=("/bin/sh", "-c", WRITTEN)))  # Runs when all that comes before is done.
    with pytest.raises(PauseOverBudget, match=r"2\d{4} KiB"):
        await fork(node, parent, DEFAULT_MS / 2, hooks=writing)
    assert (node.engine.machines(), node.engine.points()) == (machines, points)
    assert await node.sh(parent, "echo runs") == "runs\n"


async def test_a_paused_parent_has_no_budget(node: Node) -> None:
    parent = await node.root()
    await node.engine.pause(parent.id, deadline=soon())
    forked = await fork(node, parent, NEVER_MS)
    assert forked.clocks.pause_ms is None


async def test_without_write_tracking_nothing_is_copied_ahead(tmp_path: Path) -> None:
    async with running_node(tmp_path, settings(write_tracking="pagemap")) as node:
        parent = await node.root()
        await node.sh(parent, WRITES_ON)
        chain, usage = chain_of(node, parent), node.engine.usage()
        with pytest.raises(PauseOverBudget):
            await fork(node, parent, NEVER_MS)
        assert (chain_of(node, parent), node.engine.usage()) == (chain, usage)
        await fork(node, parent, LARGE_MS)
        for machine in node.engine.machines():
            await node.engine.release(machine.id)
