"""Hooks in real guests: what they see, when they run, and that a fork fails with them and leaves no child."""

from __future__ import annotations

import pytest

from component.node import Node, order, soon
from component.ram import chain_of, layer_of
from forktree_agent.engine.contract import Command, HookFailed, Hooks

pytestmark = pytest.mark.asyncio(loop_scope="session")


def sh(script: str, *, seconds: float = 30) -> Command:
    return Command(argv=("/bin/sh", "-c", script), timeout_seconds=seconds)


async def test_pre_runs_in_the_parent_and_post_in_each_child_under_its_own_identity(node: Node) -> None:
    parent = await node.root()
    hooks = Hooks(
        pre=sh("echo $FORKTREE_SESSION >> /tmp/pre"),
        post=sh("echo $FORKTREE_SESSION $(hostname) $FORKTREE_GENERATION >> /tmp/post"),
    )
    forked = await node.fork(parent, 2, hooks=hooks)
    for number, child in enumerate(forked.children):
        # Ready means that the hook is done: nothing is waited for here.
        assert await node.sh(child, "cat /tmp/pre") == "root\n"
        assert await node.sh(child, "cat /tmp/post") == f"child-{number} child-{number} {child.generation}\n"
    assert await node.sh(parent, "cat /tmp/pre; ls /tmp/post 2>/dev/null || :") == "root\n"
    again = await node.engine.branch(
        forked.point.id, [order("again")], node.tree, hooks=hooks, deadline=soon()
    )
    assert await node.sh(again.children[0], "cat /tmp/pre; cut -d' ' -f1 /tmp/post") == "root\nagain\n"


@pytest.mark.parametrize(
    ("hooks", "sentence"),
    [
        (Hooks(pre=sh("echo not now; exit 3")), "the preFork hook failed: exit code 3, 'not now'"),
        (Hooks(pre=sh("sleep 100", seconds=0.5)), "the preFork hook was not done after 0.5 s"),
        (Hooks(pre=Command(argv=("no-such-program",))), "the preFork hook did not start: .*no-such-program"),
        (
            Hooks(post=sh("test $FORKTREE_SESSION != child-1")),
            "the postFork hook failed: exit code 1",
        ),
        (Hooks(post=sh("test $FORKTREE_SESSION != child-1 || kill -9 $$")), "exit code 137"),
        (Hooks(post=sh("sleep 100", seconds=0.5)), "the postFork hook was not done after 0.5 s"),
    ],
)
async def test_a_hook_that_fails_or_is_late_fails_the_fork_and_leaves_no_child(
    node: Node, hooks: Hooks, sentence: str
) -> None:
    parent = await node.root()
    before = {each.machine for each in (await node.keeper.listing(deadline=soon())).machines}
    usage, points, chain = node.engine.usage(), node.engine.points(), chain_of(node, parent)
    with pytest.raises(HookFailed, match=sentence):
        await node.fork(parent, 2, hooks=hooks)
    assert {each.machine for each in (await node.keeper.listing(deadline=soon())).machines} == before
    assert node.engine.points() == points
    # What was copied stays with the parent, whose next fork copies only what is new since.
    kept = sum(layer_of(node, each).bytes for each in chain_of(node, parent)[len(chain) :])
    assert node.engine.usage().reserved_bytes == usage.reserved_bytes + kept
    assert await node.sh(parent, "echo unharmed") == "unharmed\n"
