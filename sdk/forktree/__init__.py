"""forktree: fork live environments, score the branches, keep the best.

    import forktree

    with forktree.Client() as client:
        session = client.sessions.create("python")
        for child in session.fork(3):
            print(child.exec("hostname").stdout)

`Client` and `AsyncClient` are the same, but for `await`. Names are imported when first used: the operator and
the agent import `forktree.models` and so this module, and have no use for an HTTP client.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from forktree import errors, search
    from forktree._async.client import AsyncClient
    from forktree._async.commands import AsyncExec
    from forktree._async.forks import AsyncFork
    from forktree._async.session import AsyncSession
    from forktree._async.trees import AsyncTree
    from forktree._results import Branch, Ended, ExecEvent, ExecResult, FileEntry, ForkOptions, Output
    from forktree._retrying import Retries
    from forktree._settings import Reach
    from forktree._sync.client import Client
    from forktree._sync.commands import Exec
    from forktree._sync.forks import Fork
    from forktree._sync.session import Session
    from forktree._sync.trees import Tree
    from forktree._trees import TreeNode

__all__ = [
    "AsyncClient",
    "AsyncExec",
    "AsyncFork",
    "AsyncSession",
    "AsyncTree",
    "Branch",
    "Client",
    "Ended",
    "Exec",
    "ExecEvent",
    "ExecResult",
    "FileEntry",
    "Fork",
    "ForkOptions",
    "Output",
    "Reach",
    "Retries",
    "Session",
    "Tree",
    "TreeNode",
    "errors",
    "search",
]

_HOMES: Final = {
    "AsyncClient": "_async.client",
    "AsyncExec": "_async.commands",
    "AsyncFork": "_async.forks",
    "AsyncSession": "_async.session",
    "AsyncTree": "_async.trees",
    "Branch": "_results",
    "Client": "_sync.client",
    "Ended": "_results",
    "Exec": "_sync.commands",
    "ExecEvent": "_results",
    "ExecResult": "_results",
    "FileEntry": "_results",
    "Fork": "_sync.forks",
    "ForkOptions": "_results",
    "Output": "_results",
    "Reach": "_settings",
    "Retries": "_retrying",
    "Session": "_sync.session",
    "Tree": "_sync.trees",
    "TreeNode": "_trees",
}


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    if name in __all__:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
