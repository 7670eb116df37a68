"""Taking back an object that a failed or abandoned request made."""

from __future__ import annotations

import asyncio
import logging

from forktree.errors import ForktreeError
from forktree.kube.client import KubeClient
from forktree.kube.errors import Conflict, NotFound
from forktree.models import Fork, Session
from forktree_agent.http.naming import FOR_CALLERS

log = logging.getLogger(__name__)


async def created(client: KubeClient, wanted: Session) -> Session:
    """`client.create`, but where this is cancelled before the answer has come, what was made is deleted.

    The API server may have made it by then, and only its answer would tell us.
    """
    making = asyncio.create_task(
        client.create(wanted, manager=FOR_CALLERS), name=f"create-{wanted.metadata.name}"
    )
    try:
        return await asyncio.shield(making)
    except asyncio.CancelledError:
        taking_back = _take_back(client, making)
        await asyncio.shield(asyncio.create_task(taking_back, name=f"take-back-{wanted.metadata.name}"))
        raise


async def _take_back(client: KubeClient, making: asyncio.Task[Session]) -> None:
    try:
        made = await making  # Within the client's own time limit.
    except ForktreeError as err:
        log.info("create_abandoned error=%s", err)
    else:
        await _discard(client, made)


async def discard(client: KubeClient, made: Session | Fork) -> None:
    """Delete exactly `made`, not another object of its name. Runs to its end also while being cancelled.

    What cannot be deleted stays visible as an object; the warning names it.
    """
    await asyncio.shield(asyncio.create_task(_discard(client, made), name=f"discard-{made.metadata.name}"))


async def _discard(client: KubeClient, made: Session | Fork) -> None:
    metadata = made.metadata
    try:
        await client.delete(type(made), metadata.namespace, metadata.name, uid=metadata.uid)
    except (NotFound, Conflict):
        pass
    except ForktreeError as err:
        log.warning(
            "discard_failed kind=%s namespace=%s name=%s error=%s",
            type(made).__name__,
            metadata.namespace,
            metadata.name,
            err,
        )
