"""The commands of the page for existing clients, run as they stand there."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from pathlib import Path

import pytest

from e2e.conftest import SERVED_NAMESPACE
from e2e.test_existing_clients import here
from e2e.whole import SECONDS, Whole
from forktree_dev.checkout import CHECKOUT

__all__ = ["here"]  # The fixture, for this module.

pytestmark = pytest.mark.asyncio(loop_scope="session")

PAGE = (CHECKOUT / "docs" / "existing-clients.md").read_text()


def block(beginning: str, language: str = "") -> str:
    """The one block of the page that begins so."""
    blocks = re.findall(r"```(\w*)\n(.*?)```", PAGE, re.DOTALL)
    (found,) = [text for spoken, text in blocks if spoken == language and text.startswith(beginning)]
    return str(found)


async def said(whole: Whole, folder: Path, script: str) -> str:
    """What the script prints. Fails when it fails."""
    kubectl = whole.system.kubectl
    programs = (str(Path(sys.executable).parent), str(kubectl.program.parent), os.environ["PATH"])
    environment = {
        "PATH": os.pathsep.join(programs),
        "KUBECONFIG": str(kubectl.kubeconfig),
        "FORKTREE_URL": whole.node.url,
        "FORKTREE_CA": str(whole.node.ca_path),
    }
    process = await asyncio.create_subprocess_exec(
        *("bash", "-euo", "pipefail", "-c", script),
        env=environment,
        cwd=folder,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(2 * SECONDS):
        out, err = await process.communicate()
    assert process.returncode == 0, (script, out.decode(), err.decode())
    return out.decode()


@pytest.mark.timeout(400)
async def test_a_program_with_a_token_runs_as_the_page_shows_it(whole: Whole, tmp_path: Path) -> None:
    await whole.template("python", image="builtin:python")
    (tmp_path / "page.py").write_text(block("import os", "python"))
    commands = block("kubectl create serviceaccount")
    # The page speaks of the namespace `default`, this test has one of its own.
    commands = commands.replace("default:trainer", f"{whole.namespace}:trainer")
    commands = commands.replace("/ns/default", f"/ns/{whole.namespace}")
    commands = re.sub(r"\bkubectl ", f"kubectl --namespace={whole.namespace} ", commands)
    out = await said(whole, tmp_path, f"{commands}\npython3 page.py")
    lines = [line for line in out.splitlines() if line.startswith("so far, now in ")]
    assert len(set(lines)) == 3, out
    await whole.names_are(set())


async def test_a_program_at_a_socket_is_told_where_it_is_as_the_page_shows_it(
    here: Whole, tmp_path: Path
) -> None:
    socket = here.node.socket_path(SERVED_NAMESPACE)
    commands = re.sub(r"=/run/\S+", f"={socket}", block("export COLLIMATE_SERVE_SOCKET"))
    assert "'status': 'ok'" in await said(here, tmp_path, commands)
