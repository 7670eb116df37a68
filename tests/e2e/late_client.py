"""An agent that learns and writes late: what comes between two steps of it is the test's to choose."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from e2e.control_rig import ControlRig
from forktree.kube.access import ClusterAccess
from forktree.kube.client import KubeClient
from forktree.kube.errors import Unavailable
from forktree.models import ApiObject, Session

ObjectT = TypeVar("ObjectT", bound=ApiObject)


class LateClient(KubeClient):
    """What it is told and does waits: watches for `telling`, creations for `creating`, statuses for
    `applying`, lists of sessions for `listed`.

    While `refusing`, no list of sessions succeeds, and `refused` is set by each that was tried. While `full`,
    no creation does.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.telling = asyncio.Event()
        self.telling.set()
        self.listing = asyncio.Event()
        self.listed = asyncio.Event()
        self.listed.set()
        self.creating = asyncio.Event()
        self.creating.set()
        self.applying = asyncio.Event()
        self.applying.set()
        self.refusing = False
        self.full = False
        self.refused = asyncio.Event()

    async def create(
        self, obj: ObjectT, *, manager: str | None = None, deadline: float | None = None
    ) -> ObjectT:
        await self.creating.wait()
        if self.full:
            raise Unavailable("full")
        return await super().create(obj, manager=manager, deadline=deadline)

    async def apply(self, *arguments: Any, **options: Any) -> Any:
        await self.applying.wait()
        return await super().apply(*arguments, **options)

    async def list_raw(self, model: type[ApiObject], *arguments: Any, **options: Any) -> Any:
        if model is Session and self.refusing:
            self.refused.set()
            raise Unavailable("away")
        answer = await super().list_raw(model, *arguments, **options)
        if model is Session and not self.listed.is_set():
            self.listing.set()
            await self.listed.wait()
        return answer

    @asynccontextmanager
    async def stream(
        self, path: str, query: Mapping[str, str], *, inactivity_seconds: float
    ) -> AsyncGenerator[AsyncIterator[bytes]]:
        async with super().stream(path, query, inactivity_seconds=inactivity_seconds) as pieces:
            yield self._late(pieces)

    async def _late(self, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        async for piece in pieces:
            await self.telling.wait()
            yield piece


@asynccontextmanager
async def late_agent(rig: ControlRig) -> AsyncGenerator[LateClient]:
    """Control of `rig` begun anew with such a client, until left."""
    await rig.stop()
    access = ClusterAccess.from_kubeconfig(rig.folder / "agent.kubeconfig")
    async with LateClient.connected(access) as late:
        assert isinstance(late, LateClient)
        await rig.start(late)
        yield late
        await rig.stop()
