"""Children whose answer nobody waits for: each is heard for itself, and one that does not answer ends alone.

Their forks were done when they ran, and somebody may know of them already. So that they have not answered yet
stands in their record, and the next agent asks them again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from typing import TYPE_CHECKING

from forktree_agent.engine.contract import (
    AtCapacity,
    Command,
    CommandRefused,
    EngineError,
    MachineGone,
    MachineId,
)
from forktree_agent.engine.microvm.branching import MILLISECONDS
from forktree_agent.engine.microvm.children import answer_of
from forktree_agent.engine.microvm.endings import until
from forktree_agent.engine.microvm.forking import Live
from forktree_agent.engine.microvm.hooks import POST_FORK, run_hook
from forktree_agent.journal import JournalError

if TYPE_CHECKING:
    from forktree_agent.engine.microvm.calm import Calm
    from forktree_agent.engine.microvm.resources import Resources

log = logging.getLogger(__name__)

ASKED_AGAIN = Command(argv=("true",), timeout_seconds=10.0)
"""Which program does not matter, nor whether there is one: init takes it only for its own generation."""

Answer = Callable[[], Awaitable[float]]


class Hearing:
    """Waits for answers. `lost` frees a machine that is out of the table, and tells of it."""

    def __init__(
        self,
        resources: Resources,
        live: MutableMapping[MachineId, Live],
        calm: Calm,
        tasks: asyncio.TaskGroup,
        lost: Callable[[Live, str], Awaitable[None]],
    ) -> None:
        self._resources = resources
        self._live = live
        self._calm = calm
        self._tasks = tasks
        self._lost = lost
        self._heard: set[asyncio.Task[None]] = set()

    def born(self, live: Live, post_fork: Command | None, *, stopped_at: float, deadline: float) -> None:
        """Hear a child that has just begun to run. `stopped_at` is what its clock begins with."""

        async def answer() -> float:
            at = await answer_of(self._resources, live.record, live.vmm, post_fork, deadline=deadline)
            return (at - stopped_at) * MILLISECONDS

        self._begin(live, answer, clock=True)

    def adopted(self, live: Live, *, deadline: float) -> None:
        """Hear one that an agent before us did not, or of which it could not note that it did."""

        async def answer() -> float:
            guest, record = live.vmm.guest, live.record
            async with self._resources.vmms.unborn(record.id):
                with suppress(CommandRefused, AtCapacity):
                    await guest.exec(ASKED_AGAIN, record.generation, deadline=deadline)
                hook = None if record.unanswered is None else record.unanswered.post_fork
                post = None if hook is None else Command(argv=hook.argv, timeout_seconds=hook.timeout_seconds)
                await run_hook(POST_FORK, post, guest, record.generation, deadline=deadline)
            return time.monotonic()

        self._begin(live, answer, clock=False)

    async def answered(self, live: Live, *, deadline: float) -> float | None:
        """As in the engine's contract."""
        if live.answering is None:
            return None
        async with until(deadline, f"the answer of machine {live.record.id} to its identity"):
            return await asyncio.shield(live.answering)

    async def close(self) -> None:
        """Hear nobody any more. Those that have not answered run on, for the next agent."""
        for task in self._heard:
            task.cancel()
        if self._heard:
            await asyncio.wait(self._heard)

    def _begin(self, live: Live, answer: Answer, *, clock: bool) -> None:
        live.answering = asyncio.get_running_loop().create_future()
        task = self._tasks.create_task(self._hear(live, live.answering, answer, clock=clock))
        self._heard.add(task)
        task.add_done_callback(self._heard.discard)

    async def _hear(
        self, live: Live, answering: asyncio.Future[float | None], answer: Answer, *, clock: bool
    ) -> None:
        machine = MachineId(live.record.id)
        try:
            with self._calm.broken():  # What answers late because of our own work was started too early.
                ready_ms = await answer()
        except EngineError as err:
            answering.set_exception(MachineGone(f"it did not answer to its identity: {err}"))
            answering.exception()  # Nobody need have waited for it.
            if self._live.get(machine) is live:
                del self._live[machine]
                await self._lost(live, f"it did not answer to its identity: {err}")
            return
        if self._live.get(machine) is live:  # The record of one that was released meanwhile must stay away.
            try:
                live.record = self._resources.note_answered(live.record)
            except JournalError as err:  # The next agent asks it again, and gets the same answer.
                log.warning("answer_not_noted machine=%s error=%r", machine, err.message)
        answering.set_result(ready_ms if clock else None)
