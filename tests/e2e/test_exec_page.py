"""Every command of the page on commands and files is run as it stands there."""

from __future__ import annotations

import re

import pytest

from e2e.test_http_page import ask, run
from e2e.whole import Whole
from forktree_dev.checkout import CHECKOUT

pytestmark = pytest.mark.asyncio(loop_scope="session")

PAGE = (CHECKOUT / "docs" / "exec.md").read_text()

SHOWN = (
    ('"session_id":"explore"',),
    ('"stdout":"hello\\n"', '"exit_code":3', '"detached":true', '"type":"started"', '"exit_code":4'),
    ('"id":"tests"', '"type":"end"', '"stdout":"done\\n"'),
    ('"bytes":4', '"closed":true', '"killed":true'),
    (
        '"bytes":6',
        "hello\n",
        '"name":"notes.txt"',
        '"mode":"0600"',
        '"entries":1',
        "copy/hostname",
        "removed",
    ),
)
"""What each block prints, beside other things."""


@pytest.mark.timeout(600)
async def test_what_the_page_shows_works(whole: Whole) -> None:
    await whole.template("counter", env=[{"name": "MODE", "value": "search"}])
    blocks = re.findall(r"```\n([^`]*)```", PAGE)
    for block, shown in zip(blocks, SHOWN, strict=True):
        printed = await run(whole, f"{ask()}\n{block}")
        assert '"error_code"' not in printed, (block, printed)
        for each in shown:
            assert each in printed, (block, printed)
