"""Runs kopf for as long as it should run, and again when it gives up.

kopf ends with the first watch that fails: when an API server that has just started still refuses everybody,
or was away for ten seconds. What is missed meanwhile the sweep finds.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import kopf

from forktree_operator.kopf_settings import lean_settings

log = logging.getLogger(__name__)

_PAUSE_SECONDS: Final = 1.0
_HEALTHY_SECONDS: Final = 60.0
"""A run of this length makes up for the failures before it."""
_FAILURES: Final = 10
"""In a row, after which it is no passing trouble."""
_END_SECONDS: Final = 10.0
"""For kopf's tasks to end once they are cancelled. They need milliseconds."""


class WatchingStopped(Exception):
    """kopf ends whenever it is started. Somebody has to look at why."""


async def watch_events(
    registry: kopf.OperatorRegistry, stop: asyncio.Event, on_spawned: Callable[[], None]
) -> None:
    """Call the registry's handlers until `stop`. Raises `WatchingStopped` when that fails again and again.

    `on_spawned` is called after each start of kopf, which takes the process's signals for itself.
    """
    loop = asyncio.get_running_loop()
    failures = 0
    while not stop.is_set():
        began = loop.time()
        failure = await _watch_once(registry, stop, on_spawned)
        if stop.is_set():
            return
        failures = failures + 1 if loop.time() - began < _HEALTHY_SECONDS else 1
        if failures >= _FAILURES:
            raise WatchingStopped(f"watching ended {failures} times in a row, the last time so: {failure!r}")
        log.warning("watching_restarts failures=%d error=%r", failures, failure)
        with suppress(TimeoutError):
            async with asyncio.timeout(_PAUSE_SECONDS):
                await stop.wait()


async def _watch_once(
    registry: kopf.OperatorRegistry, stop: asyncio.Event, on_spawned: Callable[[], None]
) -> BaseException | None:
    """One run of kopf; what ended it, None where kopf does not say.

    Not by kopf's own `run_tasks`: that ends by cancelling every task of the loop that is younger than kopf,
    so also what our other parts have under way.
    """
    tasks = await kopf.spawn_tasks(
        registry=registry, settings=lean_settings(), clusterwide=True, standalone=True, stop_flag=stop
    )
    on_spawned()
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=_END_SECONDS)
    errors = [task.exception() for task in tasks if task.done() and not task.cancelled()]
    first = [task.exception() for task in done if not task.cancelled()]
    return next((error for error in first + errors if error is not None), None)
