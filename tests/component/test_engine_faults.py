"""What goes wrong with machines, and what is left of it: one sentence, and nothing else."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import secrets
import signal
from pathlib import Path

import pytest

from component.keeper_fixtures import running_keeper
from component.node import TINY, Node, engine_on, newcomer, order, running_node, settings, soon
from forktree_agent.engine.contract import (
    AtCapacity,
    BakeFailed,
    Command,
    EngineError,
    ForkFailed,
    Hooks,
    ImageNotFound,
    MemoryLimit,
    NeverReady,
    ParentLost,
    Pin,
    PinMismatch,
    Probe,
    Shape,
    TreeId,
    TreeLimits,
)
from forktree_agent.keeper_client import Keeper

pytestmark = pytest.mark.asyncio(loop_scope="session")


def replaced(**changes: object) -> Shape:
    return dataclasses.replace(TINY, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("shape", "error", "sentence"),
    [
        (replaced(image="builtin:none"), ImageNotFound, "builtin:none is not on this node; it has builtin:"),
        (replaced(command=("/no/such/program",)), BakeFailed, "/no/such/program"),
        (
            replaced(
                probe=Probe(ask=("/bin/sh", "-c", "echo no; exit 3"), period_seconds=0, failure_threshold=2)
            ),
            NeverReady,
            "failed 2 times in a row; the last time: exit code 3, 'no'",
        ),
        (
            replaced(pins=(Pin(name="model", argv=("/bin/echo", "v2"), expect="v1"),)),
            PinMismatch,
            "pin model wants 'v1' but /bin/echo v2 printed 'v2'",
        ),
    ],
    ids=["no-image", "no-command", "never-ready", "pin"],
)
async def test_a_template_that_does_not_become_ready_says_why_and_leaves_nothing(
    node: Node, shape: Shape, error: type[EngineError], sentence: str
) -> None:
    usage = node.engine.usage()
    files = (await node.keeper.listing(deadline=soon())).files
    with pytest.raises(error) as raised:
        await node.baseline(shape)
    assert sentence in str(raised.value)
    assert node.engine.usage() == usage
    listing = await node.keeper.listing(deadline=soon())
    assert listing.files == files
    assert {each.machine for each in listing.machines} == {each.id for each in node.engine.machines()}


async def test_no_room_on_the_node_or_in_the_tree_is_refused_before_anything_starts(tmp_path: Path) -> None:
    async with running_node(tmp_path, settings(capacity_bytes=900 << 20)) as node:
        parent = await node.root()
        usage = node.engine.usage()
        with pytest.raises(AtCapacity, match=r"8 machines of 224 MiB may need 1792 MiB but only \d+ MiB"):
            await node.fork(parent, 8)
        node.tree = TreeLimits(tree=node.tree.tree, memory_bytes=300 << 20)
        with pytest.raises(MemoryLimit, match=r"over its limit of 300 MiB"):
            await node.fork(parent, 1)
        assert node.engine.usage() == usage
        assert len(node.engine.machines()) == 1
        assert await node.sh(parent, "echo unharmed") == "unharmed\n"
        await node.engine.release(parent.id)


async def test_a_killed_machine_is_reported_in_words_and_only_it_is_gone(node: Node) -> None:
    parent = await node.root()
    (child,) = (await node.fork(parent)).children
    os.kill(await node.pid(child), signal.SIGKILL)
    async with asyncio.timeout_at(soon()):
        ended = await anext(aiter(node.engine.exits()))
    assert ended.machine == child.id
    assert ended.owner == child.owner
    assert "killed by signal 9 (SIGKILL)" in ended.text
    assert await node.sh(parent, "echo alive") == "alive\n"
    assert child.id not in {each.id for each in node.engine.machines()}


async def test_one_child_that_dies_at_birth_fails_the_fork_and_ends_its_siblings(node: Node) -> None:
    parent = await node.root()
    before = {each.machine for each in (await node.keeper.listing(deadline=soon())).machines}
    usage = node.engine.usage()
    forking = asyncio.create_task(node.fork(parent, 3), name="forking")
    victim = await newcomer(node, before)
    os.kill(victim, signal.SIGKILL)
    with pytest.raises(ForkFailed, match="killed by signal 9"):
        await forking
    after = {each.machine for each in (await node.keeper.listing(deadline=soon())).machines}
    assert after == before
    assert node.engine.usage() == usage
    assert await node.sh(parent, "echo unharmed") == "unharmed\n"


async def test_a_child_that_dies_while_it_takes_on_its_identity_is_said_to_be_killed(node: Node) -> None:
    parent = await node.root()
    before = await machines(node)
    late = Hooks(post=Command(argv=("/bin/sh", "-c", "sleep 60"), timeout_seconds=90))
    forking = asyncio.create_task(node.fork(parent, hooks=late), name="forking")
    victim = await newcomer(node, before)
    await until_point(node)
    os.kill(victim, signal.SIGKILL)
    with pytest.raises(ForkFailed, match=r"did not come up: QEMU killed by signal 9 \(SIGKILL\)"):
        await forking
    assert await machines(node) == before


async def test_a_machine_that_dies_while_it_boots_is_said_to_be_killed(node: Node) -> None:
    before = await machines(node)
    never = replaced(probe=Probe(ask=("/bin/false",), period_seconds=1, failure_threshold=1000))
    baking = asyncio.create_task(node.baseline(never), name="baking")
    victim = await newcomer(node, before)
    (name,) = await machines(node) - before
    async with asyncio.timeout_at(soon()):
        while not node.keeper.log_tail(name).strip():  # Its console: QEMU runs and is spoken to.
            await node.keeper.listing(deadline=soon())
    os.kill(victim, signal.SIGKILL)
    with pytest.raises(BakeFailed, match=r"did not boot: QEMU killed by signal 9 \(SIGKILL\); it said: "):
        await baking
    assert await machines(node) == before


async def test_a_parent_that_dies_while_it_is_forked_fails_the_fork(node: Node) -> None:
    parent = await node.root()
    before = {each.machine for each in (await node.keeper.listing(deadline=soon())).machines}
    pid = await node.pid(parent)
    forking = asyncio.create_task(node.fork(parent, 2), name="forking")
    await newcomer(node, before)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ParentLost):
        await forking
    async with asyncio.timeout_at(soon()):
        assert (await anext(aiter(node.engine.exits()))).machine == parent.id
    after = {each.machine for each in (await node.keeper.listing(deadline=soon())).machines}
    assert after == before - {parent.id}


async def test_a_parent_released_while_it_is_forked_takes_the_fork_with_it(node: Node) -> None:
    parent = await node.root()
    before = {each.machine for each in (await node.keeper.listing(deadline=soon())).machines}
    forking = asyncio.create_task(node.fork(parent, 2), name="forking")
    await newcomer(node, before)
    await node.engine.release(parent.id)
    with pytest.raises(ParentLost):
        await forking
    after = {each.machine for each in (await node.keeper.listing(deadline=soon())).machines}
    assert after == before - {parent.id}


async def test_a_cancelled_fork_leaves_no_child_and_a_running_parent(node: Node) -> None:
    parent = await node.root()
    before = {each.machine for each in (await node.keeper.listing(deadline=soon())).machines}
    forking = asyncio.create_task(node.fork(parent, 2), name="forking")
    await newcomer(node, before)
    forking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await forking
    assert {each.machine for each in (await node.keeper.listing(deadline=soon())).machines} == before
    assert await node.sh(parent, "echo runs") == "runs\n"


async def test_a_fork_that_is_cancelled_again_while_it_is_undone_leaves_no_record(node: Node) -> None:
    parent = await node.root()
    before = await machines(node)
    forking = asyncio.create_task(node.fork(parent, 2), name="forking")
    await newcomer(node, before)
    while not forking.done():
        forking.cancel()
        await asyncio.sleep(0)
    assert forking.cancelled()
    assert await machines(node) == before
    assert list((node.journal / "batch").iterdir()) == []


async def test_a_new_agent_adopts_machines_instants_and_baselines_and_goes_on(tmp_path: Path) -> None:
    root = f"forktree-test-adopt-{os.getpid()}"
    async with running_keeper(tmp_path, root) as socket_path:
        async with engine_on(socket_path, tmp_path / "journal") as first:
            parent = await first.root()
            await first.sh(parent, "echo kept > /tmp/file")
            forked = await first.fork(parent)
            (child,) = forked.children
            dead = (await first.fork(parent)).children[0]
            pid = await first.pid(dead)
            tree, usage = first.tree, first.engine.usage()
        os.kill(pid, signal.SIGKILL)
        async with engine_on(socket_path, tmp_path / "journal") as second:
            second.tree = tree
            engine = second.engine
            assert {each.id for each in engine.machines()} == {parent.id, child.id}
            assert {each.generation for each in engine.machines()} == {parent.generation, child.generation}
            async with asyncio.timeout_at(soon()):
                assert (await anext(aiter(engine.exits()))).machine == dead.id
            assert await second.sh(child, "cat /tmp/file") == "kept\n"
            (grandchild,) = (await second.fork(child)).children
            assert await second.sh(grandchild, "cat /tmp/file") == "kept\n"
            again = await engine.branch(forked.point.id, [order("again")], tree, deadline=soon())
            assert await second.sh(again.children[0], "cat /tmp/file") == "kept\n"
            assert engine.usage().reserved_bytes > usage.reserved_bytes
            for machine in engine.machines():
                await engine.release(machine.id)


async def machines(node: Node) -> set[str]:
    return {each.machine for each in (await node.keeper.listing(deadline=soon())).machines}


async def until_point(node: Node) -> None:
    """Until the fork under way has frozen its parent: from then on its children run."""
    held = node.engine.points()
    points = node.journal / "point"
    async with asyncio.timeout_at(soon()):
        while len(list(points.glob("*.json"))) == len(held):
            await node.keeper.listing(deadline=soon())


async def test_a_parent_whose_agent_died_in_the_midst_of_a_freeze_runs_again(tmp_path: Path) -> None:
    root = f"forktree-test-frozen-{os.getpid()}"
    async with running_keeper(tmp_path, root) as socket_path:
        async with engine_on(socket_path, tmp_path / "journal") as first:
            parent = await first.root()
            ends = await first.keeper.lend(parent.id, deadline=soon())
            ends["monitor"].sendall(b'{"execute": "stop", "id": "nobody"}\n')  # And nobody says `cont`.
            for end in ends.values():
                end.close()
        async with engine_on(socket_path, tmp_path / "journal") as second:
            assert await second.sh(parent, "echo runs") == "runs\n"
            await second.engine.release(parent.id)


async def test_machines_of_many_trees_that_end_together_give_back_all_they_held(node: Node) -> None:
    baseline = await node.baseline()
    usage, points = node.engine.usage(), node.engine.points()
    trees = [TreeLimits(tree=TreeId(secrets.token_hex(4))) for _ in range(6)]
    roots = [
        (await node.engine.branch(baseline.point, [order("root")], tree, deadline=soon())).children[0]
        for tree in trees
    ]
    await asyncio.gather(*(node.engine.release(root.id) for root in roots))
    assert (node.engine.usage(), node.engine.points()) == (usage, points)
    assert {root.id for root in roots}.isdisjoint(machine.id for machine in node.engine.machines())


async def test_a_release_that_failed_can_be_asked_for_again(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    await node.baseline()
    usage = node.engine.usage()
    root = await node.root()

    async def late(*_: object, **__: object) -> None:
        raise TimeoutError

    with monkeypatch.context() as patched:
        patched.setattr(Keeper, "kill", late)
        with pytest.raises(EngineError, match="did not answer in time"):
            await node.engine.release(root.id)
    assert root.id in {machine.id for machine in node.engine.machines()}
    await node.engine.release(root.id)
    assert root.id not in {machine.id for machine in node.engine.machines()}
    assert node.engine.usage() == usage
