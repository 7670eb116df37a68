"""Every command of the page on HTTP is run as it stands there."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Iterator

import pytest

from e2e.whole import SECONDS, Whole
from forktree_dev.checkout import CHECKOUT

pytestmark = pytest.mark.asyncio(loop_scope="session")

PAGE = (CHECKOUT / "docs" / "http.md").read_text()


def sections() -> Iterator[tuple[str, str]]:
    for title, text in re.findall(r"\n## (.+)\n([^\0]*?)(?=\n## |\Z)", PAGE):
        if blocks := re.findall(r"```\n(ask [^`]*)```", text):
            yield title, "".join(blocks)


def ask() -> str:
    """The page's own shell function, but for an answer that has no end."""
    (function,) = re.findall(r"\nask\(\) \{[^\0]*?\n\}\n", PAGE)
    patient = 'case "$2" in *watch=1*) options="--max-time 3" ;; *) options="" ;; esac'
    return str(function).replace("curl --silent", f"{patient}\n  curl $options --silent")


@pytest.mark.timeout(600)
async def test_what_the_page_shows_works(whole: Whole) -> None:
    await whole.template("counter", env=[{"name": "MODE", "value": "search"}])
    told = list(sections())
    assert len(told) == 9, [title for title, _ in told]
    for title, block in told:
        needed = {"other"} if '"other"' in block else set[str]()
        if "ask POST sessions '" not in block:
            needed.add("explore")
        for name in needed:
            await whole.session(name, "counter")
        commands = re.split(r"\n(?=ask )", block.strip())
        for command in commands:
            answer = await run(whole, f"{ask()}\n{command}")
            assert answer, (title, command)
            assert '"error_code"' not in answer, (title, command, answer)
            assert '"ok":false' not in answer, (title, command, answer)
        await whole.kubectl("delete", "sessions,forks", "--all", "--cascade=background")
        await whole.gone("session", "explore")


async def run(whole: Whole, script: str) -> str:
    environment = {
        **os.environ,
        "FORKTREE_URL": whole.node.url,
        "FORKTREE_CA": str(whole.node.ca_path),
        "TOKEN": whole.token,
    }
    process = await asyncio.create_subprocess_exec(
        "bash", "-c", script, env=environment, stdout=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(SECONDS):
        output, _ = await process.communicate()
    return output.decode()
