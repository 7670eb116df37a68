"""Several layers merged into one, against a model: a list of pages, and each layer written over it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forktree_agent.engine.microvm.layers import PAGE_BYTES, Run
from forktree_agent.engine.microvm.overlay import (
    GAP_PAGES,
    MAX_LAYERS,
    MAX_OVERSIZE,
    MAX_RUNS,
    Piece,
    extents_of,
    merge_due,
    packed,
    seen_through,
    within,
)

RAM_PAGES = 200
Page = tuple[int, int]
"""What is written to a page: which layer did, and as its how manieth page."""


@st.composite
def tables(draw: st.DrawFn) -> list[list[Run]]:
    """Run tables of a baseline, whole and in place, and of some layers over it."""
    layers = [[Run(0, RAM_PAGES, 0)]]
    for _ in range(draw(st.integers(0, 6))):
        written = sorted(draw(st.sets(st.integers(0, RAM_PAGES - 1), max_size=60)))
        layers.append(packed(extents_of([Piece(page, 1, 0, 0) for page in written])))
    return layers


def memory(layers: Sequence[Sequence[Run]]) -> list[Page]:
    """What a machine sees that maps all layers, oldest first."""
    ram: list[Page] = [(-1, -1)] * RAM_PAGES
    for layer, table in enumerate(layers):
        for run in table:
            for i in range(run.pages):
                ram[run.page + i] = (layer, run.offset // PAGE_BYTES + i)
    return ram


def seen(pieces: Sequence[Piece]) -> dict[int, Page]:
    return {
        piece.page + i: (piece.layer, piece.offset // PAGE_BYTES + i)
        for piece in pieces
        for i in range(piece.pages)
    }


@given(tables())
def test_the_newest_layer_of_each_page_is_seen(layers: list[list[Run]]) -> None:
    pieces = seen_through(layers)
    assert seen(pieces) == dict(enumerate(memory(layers)))
    assert all(one.end <= other.page for one, other in pairwise(pieces))


@given(tables(), st.data())
def test_a_merged_layer_shows_what_the_layers_did(layers: list[list[Run]], data: st.DataObject) -> None:
    kept = data.draw(st.integers(1, len(layers)))
    extents = extents_of(seen_through(layers[kept:]))
    pieces = within(seen_through(layers), extents)
    runs = packed(extents)
    # Where each page of the merged layer is copied from: the copy writes pieces one behind the other.
    sources = [page for _, page in sorted(seen(pieces).items())]
    assert len(sources) == sum(run.pages for run in runs)
    before, through = memory(layers), memory([*layers[:kept], runs])
    merged = [sources[at] if layer == kept else (layer, at) for layer, at in through]
    assert merged == before


@given(st.lists(st.integers(0, 5000), unique=True, max_size=400), st.integers(1, 40))
def test_gaps_widen_until_the_runs_are_few_or_the_copy_doubles(written: list[int], target: int) -> None:
    pieces = [Piece(page, 1, 0, 0) for page in sorted(written)]
    extents = extents_of(pieces, target_runs=target)
    covered = [page for extent in extents for page in range(extent.page, extent.end)]
    assert set(written) <= set(covered)
    at_once = extents_of(pieces, target_runs=len(pieces) or 1)
    if len(extents) < len(at_once):
        assert len(covered) <= 2 * len(written)
    for one, other in pairwise(extents):
        assert other.page - one.end > GAP_PAGES


@pytest.mark.parametrize(
    ("layers", "merged"),
    [
        pytest.param([(4, 10)] * MAX_LAYERS, 0, id="not-too-many"),
        pytest.param([(4, 10)] * (MAX_LAYERS + 1), MAX_LAYERS + 1, id="too-many-alike"),
        pytest.param([(1000, 10), *[(4, 10)] * MAX_LAYERS], MAX_LAYERS, id="a-large-one-is-left-alone"),
        pytest.param([(128, 10), *[(4, 10)] * MAX_LAYERS], MAX_LAYERS + 1, id="one-not-so-large-is-not"),
        pytest.param([(6 ** (12 - i), 10) for i in range(9)], 5, id="each-much-larger-than-the-next"),
        pytest.param([(4, MAX_RUNS // 2), (4, MAX_RUNS // 2)], 0, id="just-few-enough-runs"),
        pytest.param([(4, MAX_RUNS // 2), (4, MAX_RUNS // 2 + 1)], 2, id="too-many-runs"),
        pytest.param([(4 * MAX_OVERSIZE + 1, MAX_RUNS), (4, 10)], 0, id="too-many-in-one-large-one"),
        pytest.param([(4, 2 * MAX_RUNS)], 0, id="one-is-not-merged-with-itself"),
        pytest.param([], 0, id="none"),
    ],
)
def test_the_newest_layers_that_are_alike_are_merged(layers: list[tuple[int, int]], merged: int) -> None:
    assert merge_due(layers) == merged


def test_over_many_forks_layers_stay_few_and_a_page_is_copied_few_times() -> None:
    layers: list[tuple[int, int]] = []
    copied = 0
    forks = 2000
    for _ in range(forks):
        layers.append((4, 10))
        if count := merge_due(layers):
            size = sum(size for size, _ in layers[-count:])  # None of it written twice: the worst case.
            layers[-count:] = [(size, 10)]
            copied += size
        assert len(layers) <= MAX_LAYERS
    assert copied < 10 * forks * 4
