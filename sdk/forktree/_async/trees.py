"""A tree of live sessions: read once, or followed as it grows."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import pydantic

from forktree._async.lines import lines_of
from forktree._async.transport import AsyncTransport, Call, unexpected
from forktree._flavours import async_wait
from forktree._results import part
from forktree._retrying import Retries
from forktree._trees import S, TreeOf
from forktree.errors import AnswerLost, Unreachable, refused
from forktree.models.reasons import SessionPhase
from forktree.wire import SessionInfo
from forktree.wire_trees import ForkInfo, TreeInfo, TreeSession, TreeTotals

SILENCE_SECONDS = 30.0
"""An agent says something every 10: a connection that says nothing for longer is dead."""
STREAM_SECONDS = 3600.0
"""After which a connection is replaced; what is followed is followed for as long as somebody listens."""
PATIENCE_SECONDS = 120.0
"""How long an agent that does not answer is asked again."""


async def tree_of(
    transport: AsyncTransport,
    make: Callable[[SessionInfo], S],
    session_id: str,
    *,
    below: bool = False,
    memory: bool = False,
) -> AsyncTree[S]:
    """The tree that the session is in, or the part from it down."""
    query = {name: "1" for name, wanted in (("below", below), ("memory", memory)) if wanted}
    call = Call(method="GET", path=f"/sessions/{part(session_id)}/tree", query=query or None)
    return AsyncTree(transport, make, await transport.ask(call, TreeInfo))


class AsyncTree(TreeOf[S]):
    """As it was when it was read."""

    def __init__(self, transport: AsyncTransport, make: Callable[[SessionInfo], S], info: TreeInfo) -> None:
        super().__init__(info, [make(each) for each in info.sessions])
        self._transport = transport
        self._make = make

    async def watch(self) -> AsyncGenerator[AsyncTree[S]]:
        """The whole tree as it is now, and again after every change, until it is gone.

        Connections that break are replaced. Raises `ClientError` after two minutes without an agent.
        """
        path = f"/sessions/{part(self.root.id)}/tree"
        call = Call(method="GET", path=path, query={"watch": "1"}, seconds=STREAM_SECONDS)
        heard, attempt, retries = time.monotonic(), 0, Retries()
        while True:
            seen = _Seen(self.root.id)
            try:
                lines = lines_of(self._transport, call, silence_seconds=SILENCE_SECONDS)
                async with aclosing(lines):
                    async for line in lines:
                        heard, attempt = time.monotonic(), 0
                        if seen.take(line, call):
                            yield AsyncTree(self._transport, self._make, seen.info())
                        if seen.is_gone:
                            return
            except (AnswerLost, Unreachable):
                if time.monotonic() - heard > PATIENCE_SECONDS:
                    raise
            attempt += 1
            await async_wait(retries.pause_seconds(attempt))


class _Seen:
    """What a watch has told so far."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._sessions: dict[str, TreeSession] = {}
        self._forks: dict[str, ForkInfo] = {}
        self._synced = False
        self.is_gone = False
        """The root was deleted."""

    def take(self, line: dict[str, Any], call: Call) -> bool:
        """Whether there is something new to show after this line. Raises `ClientError`."""
        try:
            match line["type"]:
                case "session":
                    told = TreeSession.model_validate(line["session"])
                    self._sessions[told.session_id] = told
                case "fork":
                    fork = ForkInfo.model_validate(line["fork"])
                    self._forks[fork.fork_id] = fork
                case "gone":
                    gone: dict[str, Any] = self._sessions if line["kind"] == "session" else self._forks
                    gone.pop(str(line["id"]), None)
                    self.is_gone = self._synced and self._root not in self._sessions
                case "synced":
                    self._synced = True
                case "error":
                    raise refused(str(line["error"]), code=str(line["code"]), status=0)
                case _:
                    return False
        except (KeyError, TypeError, pydantic.ValidationError) as err:
            raise unexpected(call, err) from err
        return self._synced and not self.is_gone

    def info(self) -> TreeInfo:
        sessions = tuple(self._sessions.values())
        forks = tuple(self._forks.values())
        dead = {SessionPhase.RELEASED, SessionPhase.FAILED}
        totals = TreeTotals(
            sessions=len(sessions),
            live=sum(each.phase not in dead for each in sessions),
            depth=max((each.depth or 0 for each in sessions), default=0),
            point_bytes=sum(each.point_bytes or 0 for each in forks),
        )
        return TreeInfo(root_session_id=self._root, sessions=sessions, forks=forks, totals=totals)
