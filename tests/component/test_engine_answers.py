"""Forks that do not wait for their children's answers: what a child may be asked, and what ends it alone."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from component.keeper_fixtures import running_keeper
from component.node import Node, engine_on, soon
from forktree_agent.engine.contract import (
    Command,
    Hooks,
    Machine,
    MachineExit,
    MachineGone,
    Owner,
    ParentLost,
)

pytestmark = pytest.mark.asyncio(loop_scope="session")


def after(script: str) -> Hooks:
    """What each child does before anybody hears of it."""
    return Hooks(post=Command(argv=("/bin/sh", "-c", script), timeout_seconds=60))


async def lost(node: Node) -> MachineExit:
    exited = await anext(aiter(node.engine.exits()))
    assert isinstance(exited, MachineExit)
    return exited


def recorded(node: Node, machine: Machine) -> str:
    return (node.journal / "machine" / f"{machine.id}.json").read_text()


async def test_a_fork_is_done_when_its_children_run_and_what_they_are_asked_waits(node: Node) -> None:
    parent = await node.root()
    forked = await node.fork(parent, 2, hooks=after("sleep 2; hostname > /tmp/told"), answered=False)
    assert forked.clocks.ready_ms is None
    assert forked.clocks.fork_ms > 0
    assert all('"post_fork":{' in recorded(node, child) for child in forked.children)
    for index, child in enumerate(forked.children):
        assert await node.sh(child, "cat /tmp/told") == f"child-{index}\n"
        ready_ms = await node.engine.answered(child.id, deadline=soon())
        assert ready_ms is not None
        assert ready_ms > forked.clocks.fork_ms + 2000
        assert '"unanswered":null' in recorded(node, child)
    assert await node.engine.answered(parent.id, deadline=soon()) is None
    generations = [await node.sh(each, "cat /run/forktree/identity") for each in forked.children]
    assert [each.generation in said for each, said in zip(forked.children, generations, strict=True)] == [
        True,
        True,
    ]


async def test_a_child_is_forked_and_paused_once_it_has_answered(node: Node) -> None:
    parent = await node.root()
    hooks = after("sleep 1; echo done > /tmp/told")
    (child,) = (await node.fork(parent, hooks=hooks, answered=False)).children
    (below,) = (await node.fork(child, prefix="below")).children
    assert await node.sh(below, "cat /tmp/told") == "done\n"
    (second,) = (await node.fork(parent, hooks=hooks, answered=False)).children
    await node.engine.pause(second.id, deadline=soon())
    await node.engine.resume(second.id, deadline=soon())
    assert await node.sh(second, "cat /tmp/told") == "done\n"


async def test_a_child_that_does_not_answer_ends_alone(node: Node) -> None:
    parent = await node.root()
    usage = node.engine.usage()
    hooks = after('test "$(hostname)" != child-1')
    good, bad = (await node.fork(parent, 2, hooks=hooks, answered=False)).children
    with pytest.raises(MachineGone, match="did not answer to its identity: the postFork hook failed"):
        await node.engine.answered(bad.id, deadline=soon())
    ended = await lost(node)
    assert (ended.machine, ended.owner) == (bad.id, bad.owner)
    assert "the postFork hook failed" in ended.text
    assert await node.sh(good, "hostname") == "child-0\n"
    assert await node.sh(parent, "echo runs") == "runs\n"
    assert {each.id for each in node.engine.machines()} == {parent.id, good.id}
    with pytest.raises(ParentLost):
        await node.fork(bad)
    await node.engine.release(good.id)
    for point in node.engine.points():
        if point.tree is not None:
            await node.engine.drop_point(point.id)
    # No machine is left, only the layer that its parent keeps.
    assert node.engine.usage().reserved_bytes < usage.reserved_bytes + (64 << 20)


async def test_a_child_that_dies_before_it_answers_is_said_to_be_killed(node: Node) -> None:
    parent = await node.root()
    (child,) = (await node.fork(parent, hooks=after("sleep 60"), answered=False)).children
    os.kill(await node.pid(child), signal.SIGKILL)
    ended = await lost(node)
    assert ended.machine == child.id
    assert "killed by signal 9 (SIGKILL)" in ended.text
    assert await node.sh(parent, "echo runs") == "runs\n"


async def test_a_child_released_before_it_answers_leaves_no_record(node: Node) -> None:
    parent = await node.root()
    (child,) = (await node.fork(parent, hooks=after("sleep 60"), answered=False)).children
    await node.engine.release(child.id)
    assert not (node.journal / "machine" / f"{child.id}.json").exists()
    with pytest.raises(MachineGone):
        await node.engine.answered(child.id, deadline=soon())


@pytest.mark.parametrize("when", ["before it answered", "after"])
async def test_the_next_agent_asks_a_child_again_that_was_not_heard(tmp_path: Path, when: str) -> None:
    root = f"forktree-test-unheard-{os.getpid()}"
    async with running_keeper(tmp_path, root) as socket_path:
        async with engine_on(socket_path, tmp_path / "journal") as first:
            parent = await first.root()
            hooks = after("echo told >> /tmp/told; sleep 1") if when == "before it answered" else Hooks()
            forked = await first.fork(parent, 2, hooks=hooks, answered=False)
            if when == "after":
                for child in forked.children:
                    await first.engine.answered(child.id, deadline=soon())
            first.engine.give({child.owner: Owner(f"new/{child.id}") for child in forked.children})
            first.engine.give({forked.point.owner: Owner("new/point")})
            tree = first.tree
        async with engine_on(socket_path, tmp_path / "journal") as second:
            second.tree = tree
            found = {each.id: each for each in second.engine.machines()}
            assert set(found) == {parent.id, *(each.id for each in forked.children)}
            assert Owner("new/point") in {each.owner for each in second.engine.points()}
            for index, child in enumerate(forked.children):
                assert found[child.id].owner == f"new/{child.id}"
                assert await second.sh(child, "hostname") == f"child-{index}\n"
                assert '"unanswered":null' in recorded(second, child)
                told = await second.sh(child, "cat /tmp/told 2>/dev/null || :")
                assert set(told.split()) == ({"told"} if hooks.post else set())
            for machine in second.engine.machines():
                await second.engine.release(machine.id)
