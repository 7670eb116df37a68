"""The objects of this node as they were last seen, and waiting for what they will say.

A store holds the newest version by uid, whether it came from a watch or from an answer to our own write, so
that a decision is never made on something older than what we wrote ourselves.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import ClassVar, Generic, TypeVar

from forktree.errors import ForktreeError
from forktree.models import Fork, Reason, Session, SessionTemplate, Uid

Kind = TypeVar("Kind", Session, Fork, SessionTemplate)

GONE_REMEMBERED = 8192
"""Uids of deleted objects that are remembered, so that a late answer does not bring one back. Older ones
are found out by the sweep."""


class ObjectGone(ForktreeError):
    """The object was deleted before it got there."""

    reason: ClassVar[Reason] = Reason.SOURCE_GONE


class Store(Generic[Kind]):
    """Objects of one kind, newest version of each."""

    def __init__(self) -> None:
        self._by_uid: dict[Uid, Kind] = {}
        self._uids: dict[tuple[str, str], Uid] = {}
        self._gone: OrderedDict[Uid, None] = OrderedDict()
        self._waiting: dict[Uid, list[asyncio.Future[Kind | None]]] = {}

    def get(self, uid: Uid) -> Kind | None:
        return self._by_uid.get(uid)

    def named(self, namespace: str, name: str) -> Kind | None:
        """The object that has the name now."""
        uid = self._uids.get((namespace, name))
        return None if uid is None else self._by_uid.get(uid)

    def all(self) -> tuple[Kind, ...]:
        return tuple(self._by_uid.values())

    def gone(self, uid: Uid) -> bool:
        """Whether this object is known to be deleted. False may also mean: never heard of."""
        return uid in self._gone

    def observe(self, new: Kind) -> bool:
        """Take in a version of an object. Returns False for one that is outdated, or of a deleted object."""
        uid = new.metadata.uid
        if uid in self._gone:
            return False
        old = self._by_uid.get(uid)
        if old is not None and _version(new) < _version(old):
            return False
        self._by_uid[uid] = new
        self._uids[_name(new)] = uid
        self._tell(uid, new)
        return True

    def forget(self, uid: Uid) -> Kind | None:
        """The object is deleted, for good: a uid does not come back. Returns its last version."""
        self._gone[uid] = None
        while len(self._gone) > GONE_REMEMBERED:
            self._gone.popitem(last=False)
        old = self._by_uid.pop(uid, None)
        if old is not None and self._uids.get(_name(old)) == uid:
            del self._uids[_name(old)]
        self._tell(uid, None)
        return old

    async def when(self, uid: Uid, there: Callable[[Kind], bool], *, deadline: float) -> Kind:
        """The object as soon as `there` holds for it. It need not have been seen yet.

        Raises `ObjectGone` once it is deleted, and `TimeoutError` at `deadline`.
        """
        async with asyncio.timeout_at(deadline):
            while True:
                seen = self._by_uid.get(uid)
                if seen is not None and there(seen):
                    return seen
                if uid in self._gone:
                    raise ObjectGone("the object was deleted meanwhile")
                await self._change(uid)

    async def _change(self, uid: Uid) -> None:
        waiting: asyncio.Future[Kind | None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(uid, []).append(waiting)
        try:
            await waiting
        finally:
            others = self._waiting.get(uid, [])
            if waiting in others:
                others.remove(waiting)
            if not others:
                self._waiting.pop(uid, None)

    def _tell(self, uid: Uid, new: Kind | None) -> None:
        for waiting in self._waiting.pop(uid, []):
            if not waiting.done():
                waiting.set_result(new)


def _name(item: Session | Fork | SessionTemplate) -> tuple[str, str]:
    return (item.metadata.namespace or "", item.metadata.name)


def _version(item: Session | Fork | SessionTemplate) -> int:
    # The API server promises that versions of one kind are whole numbers that grow.
    return int(item.metadata.resource_version or 0)
