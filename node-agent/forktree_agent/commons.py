"""An amount of something that many take from, and of which nobody takes so much that others get nothing.

Whoever takes may come to hold as much as is then left, or that times a weight. So the first to want all gets
half of it and leaves the other half to whoever comes; two who want all get a third each, and a third is left.
What nobody holds is lent to who needs it, and no list of who there is has to be kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping


class Commons:
    """So much of it. Whoever takes gives back what it took, under the same names."""

    def __init__(self, whole: int) -> None:
        self.whole = whole
        self._left = whole
        self._held: Counter[str] = Counter()

    @property
    def held(self) -> int:
        """What all hold together: never more than there is."""
        return self.whole - self._left

    def held_by(self, holder: str) -> int:
        return self._held[holder]

    def take(self, count: int, weights: Mapping[str, float]) -> int:
        """How much of `count` is given to these holders, which all count it as theirs.

        Each of them holds at most its weight times what is left afterwards.
        """
        given = min(count, self._left)
        for holder, weight in weights.items():
            # held + given <= weight * (left - given)
            most = (weight * self._left - self._held[holder]) / (1 + weight)
            given = max(0, min(given, int(most)))
        self._left -= given
        for holder in weights:
            self._held[holder] += given
        return given

    def give_back(self, count: int, holders: Iterable[str]) -> None:
        self._left += count
        for holder in holders:
            self._held[holder] -= count
            if not self._held[holder]:
                del self._held[holder]
