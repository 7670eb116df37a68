"""Control groups of keepers that were killed: where none is started again, nobody else removes them."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

from forktree_keeper.cgroups import CgroupsUnavailable, ControlGroups

_MOUNT = Path("/sys/fs/cgroup")


async def clear(prefix: str) -> None:
    """End what is left in the root groups whose names begin with `prefix`, and remove them.

    A group whose keeper runs is left alone.
    """
    await asyncio.to_thread(_clear, prefix)  # Seconds, where the kernel is slow to let go of a process.


def _clear(prefix: str) -> None:
    with suppress(CgroupsUnavailable):
        hierarchies = [root.parent for root in ControlGroups.found(_MOUNT, prefix).roots]
        for name in {folder.name for each in hierarchies for folder in each.glob(f"{prefix}*")}:
            # A keeper clears its groups when it begins and when it ends: being one for a moment is enough.
            with suppress(CgroupsUnavailable), ControlGroups.found(_MOUNT, name).owned():
                pass
