"""No control group is left of a development system, also where its keeper was killed and never came back."""

from __future__ import annotations

from pathlib import Path

from component.keeper_fixtures import group_folders, keeper_process, soon, start_machine
from forktree_agent.keeper_client import Keeper
from forktree_dev import system


async def test_a_stopped_system_leaves_no_group_of_a_killed_keeper_and_no_other_system_is_touched(
    tmp_path: Path,
) -> None:
    name = system.name_of(tmp_path / "one")
    folders = {part: tmp_path / part for part in ("killed", "well")}
    for folder in folders.values():
        folder.mkdir()
    async with (
        keeper_process(folders["well"], f"{system.name_of(tmp_path / 'two')}-node-1") as well,
        keeper_process(folders["killed"], f"{name}-node-b") as killed,
    ):
        for each in (well, killed):
            async with Keeper.connected(each.socket_path, deadline=soon()) as keeper:
                await keeper.limit_cgroup("tree-1", None, deadline=soon())
                # A process that the machine started outlives it and the keeper, and holds the group.
                script = "setsid sleep 600 & echo started; wait"
                await start_machine(keeper, "m", ["/bin/sh", "-c", script], cgroup="tree-1")
                while "started" not in keeper.log_tail("m"):
                    await keeper.listing(deadline=soon())
        await killed.kill()
        assert [folder.name for folder in group_folders(killed.cgroup_root)]
        assert await system.stop(tmp_path / "one") == []
        assert not list(group_folders(killed.cgroup_root))
        assert "tree-1" in {folder.name for folder in group_folders(well.cgroup_root)}
