"""What a layer is made of, and the bound on how finely memory may be cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forktree_agent.engine.contract import TooFragmented
from forktree_agent.engine.microvm.layers import (
    MAX_MAPPINGS,
    PAGE_BYTES,
    RUN_BYTES,
    Run,
    check_mappings,
    layer_bytes,
    mappings_with,
    whole_pages,
)

RUNS = st.builds(Run, st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1))


@given(st.lists(RUNS, max_size=20))
def test_a_run_table_is_read_back_as_written(runs: list[Run]) -> None:
    table = b"".join(run.encode() for run in runs)
    assert len(table) == len(runs) * RUN_BYTES
    assert Run.decode_table(table) == tuple(runs)


def test_half_a_record_is_no_table() -> None:
    with pytest.raises(ValueError, match="17 bytes"):
        Run.decode_table(bytes(17))


@given(st.integers(0, 2**44))
def test_sizes_are_rounded_up_by_less_than_a_page(size_bytes: int) -> None:
    pages = whole_pages(size_bytes)
    assert pages % PAGE_BYTES == 0
    assert 0 <= pages - size_bytes < PAGE_BYTES


def test_a_layer_ends_with_its_run_table() -> None:
    assert layer_bytes(3 * PAGE_BYTES, 2) == 3 * PAGE_BYTES + 2 * RUN_BYTES


@pytest.mark.parametrize(
    ("mappings", "runs", "refused"),
    [(500, 2000, False), (MAX_MAPPINGS - 2, 1, False), (MAX_MAPPINGS - 1, 1, True), (0, 16_000, True)],
)
def test_too_many_mappings_are_refused_by_their_worst_case(mappings: int, runs: int, refused: bool) -> None:
    wanted = mappings_with(mappings, runs)
    if refused:
        with pytest.raises(TooFragmented, match=str(wanted)):
            check_mappings(wanted)
    else:
        check_mappings(wanted)
