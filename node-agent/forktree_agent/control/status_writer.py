"""Writing a status: all of it at once, made on the newest version that is known.

Every write carries the version it was decided on. So it can neither hit another object of the same name nor
overwrite a final phase that this agent has not seen yet.
"""

from __future__ import annotations

import logging
from typing import TypeVar

from forktree.errors import ForktreeError
from forktree.kube.client import KubeClient
from forktree.kube.errors import Conflict, NotFound
from forktree.models import Fork, ForkStatus, Reason, Session, SessionStatus

log = logging.getLogger(__name__)

Kind = TypeVar("Kind", Session, Fork)


class Outdated(ForktreeError):
    """The object changed meanwhile. Its newer version is needed before anything is decided."""

    reason = Reason.INTERNAL
    retryable = True


class Vanished(ForktreeError):
    """The API server does not know the object any more; whether it is deleted, the sweep finds out."""

    reason = Reason.SOURCE_GONE


class StatusWriter:
    """Writes statuses of Sessions and Forks."""

    def __init__(self, client: KubeClient) -> None:
        self._client = client

    async def write(self, item: Kind, status: SessionStatus | ForkStatus) -> Kind:
        """Make `status` the status of `item`, and return the object as it then is.

        Raises `Vanished`, `Outdated` (with the newer version fetched by `newest`), and other `KubeError`s;
        after `Unavailable` it may have been written, and the next version seen tells.
        """
        try:
            return await self._client.replace_status(item, status)
        except NotFound as err:
            raise Vanished(f"{item.kind} {item.metadata.name} is not there: {err.message}") from err
        except Conflict as err:
            raise Outdated(f"{item.kind} {item.metadata.name} changed meanwhile") from err

    async def newest(self, item: Kind) -> Kind:
        """The object as it is now. Raises `Vanished`, also where another object has its name."""
        try:
            current = await self._client.get(type(item), item.metadata.namespace, item.metadata.name)
        except NotFound as err:
            raise Vanished(f"{item.kind} {item.metadata.name} is not there: {err.message}") from err
        if current.metadata.uid != item.metadata.uid:
            raise Vanished(f"{item.kind} {item.metadata.name} is another object now")
        return current
