"""What the keeper holds beside processes: layers' files, control groups, and room for both."""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import os
import shutil
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from component.keeper_fixtures import (
    CGROUP_MOUNT,
    HIERARCHIES,
    KeeperProcess,
    keeper_process,
    next_exit,
    soon,
    start_machine,
)
from forktree_agent.keeper_client import Code, Keeper, KeeperError

SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK
SLEEP = ["/bin/sleep", "1000"]
version_1 = pytest.mark.skipif(
    not (CGROUP_MOUNT / "memory").is_dir(), reason="needs control groups version 1"
)


@pytest.fixture
async def process(tmp_path: Path) -> AsyncGenerator[KeeperProcess]:
    async with keeper_process(tmp_path / "state", f"ft-test-{os.getpid()}") as process:
        yield process


@pytest.fixture
async def keeper(process: KeeperProcess) -> AsyncGenerator[Keeper]:
    async with Keeper.connected(process.socket_path, deadline=soon()) as keeper:
        yield keeper


def memory_file(content: bytes) -> int:
    file = os.memfd_create("layer", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(file, content)
    return file


async def test_a_sealed_layer_is_held_and_lent_as_it_was(keeper: Keeper, process: KeeperProcess) -> None:
    before = process.descriptors()
    layer = memory_file(b"p" * 8192)
    fcntl.fcntl(layer, fcntl.F_ADD_SEALS, SEALS)
    await keeper.hold("layer", layer, deadline=soon())
    os.close(layer)
    for _ in range(2):
        lent = await keeper.lend_file("layer", deadline=soon())
        assert fcntl.fcntl(lent, fcntl.F_GET_SEALS) == SEALS
        assert not os.get_inheritable(lent)
        with mmap.mmap(lent, 8192, flags=mmap.MAP_PRIVATE) as pages:
            pages[:1] = b"x"
        assert os.pread(lent, 1, 0) == b"p"
        with pytest.raises(PermissionError):
            os.pwrite(lent, b"x", 0)
        os.close(lent)
    assert process.descriptors() == before + 1
    await keeper.drop("layer", "never held", deadline=soon())
    await keeper.drop("layer", deadline=soon())
    with pytest.raises(KeeperError) as raised:
        await keeper.lend_file("layer", deadline=soon())
    assert raised.value.code is Code.NO_SUCH_FILE
    assert process.descriptors() == before


async def test_holding_the_same_file_again_changes_nothing_and_another_is_refused(keeper: Keeper) -> None:
    first, second = memory_file(b"first"), memory_file(b"second")
    await keeper.hold("name", first, deadline=soon())
    await keeper.hold("name", first, deadline=soon())
    with pytest.raises(KeeperError) as raised:
        await keeper.hold("name", second, deadline=soon())
    assert raised.value.code is Code.FILE_EXISTS
    with pytest.raises(KeeperError) as raised:
        await keeper.hold("../name", first, deadline=soon())
    assert raised.value.code is Code.BAD_REQUEST
    lent = await keeper.lend_file("name", deadline=soon())
    assert os.pread(lent, 10, 0) == b"first"
    for file in (first, second, lent):
        os.close(file)


async def test_a_long_listing_is_whole(keeper: Keeper) -> None:
    file = memory_file(b"")
    names = [f"{'layer' * 20}-{number:04}" for number in range(900)]
    await asyncio.gather(*(keeper.hold(name, file, deadline=soon()) for name in names))
    assert (await keeper.listing(deadline=soon())).files == tuple(names)
    await keeper.drop(*names, deadline=soon())
    assert (await keeper.listing(deadline=soon())).files == ()
    os.close(file)


@pytest.mark.skipif(shutil.which("prlimit") is None, reason="needs prlimit")
async def test_it_refuses_before_descriptors_run_out_and_goes_on(tmp_path: Path) -> None:
    prefix = ["prlimit", "--nofile=600:600"]
    async with (
        keeper_process(tmp_path, f"ft-test-{os.getpid()}", prefix=prefix) as process,
        Keeper.connected(process.socket_path, deadline=soon()) as keeper,
    ):
        await start_machine(keeper, "m", SLEEP)
        file = memory_file(b"")
        held = 0
        with pytest.raises(KeeperError) as raised:
            for held in range(600):
                await keeper.hold(f"f{held}", file, deadline=soon())
        assert raised.value.code is Code.DESCRIPTORS_EXHAUSTED
        assert held > 50
        with pytest.raises(KeeperError) as raised:
            await start_machine(keeper, "n", SLEEP, files=[file] * 250)
        assert raised.value.code is Code.DESCRIPTORS_EXHAUSTED
        # All else goes on, and so does this once there is room.
        await keeper.kill("m", deadline=soon())
        await keeper.drop(*(f"f{number}" for number in range(held)), deadline=soon())
        await start_machine(keeper, "n", SLEEP, files=[file] * 8)
        os.close(file)


@version_1
async def test_a_machine_is_in_its_group_in_every_hierarchy(keeper: Keeper, process: KeeperProcess) -> None:
    started = await start_machine(keeper, "m", SLEEP, cgroup="tree")
    groups = Path(f"/proc/{started.pid}/cgroup").read_text().splitlines()
    for controller in ("memory", "cpu", "pids"):
        assert any(line.endswith(f":{controller}:/{process.cgroup_root}/tree") for line in groups)
    outside = await start_machine(keeper, "n", SLEEP)
    assert process.cgroup_root not in Path(f"/proc/{outside.pid}/cgroup").read_text()


async def test_a_tree_over_its_memory_limit_loses_a_machine_and_others_do_not(keeper: Keeper) -> None:
    await keeper.limit_cgroup("small", 30 << 20, deadline=soon())
    await keeper.limit_cgroup("large", 1 << 30, deadline=soon())
    await keeper.limit_cgroup("free", 30 << 20, deadline=soon())
    await keeper.limit_cgroup("free", None, deadline=soon())
    eat = ["/bin/sh", "-c", "head -c 80000000 /dev/zero | tail -c 80000000 | wc -c"]
    for group in ("large", "free"):
        await start_machine(keeper, group, eat, cgroup=group)
        await next_exit(keeper)
        assert keeper.log_tail(group) == "80000000\n"
    eat_itself = ["/bin/bash", "-c", "exec tail -c 80000000 < <(head -c 80000000 /dev/zero)"]
    await start_machine(keeper, "small", eat_itself, cgroup="small")
    assert (await next_exit(keeper)).text == "killed by signal 9 (SIGKILL)"


async def test_a_group_is_dropped_when_it_is_empty_and_not_before(
    keeper: Keeper, process: KeeperProcess
) -> None:
    await start_machine(keeper, "m", SLEEP, cgroup="tree")
    with pytest.raises(KeeperError) as raised:
        await keeper.drop_cgroup("tree", deadline=soon())
    assert raised.value.code is Code.CGROUP_BUSY
    await keeper.kill("m", deadline=soon())
    await keeper.drop_cgroup("tree", deadline=soon())
    await keeper.drop_cgroup("tree", deadline=soon())
    assert not any((CGROUP_MOUNT / each / process.cgroup_root / "tree").exists() for each in HIERARCHIES)


async def test_a_group_can_be_dropped_as_soon_as_its_last_machine_is_reaped(keeper: Keeper) -> None:
    for number in range(100):
        await start_machine(keeper, "m", SLEEP, cgroup=f"tree{number}")
        await keeper.kill("m", deadline=soon())
        await keeper.drop_cgroup(f"tree{number}", deadline=soon())
        await keeper.forget("m", deadline=soon())
