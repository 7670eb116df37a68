"""What waits for something else than its own object: for room, or for a source to run. In memory only.

After a restart everything asks again, so nothing of this needs to survive.
"""

from __future__ import annotations

from dataclasses import dataclass

from forktree.models import Uid


@dataclass(frozen=True, slots=True)
class SourceName:
    """The name by which a Fork asks for its source."""

    kind: str
    namespace: str
    name: str


class Waiting:
    """Who waits for what, and since when."""

    def __init__(self) -> None:
        self._room: dict[Uid, float] = {}
        self._source: dict[Uid, tuple[SourceName, float]] = {}
        self._interest: dict[SourceName, set[Uid]] = {}

    def for_room(self, uid: Uid, now: float) -> float:
        """`uid` was refused for lack of room. Returns since when it waits for it."""
        return self._room.setdefault(uid, now)

    def lacks_room(self, uid: Uid) -> bool:
        """Whether `uid` waits for room."""
        return uid in self._room

    def for_source(self, uid: Uid, source: SourceName, now: float) -> float:
        """`uid` needs `source` to become something else. Returns since when it waits for it."""
        self._interest.setdefault(source, set()).add(uid)
        _, since = self._source.setdefault(uid, (source, now))
        return since

    def over(self, uid: Uid) -> None:
        """`uid` waits no longer, whatever came of it."""
        self._room.pop(uid, None)
        source, _ = self._source.pop(uid, (None, 0.0))
        if source is not None:
            interested = self._interest.get(source, set())
            interested.discard(uid)
            if not interested:
                self._interest.pop(source, None)

    def on_room(self) -> tuple[Uid, ...]:
        """All that wait for room, the longest first."""
        return tuple(sorted(self._room, key=self._room.__getitem__))

    def on_source(self, source: SourceName) -> tuple[Uid, ...]:
        """All that wait for this source."""
        return tuple(self._interest.get(source, ()))
