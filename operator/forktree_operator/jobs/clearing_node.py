"""Remove what keeper and agent kept on their node, once both are gone. Runs there, as root without rights."""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from forktree_operator.jobs.telling import say, until

_LOCKS = ("keeper.lock", "agent.lock")
"""Each is held for as long as its process lives."""


async def clear_node(state_directory: Path, image_directory: Path | None = None, *, deadline: float) -> None:
    """Returns when the folders are empty. Raises `NotInTime` while somebody still holds them."""

    async def held() -> str:
        return ", ".join(name for name in _LOCKS if not _is_free(state_directory / name))

    await until(held, "keeper and agent to let go of the node's state", deadline=deadline)
    for folder in (state_directory, *([image_directory] if image_directory is not None else [])):
        await asyncio.to_thread(_empty, folder)
        say(f"{folder} is empty")


def _empty(folder: Path) -> None:
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _is_free(lock: Path) -> bool:
    with _opened(lock) as descriptor:
        if descriptor is None:
            return True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


@contextmanager
def _opened(path: Path) -> Generator[int | None]:
    """None where there is no such file."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        yield None
        return
    try:
        yield descriptor
    finally:
        os.close(descriptor)
