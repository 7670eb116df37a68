"""What `import forktree` offers, and that the sync client is the async one."""

from __future__ import annotations

import subprocess
import sys

import pytest

import forktree
from forktree_dev import sync_client

PUBLIC = [
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


def test_the_public_names_are_these_and_each_is_there() -> None:
    assert forktree.__all__ == PUBLIC
    assert {name for name in dir(forktree) if not name.startswith("_")} >= set(PUBLIC)
    for name in PUBLIC:
        assert getattr(forktree, name)
    with pytest.raises(AttributeError):
        getattr(forktree, "Nothing")  # noqa: B009


@pytest.mark.parametrize(
    "module", ["forktree.models", "forktree.wire", "forktree.kube.errors", "forktree.errors"]
)
def test_who_needs_the_models_alone_gets_no_http_client(module: str) -> None:
    script = f"import sys, {module}; sys.exit('httpx2' in sys.modules or 'kubernetes' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_the_client_is_there_without_the_library_for_kubeconfigs() -> None:
    script = (
        "import sys, forktree; forktree.Client('https://a', token='t'); sys.exit('kubernetes' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_the_sync_client_is_generated_from_the_async_one() -> None:
    present = {path.name: path.read_text() for path in sync_client.TARGET.glob("*.py")}
    assert present == sync_client.render(), "run make generate"


def test_nothing_async_is_left_in_the_sync_client() -> None:
    for path in sync_client.TARGET.glob("*.py"):
        code = path.read_text()
        assert " await " not in code, path
        assert "async def" not in code, path
