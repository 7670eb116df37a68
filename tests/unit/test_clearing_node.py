"""A node's state goes once nobody holds it, and not before."""

from __future__ import annotations

import asyncio
import fcntl
from pathlib import Path

import pytest

from forktree_operator.jobs.clearing_node import clear_node
from forktree_operator.jobs.telling import NotInTime


def state(folder: Path) -> Path:
    for each in ("journal/machine", "tls"):
        (folder / each).mkdir(parents=True)
    for each in ("keeper.lock", "agent.lock", "tls/ca.key", "journal/machine/m.json"):
        (folder / each).touch()
    (folder / "elsewhere").symlink_to("/etc")
    return folder


def soon(seconds: float) -> float:
    return asyncio.get_running_loop().time() + seconds


async def test_a_folder_that_nobody_holds_is_emptied_and_stays(tmp_path: Path) -> None:
    await clear_node(state(tmp_path), deadline=soon(10))
    assert list(tmp_path.iterdir()) == []
    assert Path("/etc/passwd").exists()
    await clear_node(tmp_path, deadline=soon(10))


async def test_images_of_registries_go_with_it(tmp_path: Path) -> None:
    images = tmp_path / "images"
    (images / "partial").mkdir(parents=True)
    (images / "image.erofs").touch()
    await clear_node(state(tmp_path / "state"), images, deadline=soon(10))
    assert list(images.iterdir()) == []


@pytest.mark.parametrize("name", ["keeper.lock", "agent.lock"])
async def test_a_folder_in_use_is_left_alone(name: str, tmp_path: Path) -> None:
    state(tmp_path)
    with (tmp_path / name).open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(NotInTime, match=name):
            await clear_node(tmp_path, deadline=soon(0))
    assert (tmp_path / "tls" / "ca.key").exists()


async def test_it_waits_for_who_holds_it_to_end(tmp_path: Path) -> None:
    state(tmp_path)
    with (tmp_path / "agent.lock").open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        clearing = asyncio.create_task(clear_node(tmp_path, deadline=soon(10)))
        await asyncio.sleep(0)
        assert (tmp_path / "tls" / "ca.key").exists()
    await clearing
    assert list(tmp_path.iterdir()) == []
