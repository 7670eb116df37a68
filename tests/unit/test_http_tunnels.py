"""How many connections into guests are open at once, and whose."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from forktree.models import ObjectMeta, Session
from forktree.models.session import SessionSpec
from forktree_agent.http.errors import Code, Refusal
from forktree_agent.http.tunnels import OF_A_NODE, OF_A_SESSION, Tunnels


def session(namespace: str, number: int) -> Session:
    return Session(
        metadata=ObjectMeta(name=f"s-{number}", namespace=namespace),
        spec=SessionSpec.model_validate({"templateRef": {"name": "t"}}),
    )


def test_one_namespace_leaves_places_to_others_and_gives_them_back() -> None:
    tunnels, most = Tunnels(), OF_A_NODE * 3 // 4
    with ExitStack() as connected:
        for number in range(most):
            connected.enter_context(tunnels.counted(session("loud", number // OF_A_SESSION)))
        with (
            pytest.raises(Refusal, match=f"{most} of them into sessions of loud") as refused,
            tunnels.counted(session("loud", OF_A_NODE)),
        ):
            pass
        assert refused.value.code is Code.OVERLOADED
        with tunnels.counted(session("quiet", 0)):
            pass
    with tunnels.counted(session("loud", 0)):
        pass
