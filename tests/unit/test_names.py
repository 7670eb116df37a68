"""Names that several parts make alike."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from forktree.models import Uid
from forktree.models.names import FORK_NAME_MAX, REPLICAS_MAX, child_name

DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
fork_names = st.from_regex(rf"[a-z0-9]([-a-z0-9]{{0,{FORK_NAME_MAX - 2}}}[a-z0-9])?", fullmatch=True)
uids = st.uuids().map(lambda uid: Uid(str(uid)))
indices = st.integers(0, REPLICAS_MAX - 1)


def test_child_carries_its_fork_index_and_the_end_of_the_forks_uid() -> None:
    assert child_name("try", 7, Uid("0f9aaf44-2a6b-4a4e-9d0c-95a1b2c3d4e5")) == "try-7-3d4e5"


@given(fork_names, indices, uids)
def test_child_name_of_any_legal_fork_fits_a_label_and_a_host_name(fork: str, index: int, uid: Uid) -> None:
    name = child_name(fork, index, uid)
    assert len(name) <= 63
    assert DNS_LABEL.fullmatch(name)


@given(fork_names, indices, indices, uids)
def test_siblings_have_different_names(fork: str, one: int, other: int, uid: Uid) -> None:
    assert (child_name(fork, one, uid) == child_name(fork, other, uid)) == (one == other)
