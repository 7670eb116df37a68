"""The journal of a node that is in trouble: full, damaged, or naming what died while no agent ran."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import os
import secrets
import signal
import subprocess
from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from component.keeper_fixtures import group_folders, running_keeper
from component.node import TINY, Node, engine_on, newcomer, order, settings, soon
from component.ram import chain_of, layer_of
from forktree_agent.engine.microvm.records import BatchRecord
from forktree_agent.engine.microvm.resources import BATCH_KIND, Resources
from forktree_agent.journal import Journal, JournalError
from forktree_agent.typed_records import to_journal

pytestmark = pytest.mark.asyncio(loop_scope="session")

PAGE_BYTES = 4096
"""What one record takes on tmpfs."""
NOTED = 6
"""Records of a fork of two, until its parent's says that it keeps the layer."""


@contextmanager
def small_disk(folder: Path) -> Generator[Path]:
    """A tmpfs of 128 pages."""
    folder.mkdir()
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={128 * PAGE_BYTES}", "none", str(folder)], check=True
    )
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@contextmanager
def room_for(disk: Path, records: int) -> Generator[None]:
    """While inside, there is room for so many records and for none more."""
    free = os.statvfs(disk).f_bavail
    ballast = disk / "ballast"
    ballast.write_bytes(bytes((free - records) * PAGE_BYTES))
    try:
        yield
    finally:
        ballast.unlink()


async def everything(node: Node, cgroup_root: str, *, but: Collection[str] = ()) -> object:
    """All that work on a node takes, but for user ids, of which there are few, and for layers that are
    expected."""
    listing = await node.keeper.listing(deadline=soon())
    records = sorted(str(path) for path in node.journal.rglob("*") if path.is_file() and path.stem not in but)
    machines = {entry.machine for entry in listing.machines}
    groups = {folder.name for folder in group_folders(cgroup_root)}
    usage = node.engine.usage()
    expected = sum(layer_of(node, layer).bytes for layer in but)
    left = dataclasses.replace(usage, reserved_bytes=usage.reserved_bytes - expected)
    return machines, set(listing.files).difference(but), records, groups, left


async def test_work_that_cannot_be_written_down_fails_and_gives_back_all_that_it_took(tmp_path: Path) -> None:
    root = f"forktree-test-full-{secrets.token_hex(4)}"
    journal = tmp_path / "journal"
    with small_disk(journal):
        # As many user ids as a fork of two needs beside its parent: one that is lost is missed at once.
        async with (
            running_keeper(tmp_path, root) as socket_path,
            engine_on(socket_path, journal, settings(uid_count=3)) as node,
        ):
            parent = await node.root()
            before = await everything(node, root)
            failed = 0
            while True:
                with room_for(journal, failed):
                    try:
                        forked = await node.fork(parent, 2)
                        break
                    except JournalError as err:
                        assert err.message.startswith("the node's journal cannot be written: record ")
                        assert err.message.endswith(
                            ": No space left on device: free space in the state directory"
                        )
                failed += 1
                assert await everything(node, root) == before
            # The batch, two machines, the instant, its layer; and a machine anew beside its old record.
            assert failed == 6
            assert [await node.sh(each, "echo runs") for each in forked.children] == ["runs\n", "runs\n"]
            for each in forked.children:
                await node.engine.release(each.id)
            before = await everything(node, root)
            with room_for(journal, 2), pytest.raises(JournalError, match="record machine/"):
                await node.engine.branch(
                    forked.point.id, [order("one"), order("two")], node.tree, deadline=soon()
                )
            assert await everything(node, root) == before
            for records in (1, 2, 3):
                with room_for(journal, records), pytest.raises(JournalError):
                    await node.baseline(dataclasses.replace(TINY, env=(("LEFT", "nothing"),)))
                assert await everything(node, root) == before
            await node.engine.release(parent.id)
            await node.engine.drop_point(forked.point.id)
            await node.engine.drop_baseline(parent.baseline)
            files = (await node.keeper.listing(deadline=soon())).files
            # No layer has a user that never was. The root disk stays for whoever is next.
            assert [each for each in files if not each.startswith("disk-")] == []


class Dead(Exception):
    """What everything that an agent does meets once it is dead."""


def dies_after(patched: pytest.MonkeyPatch, changes: int) -> None:
    """Let the journal be changed so many times and no more, and nothing be undone that was begun."""
    left = itertools.count(changes, -1)

    def mortal(change: Callable[..., None]) -> Callable[..., None]:
        def changed(*arguments: object) -> None:
            if next(left) <= 0:
                raise Dead
            change(*arguments)

        return changed

    async def undone(*_: object) -> None:
        raise Dead

    patched.setattr(Journal, "put", mortal(Journal.put))
    patched.setattr(Journal, "remove", mortal(Journal.remove))
    patched.setattr(Resources, "undo", undone)


