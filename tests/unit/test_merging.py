"""Merged layers: their bytes, read back through their tables, and where in a chain they stand."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forktree_agent.engine.microvm.layers import PAGE_BYTES, Run
from forktree_agent.engine.microvm.merging import CHUNK_BYTES, Merged, chunks_of, copy_chunk
from forktree_agent.engine.microvm.overlay import Piece, extents_of, packed, seen_through, within

RAM_PAGES = 600


@pytest.fixture
def files() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def layer(files: ExitStack, table: Sequence[Run], content: bytes) -> int:
    """A layer each of whose pages says which it is."""
    fd = os.memfd_create("layer", os.MFD_CLOEXEC)
    files.callback(os.close, fd)
    for run in table:
        for i in range(run.pages):
            page = content + (run.page + i).to_bytes(4, "little")
            os.pwrite(fd, page.ljust(PAGE_BYTES, b"\0"), run.offset + i * PAGE_BYTES)
    return fd


def image(layers: Sequence[int], tables: Sequence[Sequence[Run]]) -> bytes:
    ram = bytearray(RAM_PAGES * PAGE_BYTES)
    for fd, table in zip(layers, tables, strict=True):
        for run in table:
            start = run.page * PAGE_BYTES
            ram[start : start + run.pages * PAGE_BYTES] = os.pread(fd, run.pages * PAGE_BYTES, run.offset)
    return bytes(ram)


@pytest.mark.parametrize("seed", range(12))
def test_memory_through_a_merged_layer_is_what_it_was(files: ExitStack, seed: int) -> None:
    dice = random.Random(seed)
    tables: list[list[Run]] = [[Run(0, RAM_PAGES, 0)]]
    for _ in range(dice.randint(2, 9)):
        dirty = sorted(dice.sample(range(RAM_PAGES), dice.choice([0, 3, 60, 250])))
        tables.append(packed(extents_of([Piece(page, 1, 0, 0) for page in dirty])))
    layers = [layer(files, table, bytes([number])) for number, table in enumerate(tables)]
    kept = dice.randint(1, len(tables) - 1)
    extents = extents_of(seen_through(tables[kept:]))
    runs = packed(extents)
    merged = os.memfd_create("merged", os.MFD_CLOEXEC)
    files.callback(os.close, merged)
    offset = 0
    for chunk in chunks_of(within(seen_through(tables), extents)):
        offset += copy_chunk(chunk, layers, merged, offset)
    assert offset == os.fstat(merged).st_size == sum(run.pages for run in runs) * PAGE_BYTES
    through = image([*layers[:kept], merged], [*tables[:kept], runs])
    assert through == image(layers, tables)


@given(st.lists(st.integers(1, 3 * CHUNK_BYTES // PAGE_BYTES), max_size=30))
def test_chunks_are_small_and_leave_nothing_out(sizes: list[int]) -> None:
    pieces: list[Piece] = []
    for size in sizes:
        page = pieces[-1].end + 1 if pieces else 0
        pieces.append(Piece(page, size, 0, page * PAGE_BYTES))
    chunks = list(chunks_of(pieces))
    assert all(sum(part.pages for part in chunk) * PAGE_BYTES <= CHUNK_BYTES for chunk in chunks)
    joined: list[Piece] = []
    for part in (part for chunk in chunks for part in chunk):
        assert part.offset == part.page * PAGE_BYTES
        if joined and joined[-1].end == part.page:  # Pieces are a page apart, so this is the rest of one.
            joined[-1] = joined[-1]._replace(pages=joined[-1].pages + part.pages)
        else:
            joined.append(part)
    assert joined == pieces


def test_a_layer_that_is_shorter_than_its_table_says_is_not_copied(files: ExitStack) -> None:
    short = layer(files, [Run(0, 1, 0)], b"x")
    target = os.memfd_create("target", os.MFD_CLOEXEC)
    files.callback(os.close, target)
    with pytest.raises(OSError, match="8192 bytes of layers could not be copied"):
        copy_chunk([Piece(0, 2, 0, 0)], [short], target, 0)


@pytest.mark.parametrize(
    ("chain", "shorter"),
    [
        ("base a b c", "base a M"),
        ("base a b c d e", "base a M d e"),
        ("base a b", None),
        ("base a x c", None),
        ("other a b c", None),
        ("base a M", None),
    ],
)
def test_a_merged_layer_takes_the_place_of_all_that_it_stands_for(chain: str, shorter: str | None) -> None:
    merged = Merged(("base", "a", "b", "c"), 2, "M")
    assert merged.replaced == ("b", "c")
    found = merged.shorten(tuple(chain.split()))
    assert found == (tuple(shorter.split()) if shorter is not None else None)
