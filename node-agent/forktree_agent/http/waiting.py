"""Waiting for an object until it says what the caller of the API wants to know."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from typing import TypeVar

from forktree.kube.client import KubeClient
from forktree.kube.watching import Changed, Deleted, Listed, watch
from forktree.models import Fork, Session

Awaited = TypeVar("Awaited", Session, Fork)


class Vanished(Exception):
    """The object was deleted, or replaced by another of its name, before it got there."""


async def until(
    client: KubeClient, seen: Awaited, there: Callable[[Awaited], bool], *, deadline: float
) -> Awaited:
    """The object of `seen`'s uid as soon as `there` holds for it.

    Raises `Vanished`, and `TimeoutError` at `deadline` (loop time).
    """
    if there(seen):
        return seen
    kind, metadata = type(seen), seen.metadata
    async with asyncio.timeout_at(deadline):
        events = watch(
            client,
            kind,
            namespace=metadata.namespace,
            field_selector=f"metadata.name={metadata.name}",
        )
        async with aclosing(events):
            async for event in events:
                match event:
                    case Listed(unreadable=unreadable) if unreadable:
                        continue  # It may be there and be what we cannot read.
                    case Listed(objects=objects):
                        current = next((each for each in objects if each.metadata.uid == metadata.uid), None)
                    case Changed(obj=changed):
                        current = changed if changed.metadata.uid == metadata.uid else None
                    case Deleted():
                        current = None
                if current is None:
                    raise Vanished
                if there(current):
                    return current
    raise AssertionError("a watch ends only by being left")
