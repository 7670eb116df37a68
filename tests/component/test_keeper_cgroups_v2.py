"""Control groups version 2 as the kernel has them, also where version 1 rules and 2 has no controllers."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from component.keeper_fixtures import CGROUP_MOUNT, keeper_process, soon, start_machine
from forktree_agent.keeper_client import Code, Keeper, KeeperError

MOUNT = next(
    (each for each in (CGROUP_MOUNT, CGROUP_MOUNT / "unified") if (each / "cgroup.procs").exists()), None
)
pytestmark = pytest.mark.skipif(
    MOUNT is None or shutil.which("unshare") is None, reason="needs control groups version 2 and unshare"
)
SLEEP = ["/bin/sleep", "1000"]


async def test_a_keeper_on_version_2_starts_confines_and_clears_up(tmp_path: Path) -> None:
    # In a mount namespace of its own the keeper sees version 2 alone, as on most nodes.
    prefix = [
        "unshare",
        "--mount",
        "/bin/sh",
        "-c",
        f'mount --bind {MOUNT} {CGROUP_MOUNT} && exec "$@"',
        "sh",
    ]
    root = f"ft-test-{os.getpid()}"
    async with (
        keeper_process(tmp_path, root, prefix=prefix) as process,
        Keeper.connected(process.socket_path, deadline=soon()) as keeper,
    ):
        assert "listening cgroups=v2" in process.log[0]
        started = await start_machine(keeper, "m", SLEEP, cgroup="tree")
        assert f"0::/{root}/tree" in Path(f"/proc/{started.pid}/cgroup").read_text().splitlines()
        with pytest.raises(KeeperError) as raised:
            await keeper.drop_cgroup("tree", deadline=soon())
        assert raised.value.code is Code.CGROUP_BUSY
        if "memory" in (MOUNT / "cgroup.controllers").read_text().split():  # type: ignore[operator]
            await keeper.limit_cgroup("tree", 1 << 28, deadline=soon())
        else:
            with pytest.raises(KeeperError, match=r"cannot write .*memory\.max: No such file"):
                await keeper.limit_cgroup("tree", 1 << 28, deadline=soon())
        os.kill(started.pid, signal.SIGKILL)
        await keeper.kill("m", deadline=soon())
        await keeper.drop_cgroup("tree", deadline=soon())
        await start_machine(keeper, "n", ["/bin/sh", "-c", "setsid sleep 1000 & wait"], cgroup="other")


def test_it_tells_when_there_are_no_control_groups(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "forktree_keeper",
        "--state-dir",
        str(tmp_path),
        "--cgroup-root",
        "ft-test",
    ]
    hidden = ["unshare", "--mount", "/bin/sh", "-c", f'mount -t tmpfs none {CGROUP_MOUNT} && exec "$@"', "sh"]
    done = subprocess.run(hidden + command, capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == 1
    assert "cannot_begin" in done.stderr
    assert "no control groups" in done.stderr
