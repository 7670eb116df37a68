"""No error of the layers below can reach a caller without a code of its own choosing."""

from __future__ import annotations

import inspect
from types import ModuleType

import pytest

from forktree.errors import ForktreeError
from forktree.kube import errors as kube
from forktree.models import Reason
from forktree_agent.control import objects
from forktree_agent.engine import contract
from forktree_agent.http.errors import ERRORS, REASONS, STATUS, Code, Refusal, refusal_for, refusal_of

RETRIED_BY_CLIENTS = {Code.AT_CAPACITY, Code.SESSION_BRINGUP_FAILED}


def errors_of(module: ModuleType) -> list[type[ForktreeError]]:
    return [
        cls
        for _, cls in inspect.getmembers(module, inspect.isclass)
        if issubclass(cls, ForktreeError) and cls.__module__ == module.__name__
    ]


def test_every_code_has_a_status() -> None:
    assert set(STATUS) == set(Code)


def test_every_reason_has_a_code() -> None:
    assert set(REASONS) == set(Reason)


@pytest.mark.parametrize(
    "cls",
    [cls for module in (contract, kube, objects) for cls in errors_of(module)],
    ids=lambda cls: cls.__name__,
)
def test_every_error_of_the_layers_below_has_a_row(cls: type[ForktreeError]) -> None:
    assert cls in ERRORS or cls.reason is not Reason.INTERNAL or cls in (contract.EngineError,)
    refusal = refusal_of(cls("a sentence"))
    assert refusal.sentence == "a sentence"
    assert refusal.status == STATUS[refusal.code]


def test_every_kubernetes_error_has_a_row_of_its_own() -> None:
    concrete = [
        cls
        for cls in errors_of(kube)
        if not any(issubclass(c, cls) and c is not cls for c in errors_of(kube))
    ]
    assert concrete
    assert [cls.__name__ for cls in concrete if cls not in ERRORS] == []


def test_clients_repeat_only_what_left_nothing_running() -> None:
    repeated = {reason for reason, code in REASONS.items() if code in RETRIED_BY_CLIENTS}
    assert repeated == {Reason.AT_CAPACITY, Reason.FORK_FAILED}
    assert not RETRIED_BY_CLIENTS & set(ERRORS.values())


def test_a_failed_object_without_a_reason_is_not_shown_as_success() -> None:
    refusal = refusal_for(None, None, "session a")
    assert (refusal.code, refusal.sentence) == (Code.INTERNAL, "session a failed and gave no reason")


def test_a_refusal_carries_its_status() -> None:
    assert Refusal(Code.WRONG_NODE, "x").status == 421
