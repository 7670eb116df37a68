"""The fuzzers, for a while: first what is known to be of interest, then what one seed leads to."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import os
import sys
from pathlib import Path

import pytest

TARGETS = {"guest": 300, "bodies": 3000, "tools": 1000}
"""How many inputs each tries: some seconds' worth. `make fuzz` goes on for as long as is wanted."""

FUZZ = Path(__file__).parents[1] / "fuzz"
INPUTS = [path for target in TARGETS for path in sorted((FUZZ / "corpus" / target).iterdir())]


@pytest.mark.parametrize("path", INPUTS, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_what_is_known_does_no_harm(path: Path) -> None:
    importlib.import_module(f"fuzz.{path.parent.name}").one_input(path.read_bytes())


@pytest.mark.skipif(
    importlib.util.find_spec("atheris") is None, reason="atheris has no build for this platform"
)
@pytest.mark.parametrize("target", TARGETS)
async def test_nothing_new_does_harm(target: str, tmp_path: Path) -> None:
    """Always the same inputs: one seed, and a corpus that is not added to."""
    found, inputs = tmp_path / "found", TARGETS[target]
    found.mkdir()
    options = [
        f"-runs={inputs}",
        "-seed=1",
        "-timeout=60",
        "-rss_limit_mb=2048",
        f"-artifact_prefix={tmp_path}/",
    ]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "fuzz",
        target,
        *options,
        str(found),
        str(FUZZ / "corpus" / target),
        env=os.environ | {"PYTHONPATH": str(FUZZ.parent)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    said, _ = await process.communicate()
    assert process.returncode == 0, said.decode(errors="replace")[-8000:]
