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
    SHORT_RUN_PAGES,
    TARGET_RUNS,
    Run,
    check_mappings,
    layer_bytes,
    mappings_with,
    short_runs,
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


def test_short_runs_are_copied_only_where_there_are_too_many_runs() -> None:
    def runs(count: int, pages: int) -> list[Run]:
        return [Run(i * 10, pages, i * PAGE_BYTES) for i in range(count)]

    assert short_runs(runs(TARGET_RUNS, 1)) == 0
    assert short_runs(runs(TARGET_RUNS + 1, 1)) == TARGET_RUNS + 1
    assert short_runs(runs(TARGET_RUNS + 1, SHORT_RUN_PAGES)) == 0
    assert short_runs([*runs(TARGET_RUNS, SHORT_RUN_PAGES), Run(1, SHORT_RUN_PAGES - 1, 0)]) == 1
