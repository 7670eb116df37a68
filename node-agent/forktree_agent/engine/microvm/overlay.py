"""Layers seen through each other (pure): whose page is the newest, and one layer in place of several."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from forktree_agent.engine.microvm.layers import PAGE_BYTES, TARGET_RUNS, Run

MAX_LAYERS = 8
"""Above a baseline, before some of them are merged. Each costs a child its mappings before it can run."""
MAX_RUNS = 2000
"""Of all layers above a baseline together, likewise: some 10 ms of a child's preparation."""
MAX_OVERSIZE = 4
"""How many times larger a layer may be than all that is merged on top of it. A larger one is left alone: to
copy much for little over and over would take more than the mappings that it saves. With 4 a page is copied
8 times in 2,000 forks that each write other pages, with 2 and with no bound more than 100 times."""
GAP_PAGES = 4
"""Pages of older layers that are copied as well to join two runs."""


class Piece(NamedTuple):
    """Guest pages that lie together in one of several layers."""

    page: int
    pages: int
    layer: int
    """By index, oldest first."""
    offset: int
    """Where the first page lies in that layer, in bytes."""

    @property
    def end(self) -> int:
        return self.page + self.pages

    def cut(self, start: int, end: int) -> Piece:
        """The part from page `start` up to `end`."""
        return Piece(start, end - start, self.layer, self.offset + (start - self.page) * PAGE_BYTES)


class Extent(NamedTuple):
    """Guest pages in a row, wherever they lie."""

    page: int
    end: int


def merge_due(layers: Sequence[tuple[int, int]]) -> int:
    """How many of the newest layers to merge into one; 0: none.

    `layers` has the bytes and the runs of each, oldest first. A layer is taken in while
    it is not much larger than what lies on top of it, so that over many forks a page is copied again some few
    times, not each time.
    """
    taken, size = 0, 0
    for size_bytes, _ in reversed(layers):
        if taken and size_bytes > MAX_OVERSIZE * size:
            break
        taken, size = taken + 1, size + size_bytes
    if len(layers) > MAX_LAYERS:
        return max(taken, len(layers) // 2 + 1)
    return taken if taken > 1 and sum(runs for _, runs in layers) > MAX_RUNS else 0


def seen_through(tables: Iterable[Sequence[Run]]) -> list[Piece]:
    """What is seen of layers laid over each other, oldest first, by ascending page."""
    seen: list[Piece] = []
    for layer, table in enumerate(tables):
        newest = [Piece(run.page, run.pages, layer, run.offset) for run in table]
        seen = sorted([*_uncovered(seen, newest), *newest])
    return seen


def extents_of(pieces: Sequence[Piece], *, target_runs: int = TARGET_RUNS) -> list[Extent]:
    """The pieces joined over small gaps; over wider ones while there are too many, up to twice the pages."""
    most = 2 * sum(piece.pages for piece in pieces)
    gap = GAP_PAGES
    joined = _joined(pieces, gap)
    while len(joined) > target_runs:
        gap *= 2
        wider = _joined(pieces, gap)
        if sum(extent.end - extent.page for extent in wider) > most:
            break
        joined = wider
    return joined


def within(pieces: Sequence[Piece], extents: Sequence[Extent]) -> list[Piece]:
    """What of the pieces lies in the extents. Both ascend, and neither overlaps itself."""
    inside: list[Piece] = []
    at = 0
    for extent in extents:
        while at < len(pieces) and pieces[at].end <= extent.page:
            at += 1
        look = at
        while look < len(pieces) and pieces[look].page < extent.end:
            piece = pieces[look]
            inside.append(piece.cut(max(piece.page, extent.page), min(piece.end, extent.end)))
            look += 1
    return inside


def packed(extents: Iterable[Extent]) -> list[Run]:
    """A run for each extent, one behind the other from offset 0."""
    runs: list[Run] = []
    offset = 0
    for extent in extents:
        pages = extent.end - extent.page
        runs.append(Run(extent.page, pages, offset))
        offset += pages * PAGE_BYTES
    return runs


def _joined(pieces: Sequence[Piece], gap: int) -> list[Extent]:
    joined: list[Extent] = []
    for piece in pieces:
        if joined and piece.page <= joined[-1].end + gap:
            joined[-1] = Extent(joined[-1].page, piece.end)
        else:
            joined.append(Extent(piece.page, piece.end))
    return joined


def _uncovered(older: Sequence[Piece], newer: Sequence[Piece]) -> Iterator[Piece]:
    """What of `older` no piece of `newer` lies over. Both ascend, and neither overlaps itself."""
    at = 0
    for piece in older:
        start = piece.page
        while at < len(newer) and newer[at].end <= start:
            at += 1
        look = at
        while look < len(newer) and newer[look].page < piece.end:
            if newer[look].page > start:
                yield piece.cut(start, newer[look].page)
            start = max(start, newer[look].end)
            look += 1
        if start < piece.end:
            yield piece.cut(start, piece.end)
