"""List and watch: what is there now, then every change, for as long as somebody listens.

A watch can lose deletions, because a server that has forgotten where we were can only list anew. So each
list is handed on as one event, `Listed`, and the consumer compares it with what it knows.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Generic, TypeAlias

import msgspec

from forktree.kube import errors
from forktree.kube.client import KubeClient, ObjectT, decode, selectors

log = logging.getLogger(__name__)

_LONGEST_EVENT_BYTES = 8 << 20
"""A server keeps no object above 1.5 MiB; more than this without a line's end is not a watch."""


@dataclass(frozen=True, slots=True)
class Listed(Generic[ObjectT]):
    """Everything in view at one instant. What was in view before and is not here has left meanwhile."""

    objects: tuple[ObjectT, ...]
    resource_version: str
    unreadable: int = 0
    """Objects that are there but that this version cannot read: with any, absence here proves nothing."""


@dataclass(frozen=True, slots=True)
class Changed(Generic[ObjectT]):
    """The object came into view or changed."""

    obj: ObjectT


@dataclass(frozen=True, slots=True)
class Deleted(Generic[ObjectT]):
    """The object left the view, in its last state. With a field selector it may well live on: ask for it."""

    obj: ObjectT


Event: TypeAlias = Listed[ObjectT] | Changed[ObjectT] | Deleted[ObjectT]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How a watch waits."""

    first_retry_seconds: float = 0.05
    """After the first failure; doubled for each further one. An API server is back within seconds."""
    longest_retry_seconds: float = 5.0
    inactivity_seconds: float = 75.0
    """Without a byte. A server sends a bookmark every minute, so silence means a dead connection."""
    stream_seconds: int = 300
    """After which the server ends a healthy stream, so that clients spread over its replicas again."""


class _Envelope(msgspec.Struct):
    type: str
    object: msgspec.Raw


class _Meta(msgspec.Struct, rename="camel"):
    resource_version: str


class _Bookmark(msgspec.Struct):
    metadata: _Meta


class _Backoff:
    """Growing waits with jitter, so that all agents do not come back in the same instant."""

    def __init__(self, pace: Pace) -> None:
        self._pace, self._seconds = pace, pace.first_retry_seconds

    def reset(self) -> None:
        self._seconds = self._pace.first_retry_seconds

    async def wait(self, kind: str, error: errors.KubeError) -> None:
        seconds = max(self._seconds * random.uniform(0.5, 1.0), error.retry_after_seconds or 0.0)
        self._seconds = min(self._seconds * 2, self._pace.longest_retry_seconds)
        log.warning("watch_interrupted kind=%s retry_seconds=%.2f error=%s", kind, seconds, error)
        await asyncio.sleep(seconds)


async def watch(
    client: KubeClient,
    model: type[ObjectT],
    *,
    namespace: str | None = None,
    field_selector: str | None = None,
    label_selector: str | None = None,
    pace: Pace = Pace(),
) -> AsyncGenerator[Event[ObjectT]]:
    """All matching objects, then every change to them. Never ends by itself and raises no `KubeError`.

    The first event is `Listed`, and so is the first after every gap; between two of them nothing is missed,
    and nothing comes twice out of order. Leave it by cancelling, or close it with `contextlib.aclosing`.
    """
    backoff = _Backoff(pace)
    narrowed = selectors(field_selector, label_selector)
    while True:
        try:
            raws, version = await client.list_raw(
                model, namespace, field_selector=field_selector, label_selector=label_selector
            )
        except errors.KubeError as err:
            await backoff.wait(model.resource.kind, err)
            continue
        objects = [obj for raw in raws if (obj := _readable(model, raw)) is not None]
        yield Listed(tuple(objects), version, unreadable=len(raws) - len(objects))
        async with aclosing(
            _follow(client, model, namespace, narrowed, version, pace=pace, backoff=backoff)
        ) as changes:
            async for change in changes:
                yield change
        log.info("watch_relists kind=%s", model.resource.kind)


async def _follow(
    client: KubeClient,
    model: type[ObjectT],
    namespace: str | None,
    narrowed: dict[str, str],
    version: str,
    *,
    pace: Pace,
    backoff: _Backoff,
) -> AsyncGenerator[Changed[ObjectT] | Deleted[ObjectT]]:
    """Changes since `version`, over as many connections as it takes; ends if the server has forgotten it."""
    path = model.collection_path(namespace)
    while True:
        query = {
            **narrowed,
            "watch": "true",
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(pace.stream_seconds),
        }
        told = False
        try:
            async with client.stream(path, query, inactivity_seconds=pace.inactivity_seconds) as pieces:
                async for envelope in _envelopes(pieces):
                    if envelope.type == "ERROR":
                        raise _error_in(envelope.object)
                    told = True
                    backoff.reset()
                    version = _version_in(envelope.object)
                    if envelope.type == "BOOKMARK":
                        continue
                    obj = _readable(model, envelope.object)
                    if obj is not None:
                        yield Deleted(obj) if envelope.type == "DELETED" else Changed(obj)
            if not told:
                # A proxy that accepts and hangs up must not be asked as fast as it does so.
                raise errors.Unavailable(f"the stream of {path} ended without an event")
        except errors.Expired:
            return
        except errors.KubeError as err:
            await backoff.wait(model.resource.kind, err)


async def _envelopes(pieces: AsyncIterator[bytes]) -> AsyncGenerator[_Envelope]:
    """The events in a stream. A line that a broken connection cut off is dropped: it comes again."""
    decoder = msgspec.json.Decoder(_Envelope)
    rest = bytearray()
    async for piece in pieces:
        rest += piece
        *lines, tail = rest.split(b"\n")
        rest = tail
        if len(rest) > _LONGEST_EVENT_BYTES:
            raise errors.Unreadable(f"an event has no end within {_LONGEST_EVENT_BYTES} bytes")
        for line in lines:
            if line.strip():
                try:
                    yield decoder.decode(line)
                except msgspec.MsgspecError as err:
                    raise errors.Unreadable(f"an event is no watch event: {err}") from err


def _readable(model: type[ObjectT], raw: msgspec.Raw) -> ObjectT | None:
    try:
        return decode(model, raw)
    except errors.Unreadable as err:
        # One bad object must not stop everybody else's. It is still there: its writer is of another version.
        log.error("object_unreadable kind=%s name=%s error=%s", model.resource.kind, _name_in(raw), err)  # noqa: TRY400
        return None


def _version_in(raw: msgspec.Raw) -> str:
    try:
        return msgspec.json.decode(raw, type=_Bookmark).metadata.resource_version
    except msgspec.MsgspecError as err:
        raise errors.Unreadable(f"an event has no resource version: {err}") from err


class _Named(msgspec.Struct):
    name: str = ""
    namespace: str = ""


class _NamedObject(msgspec.Struct):
    metadata: _Named


def _name_in(raw: msgspec.Raw) -> str:
    try:
        metadata = msgspec.json.decode(raw, type=_NamedObject).metadata
    except msgspec.MsgspecError:
        return "?"
    return f"{metadata.namespace}/{metadata.name}"


class _Code(msgspec.Struct):
    code: int = 500


def _error_in(raw: msgspec.Raw) -> errors.KubeError:
    try:
        code = msgspec.json.decode(raw, type=_Code).code
    except msgspec.MsgspecError:
        code = 500
    return errors.from_answer(code, bytes(raw))
