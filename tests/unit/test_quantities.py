"""Amounts of memory: what is read, how it is rounded, and what is refused in which words."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forktree.models.quantities import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("0", 0),
        ("1073741824", 1 << 30),
        ("256Mi", 256 << 20),
        ("2Gi", 2 << 30),
        ("1Ti", 1 << 40),
        ("1.5Gi", 3 << 29),
        ("500M", 500_000_000),
        ("12k", 12_000),
        ("0.0001Ki", 1),  # Up to a whole byte: less than was asked for would be wrong.
    ],
)
def test_quantity_is_read(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    "text", ["", "Mi", "256MB", "256 Mi", "-1Gi", "+1Gi", "1e3", "lots", "1.Gi", "100m", "256mi"]
)
def test_anything_else_is_refused_with_an_example_of_what_is_read(text: str) -> None:
    with pytest.raises(ValueError, match=r"write a number with a unit, like 256Mi"):
        parse_bytes(text)


@given(st.integers(0, 1 << 50))
def test_what_is_written_is_read_back(count: int) -> None:
    assert parse_bytes(format_bytes(count)) == count
