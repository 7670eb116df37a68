"""The examples, as a reader runs them: the very blocks of their page, and the program, on a real node."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from e2e.whole import SECONDS, Whole
from forktree_dev import provisioning
from forktree_dev.checkout import CHECKOUT

EXAMPLES = CHECKOUT / "examples"
MANIFESTS = EXAMPLES / "beam-search"
BLOCKS = re.findall(r"```sh\n(.*?)```", (MANIFESTS / "README.md").read_text(), re.DOTALL)

pytestmark = pytest.mark.asyncio(loop_scope="session")


@dataclass
class Reader:
    """Somebody with a shell, in a namespace of their own."""

    whole: Whole
    environment: Mapping[str, str]

    async def types(self, *command: str, folder: Path, seconds: float = 2 * SECONDS) -> str:
        """What the command prints. Fails when it fails."""
        process = await asyncio.create_subprocess_exec(
            *command,
            cwd=folder,
            env=self.environment,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(seconds):
                out, err = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        assert process.returncode == 0, err.decode()
        return out.decode()


@pytest_asyncio.fixture(loop_scope="session")
async def reader(whole: Whole, tmp_path: Path) -> AsyncIterator[Reader]:
    """As `make up` leaves a shell: kubectl on the PATH, and variables that say where the agent is."""
    system, namespace = whole.system, whole.namespace
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(system.kubectl.kubeconfig.read_text())
    environment = {
        **os.environ,
        "KUBECONFIG": str(kubeconfig),
        "PATH": f"{system.kubectl.program.parent}:{os.environ['PATH']}",
        "FORKTREE_URL": system.url,
        "FORKTREE_CA": str(system.ca_path),
        "FORKTREE_TOKEN": await provisioning.user_token(system.kubectl, "default", namespace=namespace),
    }
    reader = Reader(whole, environment)
    await reader.types(
        "kubectl", "config", "set-context", "--current", f"--namespace={namespace}", folder=tmp_path
    )
    yield reader


async def test_the_search_by_manifests_finds_the_goal_and_goes_without_a_trace(reader: Reader) -> None:
    search, look, remove = BLOCKS
    machines = reader.whole.machines()
    script = f'set -e\n{search}\nkubectl get session "$winner" -o name; echo "winner=$winner"'
    winner = (await reader.types("bash", "-c", script, folder=MANIFESTS)).rpartition("winner=")[2].strip()
    state = json.loads(await reader.whole.sh(winner, "gym-ask state"))
    assert (state["actions"], state["total"], state["ended"]) == ([1, 1, 2, 1, 2, 2], 1.0, True)
    assert (await reader.whole.status("session", winner))["depth"] == 6

    # The root and six winners; what came of the others stands in the Forks.
    shown = await reader.types("bash", "-c", f"set -e\n{look}", folder=MANIFESTS)
    steps = {words[0]: words[1:] for line in shown.splitlines() if "=" in line if (words := line.split())}
    assert steps["step-1"] == ["down=-0.3125", "right=-0.3125", "up=-0.375"]
    assert steps["step-2"] == ["down=-0.25", "right=-1", "up=-0.375"]
    assert steps["step-6"][1] == "right=1"
    assert len((await reader.whole.kubectl("get", "sessions", "-o", "name")).split()) == 7

    await reader.types("bash", "-c", f"set -e\n{remove}", folder=MANIFESTS)
    await reader.whole.machines_are(machines)


async def test_the_search_in_python_finds_the_same(reader: Reader) -> None:
    await reader.types("kubectl", "apply", "-f", str(MANIFESTS / "lake.yaml"), folder=EXAMPLES)
    printed = await reader.types(sys.executable, "search.py", folder=EXAMPLES)
    state = json.loads(printed)
    assert (state["actions"], state["total"], state["ended"]) == ([1, 1, 2, 1, 2, 2], 1.0, True)


@pytest.mark.timeout(900)  # Two templates are baked, and a lake is searched.
async def test_every_block_of_the_page_about_python_does_what_it_says(reader: Reader, tmp_path: Path) -> None:
    await reader.whole.template()
    await reader.types("kubectl", "apply", "-f", str(MANIFESTS / "lake.yaml"), folder=EXAMPLES)
    (tmp_path / "examples").symlink_to(EXAMPLES)
    program = tmp_path / "page.py"
    page = (CHECKOUT / "docs" / "sdk.md").read_text()
    program.write_text("\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL)))
    await reader.types(sys.executable, "-W", "error", str(program), folder=tmp_path, seconds=6 * SECONDS)
    assert (tmp_path / "copy" / "session.yaml").exists()


async def test_the_session_of_the_playground_forks(reader: Reader) -> None:
    playground = CHECKOUT / "dev" / "playground" / "python.yaml"
    await reader.types("kubectl", "apply", "-f", str(playground), folder=EXAMPLES)
    await reader.types("kubectl", "apply", "-f", "session.yaml", folder=EXAMPLES)
    await reader.whole.ready("fork", "twice")
    assert len((await reader.whole.status("fork", "twice"))["children"]) == 2
