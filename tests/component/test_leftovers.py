"""The scan for leftovers finds each kind of thing, and is empty again when that is gone."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

import leftovers
from leftovers import Traces, left_behind


@pytest.fixture
def marker() -> str:
    return f"forktree-test-{secrets.token_hex(4)}"


@contextmanager
def sleeper(
    *prefix: str, env: dict[str, str] | None = None, fds: tuple[int, ...] = ()
) -> Generator[int, None, None]:
    command = [*prefix, sys.executable, "-c", "print(flush=True); input()"]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, env=os.environ | (env or {}), pass_fds=fds, stdin=pipe, stdout=pipe
    ) as process:
        assert process.stdout and process.stdin
        process.stdout.readline()  # It runs, in its namespaces.
        try:
            yield process.pid
        finally:
            process.kill()


def only(**expected: int) -> dict[str, int]:
    return Traces().counts() | expected


def test_a_process_is_found_by_its_environment(marker: str) -> None:
    before = Traces.now()
    with sleeper(env={"FORKTREE_SYSTEM": marker}) as pid:
        left = left_behind(before, [marker])
        assert left.counts() == only(processes=1)
        assert str(pid) in left.lines()[0]
    assert left_behind(before, [marker]).counts() == only()


def test_a_process_that_nothing_marks_is_not_ours(marker: str) -> None:
    before = Traces.now()
    with sleeper():
        assert left_behind(before, [marker]).counts() == only()


def test_a_network_namespace_is_found_by_who_is_in_it(marker: str) -> None:
    before = Traces.now()
    with sleeper("unshare", "--net", env={"FORKTREE_SYSTEM": marker}):
        assert left_behind(before, [marker]).counts() == only(processes=1, netns=1)
    assert left_behind(before, [marker]).counts() == only()


def test_an_empty_control_group_is_found_and_one_in_use_by_others_is_not(marker: str) -> None:
    before = Traces.now()
    hierarchy = next(each for each in (Path("/sys/fs/cgroup/pids"), Path("/sys/fs/cgroup")) if each.is_dir())
    group = hierarchy / marker
    group.mkdir()
    try:
        assert left_behind(before, [marker]).counts() == only(cgroups=1)
        with sleeper() as pid:
            (group / "cgroup.procs").write_text(str(pid))
            assert left_behind(before, []).counts() == only()
            assert left_behind(before, [marker]).counts() == only(processes=1, cgroups=1)
    finally:
        group.rmdir()
    assert left_behind(before, [marker]).counts() == only()


def test_a_memfd_is_found_in_a_process_of_ours_and_by_our_name_in_this_one(marker: str) -> None:
    before = Traces.now()
    with ExitStack() as stack:
        anonymous = os.memfd_create("ram", 0)
        stack.callback(os.close, anonymous)
        assert left_behind(before, [marker]).counts() == only()
        stack.enter_context(sleeper(env={"FORKTREE_SYSTEM": marker}, fds=(anonymous,)))
        assert left_behind(before, [marker]).counts() == only(processes=1, memfds=1)
        named = os.memfd_create("forktree-layer")
        stack.callback(os.close, named)
        assert left_behind(before, [marker]).counts() == only(processes=1, memfds=2)
    assert left_behind(before, [marker]).counts() == only()


def test_a_mount_is_found_by_its_place(marker: str, tmp_path: Path) -> None:
    before = Traces.now()
    place = tmp_path / marker
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "none", str(place)], check=True)
    try:
        assert left_behind(before, [marker]).counts() == only(mounts=1)
    finally:
        subprocess.run(["umount", str(place)], check=True)
    assert left_behind(before, [marker]).counts() == only()


def test_as_a_program_its_exit_code_is_the_verdict(marker: str, tmp_path: Path) -> None:
    scan = [sys.executable, leftovers.__file__]
    before = tmp_path / "before.json"
    before.write_text(subprocess.run([*scan, "before"], check=True, capture_output=True, text=True).stdout)
    after = [*scan, "after", f"--before={before}", f"--marker={marker}"]
    with sleeper(env={"FORKTREE_SYSTEM": marker}):
        found = subprocess.run(after, check=False, capture_output=True, text=True)
        assert (found.returncode, json.loads(found.stdout)["counts"]) == (1, only(processes=1))
    clean = subprocess.run(after, check=False, capture_output=True, text=True)
    assert (clean.returncode, json.loads(clean.stdout)) == (0, {"counts": only(), "found": []})
