"""A fork: an instant of a session, and the children started from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, Self, Unpack, overload

from forktree._async.transport import AsyncTransport, Call, new_key
from forktree._results import ForkOptions, fork_body, part
from forktree.errors import NotFound
from forktree.models.reasons import SessionPhase
from forktree.wire import ForkedChild, SessionForked, SessionInfo
from forktree.wire_trees import ForkInfo

if TYPE_CHECKING:
    from forktree._async.session import AsyncSession

FORK_SECONDS = 240.0
"""An agent gives a fork 110 s; a refusal for want of room or a lost answer is worth a second time."""


class AsyncMake(Protocol):
    """A handle of the session that is described so."""

    def __call__(self, info: SessionInfo, /) -> AsyncSession: ...


async def forked(
    transport: AsyncTransport, make: AsyncMake, path: str, body: dict[str, object], options: ForkOptions
) -> AsyncFork:
    """What the fork asked for at `path` comes to. With a name or by its key it is asked for again where the
    answer is lost, so no child is ever lost."""
    named = "name" in body
    call = Call(
        method="POST",
        path=path,
        body=body,
        query={"wait": "complete"} if options.get("complete") else None,
        key=None if named else options.get("idempotency_key") or new_key(),
        repeatable=named,
        seconds=options.get("timeout", FORK_SECONDS),
    )
    return AsyncFork(transport, make, await transport.ask(call, SessionForked))


class AsyncFork(Sequence["AsyncSession"]):
    """Its children, in order of their index, and what is known of it."""

    def __init__(self, transport: AsyncTransport, make: AsyncMake, facts: SessionForked | ForkInfo) -> None:
        self._transport = transport
        self._make = make
        self.facts = facts
        self.children = tuple(make(info) for info in _born(facts))

    @property
    def id(self) -> str:
        """Name of the Fork object."""
        return self.facts.fork_id

    @property
    def parent_id(self) -> str | None:
        """Whose instant it is."""
        return self.facts.parent_session_id

    @property
    def pause_ms(self) -> float | None:
        """Parent stopped to parent running."""
        return self.facts.pause_time_ms

    @property
    def fork_ms(self) -> float | None:
        """Parent stopped to every child running."""
        return self.facts.fork_time_ms

    @property
    def ready_ms(self) -> float | None:
        """Parent stopped to every child's identity answered; None where that was still to come."""
        return self.facts.ready_time_ms

    @property
    def best(self) -> AsyncSession | None:
        """The child with the best score by the fork's own scorer. Known once the fork is complete."""
        wanted = self.facts.best_session_id
        return next((child for child in self.children if child.id == wanted), None)

    @property
    def best_score(self) -> float | None:
        return self.facts.best_score

    def __len__(self) -> int:
        return len(self.children)

    @overload
    def __getitem__(self, index: int) -> AsyncSession: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[AsyncSession]: ...
    def __getitem__(self, index: int | slice) -> AsyncSession | Sequence[AsyncSession]:
        return self.children[index]

    def __repr__(self) -> str:
        return f"<fork {self.id} of {self.parent_id}: {len(self)} children>"

    async def refresh(self) -> Self:
        """Itself, with `facts` as they are now: a `ForkInfo`."""
        self.facts = await self._transport.ask(Call(method="GET", path=self._path), ForkInfo)
        return self

    async def fork(self, n: int | None = None, **options: Unpack[ForkOptions]) -> AsyncFork:
        """More children from the same instant, whatever has become of its session. As `AsyncSession.fork`."""
        return await forked(self._transport, self._make, f"{self._path}/fork", fork_body(n, options), options)

    def keep(self) -> None:
        """None of its children is deleted at the end of the `branch` block that made them."""
        for child in self.children:
            child.keep()

    async def delete(self) -> None:
        """Delete the instant, the children, and all below them. Where it is not there, it is deleted
        already."""
        try:
            await self._transport.raw(Call(method="DELETE", path=self._path, seconds=120.0))
        except NotFound as err:
            if err.code != NotFound.code:
                raise

    @property
    def _path(self) -> str:
        return f"/forks/{part(self.id)}"


def _born(facts: SessionForked | ForkInfo) -> list[SessionInfo]:
    """What is known of the children of a fork."""
    return [
        SessionInfo(
            session_id=child.session_id,
            template_id=facts.template_id if isinstance(facts, SessionForked) else "",
            phase=SessionPhase.RUNNING if isinstance(child, ForkedChild) else child.phase,
            ready=isinstance(child, ForkedChild) or child.phase is SessionPhase.RUNNING,
            age_secs=0.0,
            parent_session_id=facts.parent_session_id,
            fork_id=facts.fork_id,
            score=child.score,
            seed=child.seed,
        )
        for child in facts.children
    ]
