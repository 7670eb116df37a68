"""When something was last done in each session: a command or a fork. In memory only.

After a restart nothing is known, and what is first seen counts as active then: a clock may run too long for
that, and never too short.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import contextmanager

from forktree.models import Uid


class Activity:
    """By uid, of sessions and of forks that were forked again."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last: dict[Uid, float] = {}
        self._busy: Counter[Uid] = Counter()
        self._commands: Counter[Uid] = Counter()

    def touch(self, uid: Uid) -> None:
        """Something was done in it just now."""
        self._last[uid] = self._clock()

    def began_command(self, uid: Uid) -> None:
        """One more was begun in it."""
        self._commands[uid] += 1

    def commands(self, uid: Uid) -> int:
        """How many were begun in it."""
        return self._commands[uid]

    def idle_seconds(self, uid: Uid) -> float | None:
        """Since when nothing was done in it. None: nothing was, as far as is known."""
        if uid in self._busy:
            return 0.0
        last = self._last.get(uid)
        return None if last is None else self._clock() - last

    @contextmanager
    def during(self, uid: Uid) -> Generator[None]:
        """Something is being done in it, which may take longer than it may be idle."""
        self._busy[uid] += 1
        try:
            yield
        finally:
            self._busy[uid] -= 1
            if not self._busy[uid]:
                del self._busy[uid]
            self.touch(uid)

    def of(self, live: Collection[Uid], known: Callable[[Uid], bool]) -> Mapping[Uid, float]:
        """When each was last active; now, for what is busy and for those `live` that were never seen before.

        Forgets what is not `known` any more.
        """
        now = self._clock()
        self._last = {uid: at for uid, at in self._last.items() if known(uid)}
        self._commands = Counter({uid: number for uid, number in self._commands.items() if known(uid)})
        for uid in live:
            self._last.setdefault(uid, now)
        return {**self._last, **dict.fromkeys(self._busy, now)}
