"""What a guest is asked and answers at once: whether it is there, to stop its programs, what a server says.

Each question has a nonce, which only its answer has too.
"""

from __future__ import annotations

import asyncio
import math
import uuid
from typing import TypeVar

from forktree_agent.engine.contract import MachineGone, NotStill
from forktree_agent.engine.microvm import guest_frames as frames
from forktree_agent.engine.microvm.guest_line import GuestError, GuestLine, fail, quoted, settle

_T = TypeVar("_T")


class Asking:
    """The questions that wait for their answers."""

    def __init__(self, line: GuestLine) -> None:
        self._loop = asyncio.get_running_loop()
        self._line = line
        self._pings: dict[str, asyncio.Future[frames.Pong]] = {}
        self._gets: dict[str, asyncio.Future[frames.HttpStatus]] = {}
        self._freezes: dict[str, asyncio.Future[frames.Frozen]] = {}
        self._thaws: dict[str, asyncio.Future[frames.Thawed]] = {}

    async def ping(self, *, deadline: float) -> None:
        """Until init answers. Raises `DeadlineExceeded`, `MachineGone`."""
        nonce = uuid.uuid4().hex
        await self._asked(self._pings, nonce, frames.Ping(nonce=nonce), "answer", deadline)

    async def freeze(self, *, deadline: float) -> None:
        """Have all programs of the guest stop, until `queue_thaw`. Returns when they have.

        Raises `NotStill` if they run on, `DeadlineExceeded`, `MachineGone`.
        """
        nonce = uuid.uuid4().hex
        frozen = await self._asked(
            self._freezes, nonce, frames.Freeze(nonce=nonce), "stop its programs", deadline
        )
        if frozen.message is not None:
            raise NotStill(
                f"the programs of machine {self._line.name} do not stand still: {quoted(frozen.message)}"
            )

    def queue_thaw(self) -> asyncio.Future[frames.Thawed]:
        """Have them go on, whether they were stopped or not. What this returns is for `thawed`.

        Never waits. Raises `MachineGone`.
        """
        nonce = uuid.uuid4().hex
        self._line.send(frames.Thaw(nonce=nonce))
        answer = self._thaws[nonce] = self._loop.create_future()
        return answer

    async def thawed(self, answer: asyncio.Future[frames.Thawed], *, deadline: float) -> None:
        """Until they go on. Raises `DeadlineExceeded`, `MachineGone`, `GuestError` if they could not."""
        thawed = await self._line.wait(answer, "let its programs go on", deadline)
        if thawed.message is not None:
            raise GuestError(
                f"machine {self._line.name} could not let its programs go on: {quoted(thawed.message)}"
            )

    async def http_get(
        self, port: int, path: str, *, timeout_seconds: float, deadline: float
    ) -> frames.HttpStatus:
        """What a server in the guest answers to a request over loopback. That it does not is an answer too.

        Raises `DeadlineExceeded` if the guest itself does not answer, `MachineGone`.
        """
        nonce, timeout_ms = uuid.uuid4().hex, max(1, math.ceil(timeout_seconds * 1000))
        question = frames.HttpGet(nonce=nonce, port=port, path=path, timeout_ms=timeout_ms)
        return await self._asked(self._gets, nonce, question, f"ask port {port}", deadline)

    def take(self, answer: frames.Pong | frames.HttpStatus | frames.Frozen | frames.Thawed) -> None:
        """The guest answers. What nobody asked is dropped."""
        match answer:
            case frames.Pong():
                settle(self._pings.get(answer.nonce), answer)
            case frames.HttpStatus():
                settle(self._gets.get(answer.nonce), answer)
            case frames.Frozen():
                settle(self._freezes.get(answer.nonce), answer)
            case frames.Thawed():
                settle(self._thaws.pop(answer.nonce, None), answer)

    def close(self, end: MachineGone) -> None:
        """Nobody is going to answer."""
        fail(self._pings.values(), end)
        fail(self._gets.values(), end)
        fail(self._freezes.values(), end)
        fail(self._thaws.values(), end)

    async def _asked(
        self,
        waiting: dict[str, asyncio.Future[_T]],
        nonce: str,
        question: frames.Request,
        what: str,
        deadline: float,
    ) -> _T:
        waiting[nonce] = self._loop.create_future()
        try:
            self._line.send(question)
            return await self._line.wait(waiting[nonce], what, deadline)
        finally:
            del waiting[nonce]
