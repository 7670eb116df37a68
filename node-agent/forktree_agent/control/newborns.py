"""Children whose machines run and whose objects are not written yet, and why some never got one.

In memory only: the first are in the journal with their fork, and of the others the next agent knows no more
than that there is no such session.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from forktree.models import Session, Uid
from forktree_agent.control.records import ForkRecord

REFUSALS_REMEMBERED = 4096
"""Names of children that came to nothing, each with a sentence."""

_Name = tuple[str, str]


@dataclass(slots=True)
class Newborn:
    """Which child of which fork a name is. The fork is called otherwise once its object is there."""

    fork: Uid
    index: int
    over: asyncio.Event = field(default_factory=asyncio.Event)
    """It has its object, or will never have one."""


class Newborns:
    """By namespace and name."""

    def __init__(self) -> None:
        self._newborns: dict[_Name, Newborn] = {}
        self._refused: OrderedDict[_Name, str] = OrderedDict()

    def find(self, namespace: str, name: str) -> Newborn | None:
        return self._newborns.get((namespace, name))

    def why_gone(self, namespace: str, name: str) -> str | None:
        """Why the child of that name, which somebody may have been told of, is there no longer."""
        return self._refused.get((namespace, name))

    def known(self, record: ForkRecord, indexes: Iterable[int]) -> None:
        """These children of a fork run without an object. The fork may have been known by another uid."""
        for index in indexes:
            name = (record.namespace, record.child_name(index))
            newborn = self._newborns.get(name)
            if newborn is None:
                self._newborns[name] = Newborn(record.uid, index)
            else:
                newborn.fork = record.uid

    def recorded(self, session: Session) -> None:
        """Its object is written."""
        self._over((session.metadata.namespace or "", session.metadata.name))

    def refused(self, record: ForkRecord, why: str, indexes: Iterable[int] | None = None) -> None:
        """These children, or all that have no object yet, will never have one."""
        if indexes is None:
            indexes = range(0 if record.result is None else len(record.result.children))
        for index in indexes:
            name = (record.namespace, record.child_name(index))
            if self._over(name):
                self._refused[name] = why
        while len(self._refused) > REFUSALS_REMEMBERED:
            self._refused.popitem(last=False)

    def _over(self, name: _Name) -> bool:
        newborn = self._newborns.pop(name, None)
        if newborn is not None:
            newborn.over.set()
        return newborn is not None
