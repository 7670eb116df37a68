"""One session: forked, scored, paused, kept, gone back to, deleted."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Self, Unpack, overload

import pydantic

from forktree._async.commands import AsyncCommands
from forktree._async.files import AsyncFiles
from forktree._async.forks import FORK_SECONDS, AsyncFork, forked
from forktree._async.ports import AsyncPorts
from forktree._async.transport import Call, new_key, unexpected
from forktree._async.trees import AsyncTree, tree_of
from forktree._flavours import async_repeating
from forktree._results import ForkOptions, fork_body, part, some
from forktree.errors import NoSuchSession, NotFound, SessionGone
from forktree.wire import SessionForked, SessionInfo, SessionMemory
from forktree.wire_trees import CheckpointInfo

STATE_SECONDS = 120.0
UNSET = float("nan")
"""A score that is left as it is. No score can be this."""

_CHECKPOINTS = pydantic.TypeAdapter(list[CheckpointInfo])


class AsyncSession(AsyncCommands, AsyncFiles, AsyncPorts):
    """A live environment. This is a handle to it: it may outlive its session, and two may mean the same."""

    _kept = False

    async def fork(self, n: int | None = None, **options: Unpack[ForkOptions]) -> AsyncFork:
        """`n` children (one by itself) from this very instant, all of them or none; each runs.

        See `ForkOptions` for what can be said of them. With a `name` the call may be repeated, without it has
        a key of its own and is sent again when its answer is lost: no child is ever lost.
        """
        return await forked(
            self._transport, self._sibling, f"{self._path}/fork", fork_body(n, options), options
        )

    @overload
    def branch(self, **options: Unpack[ForkOptions]) -> AbstractAsyncContextManager[AsyncSession]: ...
    @overload
    def branch(self, n: int, **options: Unpack[ForkOptions]) -> AbstractAsyncContextManager[AsyncFork]: ...
    def branch(
        self, n: int | None = None, **options: Unpack[ForkOptions]
    ) -> AbstractAsyncContextManager[AsyncSession] | AbstractAsyncContextManager[AsyncFork]:
        """For a `with` block: one child, or with `n` a fork of so many, deleted when the block ends, however
        it does; but for those whose `keep` was called."""
        return self._one(options) if n is None else self._many(n, options)

    def keep(self) -> None:
        """It is not deleted at the end of the `branch` block that made it."""
        self._kept = True

    async def score(self, score: float | None = UNSET, **rewards: float) -> Self:
        """Set what it counts for: higher is better; None takes that back. `rewards`: further numbers by
        name."""
        said: dict[str, object] = {} if score is not None and score != score else {"score": score}  # noqa: PLR0124
        body = said | some({"rewards": rewards or None})
        return await self._told("score", body)

    async def pause(self) -> Self:
        """Let it stand still: it keeps its memory, takes no commands, and can be forked."""
        return await self._told("pause", {})

    async def resume(self) -> Self:
        """Let it go on."""
        return await self._told("resume", {})

    async def release(self) -> Self:
        """End its machine for good. Its place in the tree and its instants stay."""
        return await self._told("release", {})

    async def delete(self) -> None:
        """Delete it and all below it. Where it is not there any more, it is deleted already."""
        try:
            await self._transport.raw(Call(method="DELETE", path=self._path, seconds=STATE_SECONDS))
        except (NoSuchSession, SessionGone):
            return

    async def prune(self) -> None:
        """As `delete`: the word of a search."""
        await self.delete()

    async def checkpoint(self, name: str, *, keep_last: int | None = None) -> CheckpointInfo:
        """Keep this instant under a name. Asked again, it is the one of that name that is there.

        `keep_last`: delete the oldest beyond so many, but for those that something was forked from.
        """
        call = Call(
            method="POST",
            path=f"{self._path}/checkpoints",
            body=some({"name": name, "keep_last": keep_last}),
            repeatable=True,
            seconds=FORK_SECONDS,
        )
        return await self._transport.ask(call, CheckpointInfo)

    async def checkpoints(self) -> list[CheckpointInfo]:
        """The oldest first."""
        call = Call(method="GET", path=f"{self._path}/checkpoints")
        raw = await self._transport.raw(call)
        try:
            return _CHECKPOINTS.validate_json(raw)
        except pydantic.ValidationError as err:
            raise unexpected(call, err) from err

    async def delete_checkpoint(self, name: str) -> None:
        """Let it go, and delete all that was started from it. Where it is not there, it is deleted
        already."""
        path = f"{self._path}/checkpoints/{part(name)}"
        try:
            await self._transport.raw(Call(method="DELETE", path=path, seconds=STATE_SECONDS))
        except NotFound as err:
            if err.code != NotFound.code:
                raise

    async def rollback(self, checkpoint: str, *, release: bool = False) -> AsyncSession:
        """A new session that goes on from the checkpoint. `release`: end the machine of this one then."""
        call = Call(
            method="POST",
            path=f"{self._path}/rollback",
            body={"checkpoint": checkpoint, "release": release},
            key=new_key(),
            seconds=FORK_SECONDS,
        )
        fork = AsyncFork(self._transport, self._sibling, await self._transport.ask(call, SessionForked))
        return fork[0]

    async def memory(self) -> SessionMemory:
        """What memory it takes now."""
        return await self._transport.ask(Call(method="GET", path=f"{self._path}/memory"), SessionMemory)

    async def tree(self, *, below: bool = False, memory: bool = False) -> AsyncTree[AsyncSession]:
        """The whole tree that it is in; `below`: from it down. `memory`: also what each takes."""
        return await tree_of(self._transport, self._sibling, self.id, below=below, memory=memory)

    async def heartbeat(self, ttl: float) -> None:
        """Its whole tree lives for `ttl` seconds more; without another heartbeat it is deleted then."""
        path = f"{self._path}/heartbeat"
        body = {"ttl_seconds": round(ttl)}
        await self._transport.raw(Call(method="POST", path=path, body=body, repeatable=True))

    @asynccontextmanager
    async def keep_alive(self, ttl: float = 120.0) -> AsyncGenerator[Self]:
        """For a `with` block: the tree lives as long as the block runs, and at most `ttl` seconds longer,
        whatever becomes of this program. A heartbeat that fails is raised at the block's end."""
        await self.heartbeat(ttl)
        async with async_repeating(partial(self.heartbeat, ttl), ttl / 3):
            yield self

    @asynccontextmanager
    async def _one(self, options: ForkOptions) -> AsyncGenerator[AsyncSession]:
        async with self._many(None, options) as fork:
            yield fork[0]

    @asynccontextmanager
    async def _many(self, n: int | None, options: ForkOptions) -> AsyncGenerator[AsyncFork]:
        fork = await self.fork(n, **options)
        try:
            yield fork
        finally:
            for child in fork:
                if not child._kept:
                    await child.delete()

    async def _told(self, word: str, body: dict[str, object]) -> Self:
        """Itself, once it is what `word` asks of it."""
        call = Call(
            method="POST",
            path=f"{self._path}/{word}",
            body=body,
            repeatable=True,
            seconds=STATE_SECONDS,
        )
        self._info = await self._transport.ask(call, SessionInfo)
        return self

    def _sibling(self, info: SessionInfo) -> AsyncSession:
        if info.depth is None and self.depth is not None and info.parent_session_id == self.id:
            info = info.model_copy(update={"depth": self.depth + 1, "root": self._info.root})
        return AsyncSession(self._transport, info)