@pytest.mark.timeout(600)
async def test_an_agent_that_dies_before_any_record_of_a_fork_leaves_all_of_it_or_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = f"forktree-test-mortal-{secrets.token_hex(4)}"
    journal = tmp_path / "journal"
    async with running_keeper(tmp_path, root) as socket_path:
        async with engine_on(socket_path, journal) as first:
            above = await first.root()
            forked = await first.fork(above)
            (parent,) = forked.children
            # What it was forked with is now held by itself alone, so nobody else makes up for a loss of it.
            await first.engine.drop_point(forked.point.id)
            before, chain = await everything(first, root), chain_of(first, parent)
        changes = 0
        for changes in itertools.count():
            async with engine_on(socket_path, journal) as mortal:
                # What was copied of the parent is kept with the parent: its next layer differs from that.
                copied = set(chain_of(mortal, parent)).difference(chain)
                assert len(copied) <= max(0, changes - NOTED)
                assert await everything(mortal, root, but=copied) == before, f"after {changes - 1} records"
                mortal.tree = first.tree
                with monkeypatch.context() as patched:
                    dies_after(patched, changes)
                    try:
                        forked = await mortal.fork(parent, 2)
                    except Dead:
                        continue
            break
        # The batch, two machines, the instant, its layer, the parent's, both machines anew, the batch's end.
        assert changes == 9
        async with engine_on(socket_path, journal) as last:
            children = {each.id for each in forked.children}
            assert {each.id for each in last.engine.machines()} == {above.id, parent.id, *children}
            assert forked.point.id in {each.id for each in last.engine.points()}
            for each in (above, parent, *forked.children):
                assert await last.sh(each, "echo runs") == "runs\n"
                await last.engine.release(each.id)


async def test_a_record_that_makes_no_sense_stops_no_agent_and_its_machine_is_ended(tmp_path: Path) -> None:
    root = f"forktree-test-damaged-{secrets.token_hex(4)}"
    journal = tmp_path / "journal"
    async with running_keeper(tmp_path, root) as socket_path:
        async with engine_on(socket_path, journal) as first:
            kept, damaged = await first.root(name="kept"), await first.root(name="damaged")
            boot = first.keeper.boot_id
        deep = b'{"boot":' * 100_000
        for kind in ("machine", "point", "layer", "batch", "baseline", "canary"):
            (journal / kind).mkdir(exist_ok=True)
            (journal / kind / "deep.json").write_bytes(deep)
            (journal / kind / "other.json").write_text(json.dumps({"boot": boot, "record": {"id": [1]}}))
        (journal / "canary" / "verdict.json").write_text(json.dumps({"boot": boot, "record": {"tried": 1}}))
        (journal / "machine" / f"{damaged.id}.json").write_text(
            json.dumps({"boot": boot, "record": {"id": damaged.id, "uid": "a word"}})
        )
        async with engine_on(socket_path, journal) as second:
            assert [each.id for each in second.engine.machines()] == [kept.id]
            assert await second.sh(kept, "echo runs") == "runs\n"
            machines = {entry.machine for entry in (await second.keeper.listing(deadline=soon())).machines}
            assert machines == {kept.id}
            second.tree = first.tree
            (child,) = (await second.fork(kept)).children
            assert await second.sh(child, "echo runs") == "runs\n"
            for machine in second.engine.machines():
                await second.engine.release(machine.id)


async def test_no_control_group_is_left_of_machines_that_died_while_no_agent_ran(tmp_path: Path) -> None:
    root = f"forktree-test-groups-{secrets.token_hex(4)}"
    journal = tmp_path / "journal"
    async with running_keeper(tmp_path, root) as socket_path:
        async with engine_on(socket_path, journal) as first:
            parent = await first.root()
            (child,) = (await first.fork(parent)).children
            pids = [await first.pid(each) for each in (parent, child)]
            # As an agent leaves them that dies between making the group and starting the machine.
            await first.keeper.limit_cgroup("bake-b-unborn", None, deadline=soon())
            begun = BatchRecord(machines=("b-unborn",), group="bake-b-unborn")
            Journal(journal, first.keeper.boot_id).put(BATCH_KIND, "unborn", to_journal(begun))
            known = {entry.machine for entry in (await first.keeper.listing(deadline=soon())).machines}
            shape = dataclasses.replace(TINY, env=(("NEVER", "done"),))
            baking = asyncio.create_task(first.baseline(shape), name="baking")
            pids.append(await newcomer(first, known))
        # Its keeper is not ours any more, so all that it had begun stays, as after a death.
        await asyncio.wait((baking,))
        assert baking.exception() is not None
        assert len(list((journal / "batch").glob("*.json"))) == 2
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        groups = {folder.name for folder in group_folders(root)} - {root}
        assert {name.partition("-")[0] for name in groups} == {"tree", "bake"}
        async with engine_on(socket_path, journal) as second:
            assert second.engine.machines() == ()
            assert {folder.name for folder in group_folders(root)} == {root}
