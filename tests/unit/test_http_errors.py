"""No error of the layers below can reach a caller without a code of its own choosing."""

from __future__ import annotations

import base64
import importlib
import json
import pkgutil
from typing import cast

import pytest

import forktree
import forktree_agent
from forktree.errors import ForktreeError
from forktree.kube import errors as kube
from forktree.kube.client import KubeClient
from forktree.models import Reason
from forktree_agent.engine import contract
from forktree_agent.http.auth import Gate
from forktree_agent.http.errors import (
    ERRORS,
    REASONS,
    STATUS,
    Code,
    Refusal,
    code_of,
    refusal_for,
    refusal_of,
    shown,
)

RETRIED_BY_CLIENTS = {Code.AT_CAPACITY, Code.SESSION_BRINGUP_FAILED, Code.DRAINING}


def errors() -> list[type[ForktreeError]]:
    """Every class of error that any module of the SDK and the agent defines."""
    for package in (forktree, forktree_agent):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)
    found, new = list[type[ForktreeError]](), [ForktreeError]
    while new:
        found += new
        new = [below for cls in new for below in cls.__subclasses__()]
    return [cls for cls in found if cls.__module__.startswith(("forktree.", "forktree_agent."))]


def test_every_code_has_a_status() -> None:
    assert set(STATUS) == set(Code)


def test_every_reason_has_a_code() -> None:
    assert set(REASONS) == set(Reason)


@pytest.mark.parametrize("cls", errors(), ids=lambda cls: cls.__name__)
def test_every_error_of_the_layers_below_has_a_code(cls: type[ForktreeError]) -> None:
    assert STATUS[code_of(cls)] >= 400


def test_every_error_of_the_api_server_is_told_apart() -> None:
    assert [cls.__name__ for cls in errors() if issubclass(cls, kube.KubeError) and cls not in ERRORS] == []


def test_every_error_of_an_engine_says_more_than_internal() -> None:
    specific = [
        cls for cls in errors() if cls.__module__ == contract.__name__ and cls is not contract.EngineError
    ]
    assert specific
    assert [cls.__name__ for cls in specific if code_of(cls) is Code.INTERNAL] == []


def test_a_full_quota_is_told_apart_from_a_missing_right() -> None:
    quota = kube.Forbidden("sessions is forbidden: exceeded quota: small, requested: 1, used: 1, limited: 1")
    assert refusal_of(quota).code is Code.QUOTA_EXCEEDED
    assert refusal_of(kube.Forbidden("sessions is forbidden: no such right")).code is Code.FORBIDDEN


def test_clients_repeat_only_what_left_nothing_running() -> None:
    repeated = {reason for reason, code in REASONS.items() if code in RETRIED_BY_CLIENTS}
    assert repeated == {Reason.AT_CAPACITY, Reason.FORK_FAILED, Reason.PAUSE_BUDGET}
    assert not RETRIED_BY_CLIENTS & set(ERRORS.values())


def test_a_failed_object_without_a_reason_is_not_shown_as_success() -> None:
    refusal = refusal_for(None, None, "session a")
    assert (refusal.code, refusal.sentence) == (Code.INTERNAL, "session a failed and gave no reason")


def test_a_refusal_carries_its_status() -> None:
    assert Refusal(Code.WRONG_NODE, "x").status == 421


@pytest.mark.parametrize(
    ("sent", "said"),
    [("a word", "a word"), ("two\nlines\x1b[2J", "two?lines?[2J"), ("w" * 500, "w" * 80 + "…")],
)
def test_what_a_caller_sent_is_repeated_in_one_short_line(sent: str, said: str) -> None:
    assert shown(sent) == said


async def test_a_token_for_somebody_else_is_told_whom_it_is_for_in_one_short_line() -> None:
    claims = base64.urlsafe_b64encode(json.dumps({"aud": ["two\nlines" * 50]}).encode()).decode()
    gate = Gate(cast("KubeClient", None))  # Which is not asked: the token says enough itself.
    with pytest.raises(Refusal, match="this token is meant for two") as refused:
        await gate.caller(f"Bearer a.{claims}.c")
    assert refused.value.code is Code.UNAUTHORIZED
    assert refused.value.sentence.isprintable()
    assert len(refused.value.sentence) < 300
