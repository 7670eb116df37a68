"""Every command of the page on kubectl is run as it stands there, and prints what stands below it."""

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

NAMESPACE = "research"
"""As the page has it."""


@pytest_asyncio.fixture(loop_scope="session")
async def reader(system: System, tmp_path: Path) -> AsyncIterator[Run]:
    """A shell of somebody who has our roles and no others: an admin in the namespace, a viewer of nodes."""
    kubectl, account = system.kubectl, f"--serviceaccount={NAMESPACE}:ada"
    await kubectl.run("create", "namespace", NAMESPACE)
    async with Whole.using(system, NAMESPACE) as whole:
        await kubectl.run("create", "serviceaccount", "ada", "-n", NAMESPACE)
        role = "--clusterrole=forktree-admin"
        await kubectl.run("create", "rolebinding", "ada", role, account, "-n", NAMESPACE)
        role = "--clusterrole=forktree-node-viewer"
        await kubectl.run("create", "clusterrolebinding", "ada", role, account)
        kubeconfig = tmp_path / "kubeconfig"
        await provisioning.write_account_kubeconfig(kubectl, "ada", kubeconfig, namespace=NAMESPACE)
        before = whole.machines()
        path = f"{kubectl.program.parent}:{os.environ['PATH']}"
        yield shell({**os.environ, "KUBECONFIG": str(kubeconfig), "PATH": path}, tmp_path)
    await whole.machines_are(before & whole.machines())
    await kubectl.run("delete", "clusterrolebinding", "ada")
    await kubectl.run("delete", "namespace", NAMESPACE)


@pytest.mark.timeout(600)
async def test_what_the_page_shows_is_what_is_printed(reader: Run) -> None:
    await shows(CHECKOUT / "docs" / "kubectl.md", reader)
