"""How many trees are watched at once, and by whom."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from forktree_agent.http.errors import Code, Refusal
from forktree_agent.http.tree_watching import WATCHED_AT_ONCE, Watchers


def test_one_namespace_leaves_places_to_others_and_gives_them_back() -> None:
    watchers = Watchers()
    with ExitStack() as watching:
        for _ in range(WATCHED_AT_ONCE // 2):
            watching.enter_context(watchers.one_more("loud"))
        with (
            pytest.raises(Refusal, match="32 of them in namespace loud") as refused,
            watchers.one_more("loud"),
        ):
            pass
        assert refused.value.code is Code.OVERLOADED
        with watchers.one_more("quiet"):
            pass
    with watchers.one_more("loud"):
        pass
