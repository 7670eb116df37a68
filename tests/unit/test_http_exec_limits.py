"""How long a command may take where the session's template has a word on it."""

from __future__ import annotations

import pytest

from forktree.wire import Exec
from forktree_agent.http.errors import Code, Refusal
from forktree_agent.http.executing import allowed_seconds


@pytest.mark.parametrize(
    ("asked", "limit", "allowed"),
    [(None, None, 30), (None, 10, 10), (None, 60, 30), (10, 10, 10), (0.5, 10, 0.5), (3600, None, 3600)],
)
def test_a_time_out_is_as_asked_or_the_default_within_the_limit(
    asked: float | None, limit: int | None, allowed: float
) -> None:
    request = Exec(command="true") if asked is None else Exec(command="true", timeout_seconds=asked)
    assert allowed_seconds(request, limit) == allowed


def test_a_longer_one_is_refused_with_both_numbers() -> None:
    with pytest.raises(Refusal, match=r"is 10\.5, but .* 10 seconds \(treeLimits\.execSeconds\)") as refused:
        allowed_seconds(Exec(command="true", timeout_seconds=10.5), 10)
    assert (refused.value.code, refused.value.status) == (Code.BAD_REQUEST, 400)
