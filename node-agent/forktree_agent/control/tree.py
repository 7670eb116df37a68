"""The trees of this node: what hangs below what, and what is to go with a deleted object. Pure.

A machine is ended because of this table, at once and without asking anybody, so the table errs on the side
of living: an object goes with another only while its own newest version says that it hangs below it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, replace

from forktree.models import GROUP, Fork, Session, Uid

ENDS_REMEMBERED = 8192
"""Deleted objects that are remembered, for what is told of their dependents later. More than any cascade
has between the events of its two watches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Which object, by all that is needed to ask the API server for it."""

    kind: type[Session] | type[Fork]
    namespace: str
    name: str
    uid: Uid


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """An object's place, what it hangs below, and whether it is to go."""

    place: Place
    above: Uid | None
    doomed_at: float | None = None
    """When it or something above it was seen to be deleted, in the caller's clock. There is no way back."""


class Tree:
    """All known objects of this node by uid."""

    def __init__(self) -> None:
        self._nodes: dict[Uid, Node] = {}
        self._below: dict[Uid, set[Uid]] = {}
        self._ends: OrderedDict[Uid, bool] = OrderedDict()

    def get(self, uid: Uid) -> Node | None:
        return self._nodes.get(uid)

    def nodes(self) -> tuple[Node, ...]:
        return tuple(self._nodes.values())

    def doomed(self, uid: Uid) -> bool:
        """It is deleted, or something above it is. True also for what was dropped lately."""
        node = self._nodes.get(uid)
        return uid in self._ends if node is None else node.doomed_at is not None

    def below(self, uid: Uid) -> tuple[Node, ...]:
        """What hangs directly below."""
        return tuple(self._nodes[each] for each in self._below.get(uid, ()))

    def place(self, place: Place, above: Place | None, *, now: float) -> tuple[Node, ...]:
        """Enter an object, or move it below another. What it hangs below need not be known yet.

        Returns what thereby becomes doomed, the object first: where what it hangs below is.
        """
        old = self._nodes.get(place.uid)
        if old is None and place.uid in self._ends:
            return ()
        if above is not None and self._ends.get(above.uid) is True:
            above = None  # Deleted with its dependents left alive; this version of the object is an old one.
        if above is not None and above.uid not in self._nodes and above.uid not in self._ends:
            self._nodes[above.uid] = Node(place=above, above=None)
        self._cut(place.uid)
        self._nodes[place.uid] = Node(
            place=place,
            above=None if above is None else above.uid,
            doomed_at=None if old is None else old.doomed_at,
        )
        if above is None:
            return ()
        self._below.setdefault(above.uid, set()).add(place.uid)
        return self._doom(place.uid, now) if self.doomed(above.uid) else ()

    def end(self, uid: Uid, *, orphaning: bool, now: float) -> tuple[Node, ...]:
        """The object is deleted: doom it and, unless they are to live on, all below it.

        Returns those doomed by this call, the object itself first; nothing where it was doomed before.
        """
        node = self._nodes.get(uid)
        self._ends[uid] = orphaning
        self._ends.move_to_end(uid)
        while len(self._ends) > ENDS_REMEMBERED:
            self._ends.popitem(last=False)
        if node is None:
            return ()
        if orphaning:
            for each in tuple(self._below.get(uid, ())):
                self._cut(each)
        return self._doom(uid, now)

    def drop(self, uid: Uid) -> None:
        """Nothing of it is left, neither object nor machine. Those still below it keep their place."""
        self._cut(uid)
        self._nodes.pop(uid, None)

    def _doom(self, uid: Uid, now: float) -> tuple[Node, ...]:
        doomed: list[Node] = []
        for each in self._subtree(uid):
            node = self._nodes[each]
            if node.doomed_at is None:
                node = self._nodes[each] = replace(node, doomed_at=now)
                doomed.append(node)
        return tuple(doomed)

    def _subtree(self, uid: Uid) -> Iterator[Uid]:
        """Top down. Owners given by hand can form a ring, so each is visited once."""
        seen = {uid}
        waiting = [uid]
        while waiting:
            each = waiting.pop()
            yield each
            fresh = self._below.get(each, set()) - seen
            seen |= fresh
            waiting.extend(fresh)

    def _cut(self, uid: Uid) -> None:
        node = self._nodes.get(uid)
        if node is None or node.above is None:
            return
        siblings = self._below.get(node.above, set())
        siblings.discard(uid)
        if not siblings:
            self._below.pop(node.above, None)
        self._nodes[uid] = replace(node, above=None)


def place_of(item: Session | Fork) -> Place:
    return Place(
        kind=type(item),
        namespace=item.metadata.namespace or "",
        name=item.metadata.name,
        uid=item.metadata.uid,
    )


def owner_place(item: Session | Fork) -> Place | None:
    """What the object itself says it hangs below. A root's owners are its user's and do not count."""
    if isinstance(item, Session) and item.spec.template_ref is not None:
        return None
    kinds: dict[str, type[Session] | type[Fork]] = {"Session": Session, "Fork": Fork}
    for owner in item.metadata.owner_references:
        kind = kinds.get(owner.kind)
        if kind is not None and owner.api_version.startswith(f"{GROUP}/"):
            return Place(kind=kind, namespace=item.metadata.namespace or "", name=owner.name, uid=owner.uid)
    return None
