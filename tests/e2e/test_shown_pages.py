"""Pages that show what commands print: each is run as it stands there, and prints what stands below it."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from e2e.shown_page import Run, shell, shows
from e2e.whole import Whole
from forktree_dev import provisioning
from forktree_dev.checkout import CHECKOUT
from forktree_dev.system import System

pytestmark = pytest.mark.asyncio(loop_scope="session")

DOCS = CHECKOUT / "docs"
NAMESPACE = "research"
"""As the pages have it."""


@pytest_asyncio.fixture(loop_scope="session")
async def research(system: System) -> AsyncIterator[Whole]:
    """The pages' namespace, empty."""
    await system.kubectl.run("create", "namespace", NAMESPACE)
    async with Whole.using(system, NAMESPACE) as whole:
        before = whole.machines()
        yield whole
    await whole.machines_are(before & whole.machines())
    await system.kubectl.run("delete", "namespace", NAMESPACE)


def reads(whole: Whole, kubeconfig: Path) -> Run:
    path = f"{whole.system.kubectl.program.parent}:{os.environ['PATH']}"
    return shell({**os.environ, "KUBECONFIG": str(kubeconfig), "PATH": path}, kubeconfig.parent)


@pytest_asyncio.fixture(loop_scope="session")
async def tenant(research: Whole, tmp_path: Path) -> AsyncIterator[Run]:
    """A shell of somebody who has our roles and no others: an admin in the namespace, a viewer of nodes."""
    kubectl, account = research.system.kubectl, f"--serviceaccount={NAMESPACE}:ada"
    await kubectl.run("create", "serviceaccount", "ada", "-n", NAMESPACE)
    role = "--clusterrole=forktree-admin"
    await kubectl.run("create", "rolebinding", "ada", role, account, "-n", NAMESPACE)
    role = "--clusterrole=forktree-node-viewer"
    await kubectl.run("create", "clusterrolebinding", "ada", role, account)
    await provisioning.write_account_kubeconfig(kubectl, "ada", tmp_path / "config", namespace=NAMESPACE)
    yield reads(research, tmp_path / "config")
    await kubectl.run("delete", "clusterrolebinding", "ada")


@pytest_asyncio.fixture(loop_scope="session")
async def administrator(research: Whole, tmp_path: Path) -> Run:
    """A shell of who runs the cluster."""
    (tmp_path / "config").write_text(research.system.kubectl.kubeconfig.read_text())
    run = reads(research, tmp_path / "config")
    await run(f"kubectl config set-context --current --namespace={NAMESPACE}", "")
    return run


@pytest.mark.timeout(600)
async def test_the_page_on_kubectl(tenant: Run) -> None:
    await shows(DOCS / "kubectl.md", tenant)


@pytest.mark.timeout(600)
async def test_the_page_on_tenancy(administrator: Run) -> None:
    await shows(DOCS / "tenancy.md", administrator)
