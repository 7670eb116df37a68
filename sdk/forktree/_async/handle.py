"""A session by its name, and what was last heard of it: what all its methods stand on."""

from __future__ import annotations

from typing import Self

from forktree._async.transport import AsyncTransport, Call
from forktree._results import part
from forktree.models.reasons import SessionPhase
from forktree.wire import SessionInfo


class AsyncHandle:
    """It may outlive its session, and two of them may mean the same: then they are equal."""

    def __init__(self, transport: AsyncTransport, info: SessionInfo) -> None:
        self._transport = transport
        self._info = info

    @classmethod
    def named(cls, transport: AsyncTransport, session_id: str) -> Self:
        """By name alone: nothing is known of it before `refresh`."""
        info = SessionInfo(
            session_id=session_id, template_id="", phase=SessionPhase.PENDING, ready=False, age_secs=0.0
        )
        return cls(transport, info)

    @property
    def id(self) -> str:
        return self._info.session_id

    @property
    def template_id(self) -> str:
        return self._info.template_id

    @property
    def parent_id(self) -> str | None:
        """None for a root, and for a child whose parent is gone."""
        return self._info.parent_session_id

    @property
    def depth(self) -> int | None:
        """0 for a root."""
        return self._info.depth

    @property
    def labels(self) -> dict[str, str]:
        """Its user's own."""
        return dict(self._info.labels or {})

    @property
    def info(self) -> SessionInfo:
        """What was last heard of it: at its birth, or by `refresh`."""
        return self._info

    async def refresh(self) -> Self:
        """Itself, with `info` as it is now."""
        self._info = await self._transport.ask(Call(method="GET", path=self._path), SessionInfo)
        return self

    @property
    def _path(self) -> str:
        return f"/sessions/{part(self.id)}"

    def __repr__(self) -> str:
        return f"<session {self.id} of {self.template_id or '?'}: {self._info.phase}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AsyncHandle) and other.id == self.id

    def __hash__(self) -> int:
        return hash(self.id)
