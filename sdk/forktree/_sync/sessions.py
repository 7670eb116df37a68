# Generated from sdk/forktree/_async/sessions.py by `make generate`; change that file.
"""What a namespace has: sessions, forks, templates."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TypeVar

import pydantic

from forktree._results import part, some
from forktree._sync.forks import Fork
from forktree._sync.session import Session
from forktree._sync.transport import Call, Transport, new_key, unexpected
from forktree.models.reasons import SessionPhase
from forktree.wire import ChildLog, SessionCreated, SessionInfo
from forktree.wire_trees import ForkInfo, TemplateInfo

CREATE_SECONDS = 600.0
"""The first session of a template on a node waits for the template to boot, minutes under emulation."""

T = TypeVar("T")

_SESSIONS = pydantic.TypeAdapter(list[SessionInfo])
_FORKS = pydantic.TypeAdapter(list[ForkInfo])
_TEMPLATES = pydantic.TypeAdapter(list[TemplateInfo])


class Sessions:
    """All sessions of the namespace."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def create(
        self,
        template: str,
        *,
        name: str | None = None,
        labels: Mapping[str, str] | None = None,
        seed: str | int | None = None,
        env: Mapping[str, str] | None = None,
        idempotency_key: str | None = None,
        timeout: float = CREATE_SECONDS,
    ) -> Session:
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
        made = self._transport.ask(call, SessionCreated)
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
        return Session(self._transport, info)

    def get(self, session_id: str) -> Session:
        """Raises `NoSuchSession`."""
        call = Call(method="GET", path=f"/sessions/{part(session_id)}")
        return Session(self._transport, self._transport.ask(call, SessionInfo))

    def list(
        self,
        *,
        template: str | None = None,
        root: str | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> list[Session]:
        """All that are there, also those that have ended and keep their place in the tree; or of these only
        those of a template, of the tree below a root, and with all of these labels."""
        query = [
            *(("template_id", each) for each in (template,) if each),
            *(("root", each) for each in (root,) if each),
            *(("label", f"{key}={value}") for key, value in (labels or {}).items()),
        ]
        call = Call(method="GET", path="/sessions", query=query)
        return [Session(self._transport, info) for info in _asked(self._transport, call, _SESSIONS)]

    def delete(self, session_id: str) -> None:
        """Delete it and all below it. One that is not there is deleted already."""
        self.named(session_id).delete()

    def named(self, session_id: str) -> Session:
        """A handle of the session of this name, without asking whether there is one."""
        return Session.named(self._transport, session_id)


class Forks:
    """All forks of the namespace."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def get(self, fork_id: str) -> Fork:
        """With what has become of its children. Raises `NotFound`."""
        call = Call(method="GET", path=f"/forks/{part(fork_id)}")
        return self._fork(self._transport.ask(call, ForkInfo))

    def list(self, *, session_id: str | None = None) -> list[Fork]:
        """All of them, or those of a session."""
        query = None if session_id is None else {"session_id": session_id}
        call = Call(method="GET", path="/forks", query=query)
        return [self._fork(info) for info in _asked(self._transport, call, _FORKS)]

    def log(self, fork_id: str, index: int) -> ChildLog:
        """What the commands of the child of this index printed, also when it is gone. Raises `NotFound`."""
        path = f"/forks/{part(fork_id)}/children/{index}/log"
        return self._transport.ask(Call(method="GET", path=path), ChildLog)

    def _fork(self, info: ForkInfo) -> Fork:
        return Fork(self._transport, partial(Session, self._transport), info)


class Templates:
    """What sessions can be made of."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def get(self, template_id: str) -> TemplateInfo:
        """Raises `NoSuchTemplate`."""
        return self._transport.ask(Call(method="GET", path=f"/templates/{part(template_id)}"), TemplateInfo)

    def list(self) -> list[TemplateInfo]:
        """All of the namespace, and where they are ready."""
        return _asked(self._transport, Call(method="GET", path="/templates"), _TEMPLATES)


def _asked(transport: Transport, call: Call, adapter: pydantic.TypeAdapter[T]) -> T:
    raw = transport.raw(call)
    try:
        return adapter.validate_json(raw)
    except pydantic.ValidationError as err:
        raise unexpected(call, err) from err
