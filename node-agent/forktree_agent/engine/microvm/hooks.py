"""Hooks: the template's commands that take part in a fork, and fail it where they fail."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from forktree_agent.engine.contract import Command, CommandRefused, DeadlineExceeded, HookFailed

if TYPE_CHECKING:
    from forktree_agent.engine.microvm.guest import GuestChannel

PRE_FORK: Final = "preFork"
POST_FORK: Final = "postFork"

MARGIN_SECONDS = 10.0
"""Beyond a hook's own time in the guest: a loaded node is slow to start it and to tell its end."""


async def run_hook(
    name: str, hook: Command | None, guest: GuestChannel, generation: str, *, deadline: float
) -> None:
    """Run `hook` to its end; None: nothing. Raises `HookFailed`, and `MachineGone`."""
    if hook is None:
        return
    latest = asyncio.get_running_loop().time() + hook.timeout_seconds + MARGIN_SECONDS
    try:
        result = await guest.exec(hook, generation, deadline=min(latest, deadline))
    except CommandRefused as err:
        raise HookFailed(f"the {name} hook did not start: {err}") from err
    except DeadlineExceeded as err:
        raise HookFailed(f"the {name} hook was not done in time: {err}") from err
    if result.timed_out:
        raise HookFailed(
            f"the {name} hook was not done after {hook.timeout_seconds:g} s and was ended: {result.told()}"
        )
    if result.exit_code != 0:
        raise HookFailed(f"the {name} hook failed: {result.told()}")
