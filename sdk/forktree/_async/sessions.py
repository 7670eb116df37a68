"""What a namespace has: sessions, forks, templates."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TypeVar

import pydantic

from forktree._async.forks import AsyncFork
from forktree._async.session import AsyncSession
from forktree._async.transport import AsyncTransport, Call, new_key, unexpected
from forktree._results import part, some
from forktree.models.reasons import SessionPhase
from forktree.wire import ChildLog, SessionCreated, SessionInfo
from forktree.wire_trees import ForkInfo, TemplateInfo

CREATE_SECONDS = 600.0
"""The first session of a template on a node waits for the template to boot, minutes under emulation."""

T = TypeVar("T")

_SESSIONS = pydantic.TypeAdapter(list[SessionInfo])
_FORKS = pydantic.TypeAdapter(list[ForkInfo])
_TEMPLATES = pydantic.TypeAdapter(list[TemplateInfo])


class AsyncSessions:
    """All sessions of the namespace."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def create(
        self,
        template: str,
        *,
        name: str | None = None,
        labels: Mapping[str, str] | None = None,
        seed: str | int | None = None,
        env: Mapping[str, str] | None = None,
        idempotency_key: str | None = None,
        timeout: float = CREATE_SECONDS,
    ) -> AsyncSession:
        """A new session of `template` that runs. `seed` and `env` are told to all below it too.

        With a `name` the call may be repeated: where there is a session of that name and template, it is that
        one. Without, it has a key of its own and is sent again when its answer is lost. Raises what went
        wrong; nothing is left then, but after `AnswerLost`, whose `idempotency_key` finds the session again.
        """
        body = some(
            {
                "template_id": template,
                "name": name,
                "labels": dict(labels) if labels else None,
                "seed": None if seed is None else str(seed),
                "env": dict(env) if env else None,
            }
        )
        call = Call(
            method="POST",
            path="/sessions",
            body=body,
            key=None if name is not None else idempotency_key or new_key(),
            repeatable=name is not None,
            seconds=timeout,
        )
        made = await self._transport.ask(call, SessionCreated)
        info = SessionInfo(
            session_id=made.session_id,
            template_id=made.template_id,
            phase=SessionPhase.RUNNING,
            ready=True,
            age_secs=0.0,
            depth=0,
            root=made.session_id,
            node=made.node,
            mode=made.mode,
            level=made.level,
            labels=dict(labels or {}),
        )
        return AsyncSession(self._transport, info)

    async def get(self, session_id: str) -> AsyncSession:
        """Raises `NoSuchSession`."""
        call = Call(method="GET", path=f"/sessions/{part(session_id)}")
        return AsyncSession(self._transport, await self._transport.ask(call, SessionInfo))

    async def list(
        self,
        *,
        template: str | None = None,
        root: str | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> list[AsyncSession]:
        """All that are there, also those that have ended and keep their place in the tree; or of these only
        those of a template, of the tree below a root, and with all of these labels."""
        query = [
            *(("template_id", each) for each in (template,) if each),
            *(("root", each) for each in (root,) if each),
            *(("label", f"{key}={value}") for key, value in (labels or {}).items()),
        ]
        call = Call(method="GET", path="/sessions", query=query)
        return [
            AsyncSession(self._transport, info) for info in await _asked(self._transport, call, _SESSIONS)
        ]

    async def delete(self, session_id: str) -> None:
        """Delete it and all below it. One that is not there is deleted already."""
        await self.named(session_id).delete()

    def named(self, session_id: str) -> AsyncSession:
        """A handle of the session of this name, without asking whether there is one."""
        return AsyncSession.named(self._transport, session_id)


class AsyncForks:
    """All forks of the namespace."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def get(self, fork_id: str) -> AsyncFork:
        """With what has become of its children. Raises `NotFound`."""
        call = Call(method="GET", path=f"/forks/{part(fork_id)}")
        return self._fork(await self._transport.ask(call, ForkInfo))

    async def list(self, *, session_id: str | None = None) -> list[AsyncFork]:
        """All of them, or those of a session."""
        query = None if session_id is None else {"session_id": session_id}
        call = Call(method="GET", path="/forks", query=query)
        return [self._fork(info) for info in await _asked(self._transport, call, _FORKS)]

    async def log(self, fork_id: str, index: int) -> ChildLog:
        """What the commands of the child of this index printed, also when it is gone. Raises `NotFound`."""
        path = f"/forks/{part(fork_id)}/children/{index}/log"
        return await self._transport.ask(Call(method="GET", path=path), ChildLog)

    def _fork(self, info: ForkInfo) -> AsyncFork:
        return AsyncFork(self._transport, partial(AsyncSession, self._transport), info)


class AsyncTemplates:
    """What sessions can be made of."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def get(self, template_id: str) -> TemplateInfo:
        """Raises `NoSuchTemplate`."""
        return await self._transport.ask(
            Call(method="GET", path=f"/templates/{part(template_id)}"), TemplateInfo
        )

    async def list(self) -> list[TemplateInfo]:
        """All of the namespace, and where they are ready."""
        return await _asked(self._transport, Call(method="GET", path="/templates"), _TEMPLATES)


async def _asked(transport: AsyncTransport, call: Call, adapter: pydantic.TypeAdapter[T]) -> T:
    raw = await transport.raw(call)
    try:
        return adapter.validate_json(raw)
    except pydantic.ValidationError as err:
        raise unexpected(call, err) from err
