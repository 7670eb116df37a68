"""Taking back an object that a failed or abandoned request made."""

from __future__ import annotations

import asyncio
import logging

from forktree.errors import ForktreeError
from forktree.kube.client import KubeClient
from forktree.kube.errors import Conflict, NotFound
from forktree.models import Fork, Session

log = logging.getLogger(__name__)


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
