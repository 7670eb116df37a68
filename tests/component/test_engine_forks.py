"""What a fork is: children that go on from the parent's instant, a parent that does not notice."""

from __future__ import annotations

import asyncio
import dataclasses
import time

import pytest

from component.node import TINY, Node, all_sh, order, owner, soon
from forktree.models.reasons import Level, Mode
from forktree_agent.engine.contract import MachineGone, ParentLost, PointLost

pytestmark = pytest.mark.asyncio(loop_scope="session")

WAITING_PROGRAM = "mkfifo go out; (n=41; read x < go; echo $((n + 1)) > out) >/dev/null 2>&1 &"


async def test_child_resumes_a_waiting_program_and_the_parent_keeps_its_own(node: Node) -> None:
    parent = await node.root()
    await node.sh(parent, f"cd /tmp; {WAITING_PROGRAM}")
    (child,) = (await node.fork(parent)).children
    for machine in (child, parent):  # A program that both shared would answer once and then hang.
        assert await node.sh(machine, "cd /tmp; echo > go; cat out") == "42\n"


async def test_commands_see_the_templates_environment_and_their_own_identity(node: Node) -> None:
    parent = await node.root(dataclasses.replace(TINY, env=(("MODE", "search"),)))
    (child,) = (await node.fork(parent, prefix="mine")).children
    assert await node.sh(parent, "echo $MODE $FORKTREE_SESSION") == "search root\n"
    assert await node.sh(child, "echo $MODE $FORKTREE_SESSION") == "search mine-0\n"
    assert await node.sh(child, "echo $FORKTREE_GENERATION") == f"{child.generation}\n"


async def test_guests_keep_the_hosts_time_however_busy_it_is(node: Node) -> None:
    parent = await node.root()
    (child,) = (await node.fork(parent)).children
    for machine in (parent, child):
        clock = await node.sh(machine, "cat /sys/devices/system/clocksource/clocksource0/current_clocksource")
        assert clock == "tsc\n"
        began = time.monotonic()
        await node.sh(machine, "sleep 3")
        assert time.monotonic() - began > 2.99  # A guest that counts interrupts is early as often as late.
        assert abs(int(await node.sh(machine, "date +%s")) - time.time()) < 5


async def test_siblings_share_no_files_and_no_identity(node: Node) -> None:
    parent = await node.root()
    await node.sh(parent, "echo before > /tmp/file")
    children = (await node.fork(parent, 3)).children
    for number, child in enumerate(children):
        await node.sh(child, f"echo {number} >> /tmp/file; touch /root-{number}")
    seen = await all_sh(
        node, [parent, *children], "cat /tmp/file | tr '\\n' ' '; ls -d /root-* 2>/dev/null || :"
    )
    assert seen == ["before ", "before 0 /root-0\n", "before 1 /root-1\n", "before 2 /root-2\n"]
    for script in (
        "head -c 16 /dev/urandom | od -An -tx1",
        "hostname",
        "grep GENERATION /run/forktree/identity",
    ):
        said = await all_sh(node, [parent, *children], script)
        assert len(set(said)) == 4, (script, said)


async def test_a_fork_says_what_it_is_and_measures_its_own_clocks(node: Node) -> None:
    parent = await node.root()
    forked = await node.fork(parent, 2)
    assert {child.mode for child in forked.children} == {Mode.FORK}
    assert {child.level for child in forked.children} == {Level.MEMORY}
    assert {child.baseline for child in forked.children} == {parent.baseline}
    assert len({parent.generation, *(child.generation for child in forked.children)}) == 3
    clocks = forked.clocks
    assert clocks.pause_ms is not None
    assert 0 < clocks.pause_ms < clocks.fork_ms < (clocks.ready_ms or 0)
    assert forked.point.bytes > 0


