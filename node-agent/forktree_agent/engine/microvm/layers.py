"""What a layer is made of, and how finely memory may be cut (pure).

A layer is a file of guest pages, packed from offset 0, followed by its run table: which guest pages lie
where. It describes itself, so the agent passes on a descriptor, the table's offset and a count.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import NamedTuple, Self

from forktree_agent.engine.contract import TooFragmented

PAGE_BYTES = 4096
RUN_BYTES = 16
TARGET_RUNS = 2000
"""A dump with more runs bridges wider gaps, unless that would double what the stopped parent copies."""
SHORT_RUN_PAGES = 4
"""Where a layer has more runs than that all the same, its children copy the runs shorter than this: 3 us a
page and memory of their own, but no mapping. A mapping costs 4.4 us and two of the few that there are."""
MAX_MAPPINGS = 30_000
"""Of one QEMU. The kernel stops at 65,530 (`vm.max_map_count`) and every write of QEMU's own may need more;
a child that is forked again must not be the one to find that out."""
MAPPINGS_PER_RUN = 2
"""A mapping in the middle of another makes three of one."""

_RUN = struct.Struct("<IIQ")


class Run(NamedTuple):
    """Guest pages that lie together in a layer."""

    page: int
    """The first guest page."""
    pages: int
    offset: int
    """Where it lies in the layer, in bytes."""

    def encode(self) -> bytes:
        """The record in a layer's run table, and in a request to map one run."""
        return _RUN.pack(*self)

    @classmethod
    def decode_table(cls, table: bytes) -> tuple[Self, ...]:
        """All runs of a table. Raises `ValueError` for half a record."""
        try:
            return tuple(cls(*fields) for fields in _RUN.iter_unpack(table))
        except struct.error as err:
            raise ValueError(f"{len(table)} bytes are no table of {RUN_BYTES}-byte runs") from err


def short_runs(table: Iterable[Run]) -> int:
    """How many of a layer's runs its children copy rather than map: none, unless there are too many."""
    runs = list(table)
    return sum(run.pages < SHORT_RUN_PAGES for run in runs) if len(runs) > TARGET_RUNS else 0


def layer_bytes(table_offset: int, runs: int) -> int:
    """Size of a layer whose run table begins at `table_offset`."""
    return table_offset + runs * RUN_BYTES


def whole_pages(size_bytes: int) -> int:
    """`size_bytes` rounded up to a page."""
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


def mappings_with(mappings: int, runs: int) -> int:
    """The most mappings that a process with `mappings` of them can have once `runs` more runs are mapped."""
    return mappings + runs * MAPPINGS_PER_RUN


def check_mappings(mappings: int) -> None:
    """Raises `TooFragmented` when a process has, or would have, more mappings than is safe."""
    if mappings > MAX_MAPPINGS:
        raise TooFragmented(
            f"the machine's memory would be cut into {mappings} mappings, more than the {MAX_MAPPINGS} "
            "allowed; fork an ancestor, or start a new root"
        )
