"""One small task per object that has something to do, and none for the others.

A worker looks at the newest state, does one round, and looks again if it was poked meanwhile. So a lost,
doubled or late event changes nothing, and two rounds for one object never run at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field

from forktree.errors import ForktreeError
from forktree.models import Uid
from forktree.tracing.context import unfollowed

log = logging.getLogger(__name__)

Round = Callable[[Uid], Awaitable[float | None]]
"""Brings one object one step on. Returns seconds until it wants to look again, or None: only when poked."""

FIRST_RETRY_SECONDS = 0.05
LONGEST_RETRY_SECONDS = 5.0


@dataclass(slots=True)
class _Worker:
    task: asyncio.Task[None] | None = None
    poked: asyncio.Event = field(default_factory=asyncio.Event)


class Workers:
    """Runs rounds for each uid that is poked. Its tasks belong to the group it is given."""

    def __init__(self, name: str, tasks: asyncio.TaskGroup) -> None:
        self._name = name
        self._tasks = tasks
        self._round: Round = _idle
        self._workers: dict[Uid, _Worker] = {}
        self._closed = False

    def do(self, round_: Round) -> None:
        """What a round is. Said once, before anything is poked: rounds poke other workers themselves."""
        self._round = round_

    def poke(self, uid: Uid) -> None:
        """Something about the object may have changed. Never waits."""
        if self._closed:
            return
        worker = self._workers.get(uid)
        if worker is None:
            worker = self._workers[uid] = _Worker()
            worker.task = self._tasks.create_task(self._work(uid, worker), name=f"{self._name}-{uid}")
        worker.poked.set()

    async def halt(self, uids: Iterable[Uid]) -> None:
        """Cancel what is being done for these objects, and return when it has ended.

        A poke that comes meanwhile may be lost, so whoever halts a worker pokes it afterwards if need be.
        """
        running = [
            worker.task
            for uid in uids
            if (worker := self._workers.get(uid)) is not None and worker.task is not None
        ]
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)

    def close(self) -> None:
        """Cancel all that is being done; nothing new begins. The group waits for the end of it."""
        self._closed = True
        for worker in self._workers.values():
            if worker.task is not None:
                worker.task.cancel()

    async def _work(self, uid: Uid, worker: _Worker) -> None:
        failures = 0
        unfollowed()  # Whoever poked first is not whom it works for.
        try:
            while True:
                worker.poked.clear()
                try:
                    pause = await self._round(uid)
                    failures = 0
                except ForktreeError as err:
                    failures += 1
                    pause = _retry_seconds(failures)
                    log.warning(
                        "round_failed kind=%s uid=%s retry_seconds=%.2f reason=%s error=%r",
                        self._name, uid, pause, err.reason, err.message,
                    )  # fmt: skip
                except Exception:  # The task's edge: a defect met by one object must not end the others.
                    failures += 1
                    pause = _retry_seconds(failures)
                    log.exception("round_broke kind=%s uid=%s retry_seconds=%.2f", self._name, uid, pause)
                if worker.poked.is_set() and failures == 0:
                    await asyncio.sleep(0)  # A round need not have waited for anything.
                    continue
                if pause is None:
                    return
                await _first_of(worker.poked, pause, deaf=failures > 0)
        finally:
            if self._workers.get(uid) is worker:
                del self._workers[uid]


async def _idle(uid: Uid) -> None:
    raise AssertionError(f"{uid} was poked before it was said what to do")


def _retry_seconds(failures: int) -> float:
    return float(min(FIRST_RETRY_SECONDS * 2 ** min(failures - 1, 16), LONGEST_RETRY_SECONDS))


async def _first_of(poked: asyncio.Event, seconds: float, *, deaf: bool) -> None:
    """Wait for a poke, at most `seconds`; after a failure the whole time, for events may come in floods."""
    if deaf:
        await asyncio.sleep(seconds)
        return
    try:
        async with asyncio.timeout(seconds):
            await poked.wait()
    except TimeoutError:
        pass
