"""Writes `sdk/forktree/_sync` from `sdk/forktree/_async`: `python -m forktree_dev.sync_client`.

`async` and `await` go, and names lose the prefix that marks them: `AsyncSession` becomes `Session`,
`async_wait` becomes `wait`.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

import unasync

from forktree_dev.crds import REPOSITORY
from forktree_dev.generated import surplus, write_or_check

SOURCE: Final = REPOSITORY / "sdk" / "forktree" / "_async"
TARGET: Final = SOURCE.with_name("_sync")

_MARKED: Final = re.compile(r"\b(?:Async|async_)(\w+)\b")
_OTHERS: Final = {
    "_async": "_sync",
    "aclose": "close",
    "aclosing": "closing",
    "aiter_bytes": "iter_bytes",
    "aiter_raw": "iter_raw",
    "AbstractAsyncContextManager": "AbstractContextManager",
}


def render() -> dict[str, str]:
    """Every file of the sync client by its name, the same text for the same sources."""
    sources = {path.name: path.read_text() for path in sorted(SOURCE.glob("*.py"))}
    names = {found[0]: found[1] for text in sources.values() for found in _MARKED.finditer(text)}
    rule = unasync.Rule(f"/{SOURCE.name}/", f"/{TARGET.name}/", names | _OTHERS)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, SOURCE.name)
        source.mkdir()
        for name, text in sources.items():
            (source / name).write_text(text)
        paths = [str(source / name) for name in sources]
        unasync.unasync_files(paths, [rule])  # pyright: ignore[reportUnknownMemberType]  (it has no types)
        return {name: _tidied(name, Path(folder, TARGET.name, name).read_text()) for name in sources}


def _tidied(name: str, text: str) -> str:
    """As ruff would have it in its place: without `await` much fits in one line that did not before."""
    text = f"# Generated from sdk/forktree/_async/{name} by `make generate`; change that file.\n{text}"
    for command in (["check", "--select=I", "--fix-only"], ["format"]):
        ruff = [sys.executable, "-m", "ruff", *command, "--quiet", f"--stdin-filename={TARGET / name}", "-"]
        done = subprocess.run(ruff, input=text, capture_output=True, text=True, cwd=REPOSITORY, check=True)
        text = done.stdout
    return text


def main() -> int:
    files = {TARGET / name: text for name, text in render().items()}
    return write_or_check(
        files,
        prog="python -m forktree_dev.sync_client",
        description="Write the sync client.",
        remove=surplus([TARGET], "*.py", files),
    )


if __name__ == "__main__":
    sys.exit(main())
