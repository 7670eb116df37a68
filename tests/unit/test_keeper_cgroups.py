"""Where control groups are and what is written into them, on a tree of plain folders."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from forktree_keeper.cgroups import CgroupsUnavailable, ControlGroups
from forktree_keeper.protocol import Code, Refusal


def version_1(mount: Path, *controllers: str) -> ControlGroups:
    for controller in controllers:
        (mount / controller / "forktree").mkdir(parents=True)
    return ControlGroups.found(mount, "forktree")


def version_2(mount: Path, controllers: str = "cpuset cpu io memory pids") -> ControlGroups:
    for group in (mount, mount / "forktree"):
        group.mkdir(exist_ok=True)
        (group / "cgroup.controllers").write_text(f"{controllers}\n")
        os.mkfifo(group / "cgroup.subtree_control")
    return ControlGroups.found(mount, "forktree")


def test_version_1_has_a_folder_in_each_hierarchy_that_is_there(tmp_path: Path) -> None:
    groups = version_1(tmp_path, "memory", "pids", "blkio")
    groups.make("tree")
    groups.make("tree")
    assert groups.entrances("tree") == (
        tmp_path / "memory/forktree/tree/cgroup.procs",
        tmp_path / "pids/forktree/tree/cgroup.procs",
    )
    assert not (tmp_path / "blkio/forktree/tree").exists()
    groups.drop("tree")
    groups.drop("tree")
    assert not any(entrance.parent.exists() for entrance in groups.entrances("tree"))


def test_version_2_has_one_folder(tmp_path: Path) -> None:
    groups = version_2(tmp_path)
    groups.make("tree")
    assert groups.entrances("tree") == (tmp_path / "forktree/tree/cgroup.procs",)
    groups.drop("tree")
    assert not (tmp_path / "forktree/tree").exists()


@pytest.mark.parametrize("root", ["", ".", "..", "a/b", "/etc", ".hidden"])
def test_a_root_group_that_is_no_plain_name_is_refused(tmp_path: Path, root: str) -> None:
    (tmp_path / "memory").mkdir()
    with pytest.raises(CgroupsUnavailable):
        ControlGroups.found(tmp_path, root)


def test_a_host_without_a_memory_controller_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pids").mkdir()
    with pytest.raises(CgroupsUnavailable):
        ControlGroups.found(tmp_path, "forktree")


@pytest.mark.parametrize(
    ("version", "file", "unlimited"), [(1, "memory.limit_in_bytes", "-1"), (2, "memory.max", "max")]
)
def test_a_limit_is_written_where_each_version_has_it(
    tmp_path: Path, version: int, file: str, unlimited: str
) -> None:
    groups = version_1(tmp_path, "memory") if version == 1 else version_2(tmp_path)
    groups.make("tree")
    limit = groups.entrances("tree")[0].parent / file
    with pytest.raises(Refusal, match="No such file") as raised:
        groups.limit_memory("tree", 1)
    assert raised.value.code is Code.CGROUP_FAILED
    limit.write_text("9223372036854771712\n")
    groups.limit_memory("tree", 1 << 30)
    assert limit.read_text() == str(1 << 30)
    groups.limit_memory("tree", None)
    assert limit.read_text() == unlimited


def test_version_2_hands_down_only_controllers_that_are_there(tmp_path: Path) -> None:
    written: list[bytes] = []
    groups = version_2(tmp_path, "cpuset memory io pids")
    pipes = [
        os.open(group / "cgroup.subtree_control", os.O_RDWR) for group in (tmp_path, tmp_path / "forktree")
    ]
    with groups.owned():
        written = [os.read(pipe, 100) for pipe in pipes]
    for pipe in pipes:
        os.close(pipe)
    assert written == [b"+memory+pids"] * 2


def test_two_keepers_cannot_own_one_root_group(tmp_path: Path) -> None:
    groups = version_1(tmp_path, "memory", "pids")
    with groups.owned():
        with pytest.raises(CgroupsUnavailable, match="another keeper"), groups.owned():
            pass
        assert (tmp_path / "memory/forktree").exists()  # The loser removed nothing of the owner's.
    assert not (tmp_path / "memory/forktree").exists()
    assert not (tmp_path / "pids/forktree").exists()


def test_who_takes_over_ends_what_an_earlier_keeper_left_and_nobody_else(tmp_path: Path) -> None:
    groups = version_1(tmp_path, "memory")
    leftover, stranger = (subprocess.Popen(["/bin/sleep", "1000"]) for _ in range(2))
    groups.make("tree")
    members = tmp_path / "memory/forktree/tree/cgroup.procs"
    (tmp_path / "memory/forktree/cgroup.procs").write_text(f"{stranger.pid}\n")
    members.write_text(f"0\n{leftover.pid}\n")

    def reaped(*_: object) -> None:
        members.write_text("0\n")

    before = signal.signal(signal.SIGCHLD, reaped)  # A plain file does not notice a process's end by itself.
    try:
        with groups.owned():
            assert leftover.wait(timeout=10) == -signal.SIGKILL
            assert stranger.poll() is None
    finally:
        signal.signal(signal.SIGCHLD, before)
        stranger.kill()
        stranger.wait()
