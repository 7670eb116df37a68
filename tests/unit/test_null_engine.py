"""The engine without machines keeps the promises that control builds on, and claims nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from forktree.models import ForkNodeStatus, Level, Mode
from forktree_agent.control.node_status import NodeFacts, node_status
from forktree_agent.engine.contract import (
    AtCapacity,
    BakeFailed,
    ChildOrder,
    Command,
    CommandRefused,
    Engine,
    HookFailed,
    Hooks,
    Machine,
    MemoryLimit,
    Owner,
    ParentLost,
    Shape,
    TreeId,
    TreeLimits,
)
from forktree_agent.engine.null.engine import NullEngine
from forktree_agent.journal import Journal, JournalError, Json
from unit.control_facts import NOW

MIB = 1 << 20
SHAPE = Shape(image="builtin:tiny", vcpus=1, memory_bytes=128 * MIB, overlay_bytes=MIB)
TREE = TreeLimits(tree=TreeId("tree"))
NEVER = 0.0
"""A deadline: nothing here waits."""


def engine_in(folder: Path, *, capacity_bytes: int = 1024 * MIB) -> NullEngine:
    """As a new agent finds the node; call `adopt` first."""
    return NullEngine(Journal.opened(folder / "journal", "boot"), capacity_bytes=capacity_bytes)


def orders(*names: str) -> list[ChildOrder]:
    return [ChildOrder(owner=Owner(name), hostname=name) for name in names]


async def rooted(engine: NullEngine, name: str = "root") -> Machine:
    await engine.adopt(deadline=NEVER)
    baseline = await engine.bake(SHAPE, deadline=NEVER)
    born = await engine.branch(baseline.point, orders(name), TREE, deadline=NEVER)
    return born.children[0]


async def test_what_it_made_is_there_for_the_next_agent(tmp_path: Path) -> None:
    engine: Engine = engine_in(tmp_path)
    root = await rooted(engine_in(tmp_path))
    await engine.adopt(deadline=NEVER)
    forked = await engine.fork(root.id, Owner("fork"), orders("a", "b"), TREE, deadline=NEVER)
    await engine.pause(forked.children[0].id, deadline=NEVER)
    await engine.release(forked.children[1].id)

    following = engine_in(tmp_path)
    adoption = await following.adopt(deadline=NEVER)
    assert {(each.owner, each.paused) for each in adoption.machines} == {("root", False), ("a", True)}
    assert {each.owner for each in adoption.points if each.tree is not None} == {"fork"}
    assert adoption.baselines == (await following.bake(SHAPE, deadline=NEVER),)
    assert following.usage() == engine.usage()
    assert following.usage().reserved_bytes == 2 * SHAPE.memory_bytes


async def test_a_fork_that_a_crash_cut_short_leaves_nothing(tmp_path: Path) -> None:
    engine = engine_in(tmp_path)
    root = await rooted(engine)

    class Crash(BaseException):
        pass

    class Crashing(Journal):
        puts = 0

        def put(self, kind: str, key: str, record: Mapping[str, Json]) -> None:
            type(self).puts += 1
            if self.puts == 3:  # What is begun, the first child: and no more.
                raise Crash
            super().put(kind, key, record)

        def remove(self, kind: str, key: str) -> None:
            """A dead agent takes nothing back."""

    dying = NullEngine(Crashing.opened(tmp_path / "journal", "boot"), capacity_bytes=1024 * MIB)
    await dying.adopt(deadline=NEVER)
    with pytest.raises(Crash):
        await dying.fork(root.id, Owner("fork"), orders("a", "b"), TREE, deadline=NEVER)

    adoption = await engine_in(tmp_path).adopt(deadline=NEVER)
    assert [each.owner for each in adoption.machines] == ["root"]
    assert [each for each in adoption.points if each.tree is not None] == []


async def test_a_fork_that_cannot_be_written_down_leaves_nothing(tmp_path: Path) -> None:
    engine = engine_in(tmp_path)
    root = await rooted(engine)
    blocker = tmp_path / "journal" / NullEngine.POINT
    for each in blocker.iterdir():
        each.unlink()
    blocker.rmdir()
    blocker.touch()  # No record of an instant can be made where a file is.
    with pytest.raises(JournalError):
        await engine.fork(root.id, Owner("fork"), orders("a"), TREE, deadline=NEVER)
    blocker.unlink()
    assert [each.owner for each in engine.machines()] == ["root"]
    assert [each.owner for each in (await engine_in(tmp_path).adopt(deadline=NEVER)).machines] == ["root"]


async def test_what_does_not_fit_is_refused_as_a_whole(tmp_path: Path) -> None:
    engine = engine_in(tmp_path, capacity_bytes=3 * SHAPE.memory_bytes)
    root = await rooted(engine)
    with pytest.raises(AtCapacity):
        await engine.fork(root.id, Owner("fork"), orders("a", "b", "c"), TREE, deadline=NEVER)
    narrow = TreeLimits(tree=TREE.tree, memory_bytes=SHAPE.memory_bytes)
    with pytest.raises(MemoryLimit):
        await engine.fork(root.id, Owner("fork"), orders("a"), narrow, deadline=NEVER)
    assert [each.owner for each in engine.machines()] == ["root"]
    with pytest.raises(ParentLost):
        await engine.release(root.id)
        await engine.fork(root.id, Owner("fork"), orders("a"), TREE, deadline=NEVER)


async def test_one_is_found_by_its_owner_until_it_ends_and_after_a_restart(tmp_path: Path) -> None:
    engine = engine_in(tmp_path)
    root = await rooted(engine)
    forked = await engine.fork(root.id, Owner("fork"), orders("a"), TREE, deadline=NEVER)
    (child,) = forked.children
    later = engine_in(tmp_path)
    await later.adopt(deadline=NEVER)
    for each in (engine, later):
        assert each.machine_of(child.owner) == child
        assert each.point_of(Owner("fork")) == forked.point
        assert each.holds(forked.point.id)
        assert (each.machine_of(Owner("b")), each.point_of(Owner("b"))) == (None, None)
    await later.release(child.id)
    await later.drop_point(forked.point.id)
    assert later.machine_of(child.owner) is None
    assert later.point_of(Owner("fork")) is None
    assert not later.holds(forked.point.id)


async def test_what_is_given_to_another_is_found_by_that_one_alone_and_ends_as_its_own(
    tmp_path: Path,
) -> None:
    engine = engine_in(tmp_path)
    root = await rooted(engine)
    forked = await engine.fork(root.id, Owner("early"), orders("a"), TREE, deadline=NEVER)
    (child,) = forked.children
    engine.give({Owner("early"): Owner("late"), child.owner: Owner("late/a")})
    later = engine_in(tmp_path)
    await later.adopt(deadline=NEVER)
    for each in (engine, later):
        machine, point = each.machine_of(Owner("late/a")), each.point_of(Owner("late"))
        assert machine is not None
        assert point is not None
        assert (machine.id, point.id) == (child.id, forked.point.id)
        assert (each.machine_of(child.owner), each.point_of(Owner("early"))) == (None, None)
    await later.release(child.id)
    await later.drop_point(forked.point.id)
    assert (later.machine_of(Owner("late/a")), later.point_of(Owner("late"))) == (None, None)


async def test_it_claims_no_continued_state_and_runs_nothing(tmp_path: Path) -> None:
    engine = engine_in(tmp_path)
    root = await rooted(engine)
    assert (root.mode, root.level) == (Mode.CLEAN, Level.NONE)
    with pytest.raises(CommandRefused):
        await engine.exec(root.id, Command(argv=("true",)), deadline=NEVER)
    hooks = Hooks(post=Command(argv=("true",)))
    with pytest.raises(HookFailed):
        await engine.fork(root.id, Owner("fork"), orders("a"), TREE, hooks=hooks, deadline=NEVER)
    with pytest.raises(BakeFailed):
        await engine.bake(
            Shape(image="i", vcpus=1, memory_bytes=MIB, overlay_bytes=0, command=("serve",)), deadline=NEVER
        )


async def test_its_node_says_what_it_is(tmp_path: Path) -> None:
    engine = engine_in(tmp_path)
    facts = NodeFacts(
        capability=await engine.probe(deadline=NEVER),
        probed_at=NOW,
        boot_id="boot",
        version="1",
        endpoint="https://node:1",
        ca_bundle="",
    )
    status = node_status(facts, engine.usage(), ForkNodeStatus(), NOW)
    assert (status.engine, status.accelerator, status.ready) == ("null", None, True)
