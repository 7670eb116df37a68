"""Whether an operator is worth keeping, for the kubelet that looks after its pod.

`/healthz` answers 503 when a round of its work has stood still: the loop answers then, but nothing is
decided any more, and starting again is what helps. An API server that is away is no such reason, since a new
process could not do more. `/readyz` says besides whether the API server has told it who leads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator
from contextlib import AbstractAsyncContextManager, contextmanager

from aiohttp import web

from forktree.plain_http import serving_plainly

STILL_SECONDS = 120.0
"""Each step of a round asks the API server a few times, for 10 s at most. Who has taken so long for one step
will not come to its end."""


class Health:
    """One operator's. All methods belong to one event loop."""

    def __init__(self) -> None:
        self._progressed_at: float | None = None
        """Loop time; None between two rounds, which may be as far apart as they like."""
        self.knows_leader = False
        """Set by the election: whether the API server's last answer could be had."""

    @contextmanager
    def round(self) -> Generator[None]:
        """Within, `progressed` is called again and again."""
        self.progressed()
        try:
            yield
        finally:
            self._progressed_at = None

    def progressed(self) -> None:
        self._progressed_at = asyncio.get_running_loop().time()

    def trouble(self) -> str | None:
        """Why this process should be started again, as a sentence."""
        if self._progressed_at is None:
            return None
        still = asyncio.get_running_loop().time() - self._progressed_at
        return f"the sweep has stood still for {still:.0f} s" if still > STILL_SECONDS else None

    def unready(self) -> str | None:
        """Why it is of no use yet, or no more."""
        return self.trouble() or (None if self.knows_leader else "the API server has not said who leads")


def serving_health(address: tuple[str, int] | None, health: Health) -> AbstractAsyncContextManager[int]:
    """Serve it inside the block, at the port that is yielded. None: do not; then it is 0.

    Raises `CannotListen`.
    """
    app = web.Application(client_max_size=0)
    app.router.add_get("/healthz", _page(health.trouble))
    app.router.add_get("/readyz", _page(health.unready))
    return serving_plainly(app, address, "health")


def _page(asked: Callable[[], str | None]) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def get(_: web.Request) -> web.StreamResponse:
        sentence = asked()
        return web.Response(text=f"{sentence or 'ok'}\n", status=503 if sentence else 200)

    return get
