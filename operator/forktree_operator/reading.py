"""Lists that one bad object cannot hide."""

from __future__ import annotations

import logging
from typing import TypeVar

from forktree.kube.client import KubeClient, decode
from forktree.kube.errors import Unreadable
from forktree.models.base import ApiObject

log = logging.getLogger(__name__)

ObjectT = TypeVar("ObjectT", bound=ApiObject)


async def readable(
    client: KubeClient, model: type[ObjectT], *, field_selector: str | None = None
) -> list[ObjectT]:
    """All matching objects of all namespaces that this version can read, oldest first. Raises `KubeError`."""
    raws, _ = await client.list_raw(model, field_selector=field_selector)
    objects: list[ObjectT] = []
    for raw in raws:
        try:
            objects.append(decode(model, raw))
        except Unreadable as err:
            log.warning("object_unreadable kind=%s error=%s", model.resource.kind, err)
    return sorted(objects, key=_age_order)


def _age_order(each: ApiObject) -> tuple[float, str]:
    created = each.metadata.creation_timestamp
    return (created.timestamp() if created else float("inf"), each.metadata.uid)