async def test_an_earlier_instant_is_forked_again_after_its_parent_went_on_and_after_it_ended(
    node: Node,
) -> None:
    parent = await node.root()
    await node.sh(parent, "echo then > /tmp/when")
    point = (await node.fork(parent, 0)).point
    await node.sh(parent, "echo now > /tmp/when")
    again = await node.engine.branch(point.id, [order("again")], node.tree, deadline=soon())
    assert again.clocks.pause_ms is None
    assert await node.sh(again.children[0], "cat /tmp/when") == "then\n"
    await node.engine.release(parent.id)
    last = await node.engine.branch(point.id, [order("last")], node.tree, deadline=soon())
    assert await node.sh(last.children[0], "cat /tmp/when") == "then\n"


async def test_a_dropped_instant_can_not_be_forked_but_its_children_can(node: Node) -> None:
    parent = await node.root()
    await node.sh(parent, "echo kept > /tmp/file")
    forked = await node.fork(parent)
    (child,) = forked.children
    await node.engine.drop_point(forked.point.id)
    await node.engine.release(parent.id)
    with pytest.raises(PointLost):
        await node.engine.branch(forked.point.id, [order("late")], node.tree, deadline=soon())
    (grandchild,) = (await node.fork(child)).children
    assert await node.sh(grandchild, "cat /tmp/file") == "kept\n"


async def test_a_parent_is_forked_by_several_at_once(node: Node) -> None:
    parent = await node.root()
    await node.sh(parent, "echo shared > /tmp/file")
    results = await asyncio.gather(*(node.fork(parent, 2, prefix=f"fork{i}") for i in range(3)))
    children = [child for forked in results for child in forked.children]
    assert await all_sh(node, children, "cat /tmp/file") == ["shared\n"] * 6
    assert await node.sh(parent, "cat /tmp/file") == "shared\n"


async def test_a_command_under_way_in_the_parent_answers_in_the_parent_alone(node: Node) -> None:
    parent = await node.root()
    await node.sh(parent, "mkfifo /tmp/begun /tmp/go")
    script = "echo begun > /tmp/begun; cat /tmp/go; echo done"
    under_way = asyncio.create_task(node.sh(parent, script), name="under-way")
    assert await node.sh(parent, "cat /tmp/begun") == "begun\n"
    (child,) = (await node.fork(parent)).children
    assert await node.sh(child, "echo child > /tmp/go; echo asked") == "asked\n"
    assert not under_way.done()
    await node.sh(parent, "echo parent > /tmp/go")
    assert await under_way == "parent\ndone\n"


async def test_what_is_gone_is_refused_by_name(node: Node) -> None:
    parent = await node.root()
    await node.engine.release(parent.id)
    with pytest.raises(MachineGone, match=parent.id):
        await node.run(parent, "true")
    with pytest.raises(ParentLost, match=parent.id):
        await node.engine.fork(parent.id, owner(), [order("late")], node.tree, deadline=soon())
    await node.engine.release(parent.id)  # Again: nothing to do, and no error.


async def test_the_clock_is_now_however_old_the_instant_is(node: Node) -> None:
    parent = await node.root()
    # An instant whose clock stands an hour back is what one is that was frozen an hour ago.
    await node.sh(parent, "date -s @$(($(date +%s) - 3600)) > /dev/null; date +%s > /tmp/when")
    forked = await node.fork(parent)
    for machine in (
        forked.children[0],
        (await node.engine.branch(forked.point.id, [order("late")], node.tree, deadline=soon())).children[0],
    ):
        now, then = (int(line) for line in (await node.sh(machine, "date +%s; cat /tmp/when")).split())
        assert abs(now - time.time()) < 2
        assert now - then > 3500


async def test_the_time_since_boot_goes_on_from_the_instant_however_old_it_is(node: Node) -> None:
    parent = await node.root()
    point = (await node.fork(parent, 0)).point
    then = float(await node.sh(parent, "cut -d' ' -f1 /proc/uptime"))
    # Longer than it takes to answer, also where that takes long.
    await node.sh(parent, "until [ $(cut -d. -f1 /proc/uptime) -gt " + f"{then + 20:.0f} ]; do sleep 1; done")
    late = await node.engine.branch(point.id, [order("late")], node.tree, deadline=soon())
    assert float(await node.sh(late.children[0], "cut -d' ' -f1 /proc/uptime")) < then + 20
