# Generated from sdk/forktree/_async/ports.py by `make generate`; change that file.
"""Servers inside a session."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from forktree._forwarding import Address, Told, forwarding
from forktree._results import part
from forktree._sync.handle import Handle
from forktree.errors import ClientError


class Ports(Handle):
    """What can be asked of those that its template declares under `ports`, by name or number."""

    def url(self, port: str | int) -> str:
        """Where a server is reached by HTTP. Each request there needs a token, which `client.reach()` has: it
        goes to the agent and never to the server."""
        reach = self._transport.reach()
        return f"{reach.url}{self._port(port)}/"

    @contextmanager
    def forward(
        self, port: str | int, local_port: int = 0, *, host: str = "127.0.0.1", told: Told | None = None
    ) -> Generator[Address]:
        """For a `with` block: a port of this machine (0: any that is free) whose connections lead to the
        server inside. No token is needed there, so whoever can connect to it can use the server.

        `told` hears why a connection could not be made; it is reset then. Raises `BadSettings` where nobody
        can listen there.
        """
        local = Address(host, local_port)
        path = self._port(port)
        with forwarding(self._transport.reach, path, local, told or _unheard) as address:
            yield address

    def _port(self, port: str | int) -> str:
        return f"{self._path}/ports/{part(str(port))}"


def _unheard(_: ClientError) -> None:
    """Whoever connects sees that it is reset."""
