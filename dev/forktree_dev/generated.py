"""The command line of whatever writes files that are made of others and kept in the checkout."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path


def cell(text: str) -> str:
    """Text that neither ends a table's cell nor its row."""
    return " ".join(text.split()).replace("|", "\\|")


def surplus(folders: Iterable[Path], pattern: str, files: Collection[Path]) -> list[Path]:
    """What is in `folders` under such a name and not among `files`."""
    found = {path for folder in folders for path in folder.glob(pattern)}
    return sorted(found - set(files))


def write_or_check(
    files: Mapping[Path, str], *, prog: str, description: str, remove: Iterable[Path] = ()
) -> int:
    """Write those of `files` that are not as they should be, and `remove` others. The exit code.

    With `--check` only say which.
    """
    parser = argparse.ArgumentParser(prog=prog, description=description)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if one is stale")
    check: bool = parser.parse_args().check
    stale = {file: text for file, text in files.items() if not file.exists() or file.read_text() != text}
    for file, text in stale.items():
        if check:
            print(f"{file} is stale: run make generate", file=sys.stderr)
        else:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
            print(f"wrote {file.name}")
    gone = list(remove)
    for file in gone:
        if check:
            print(f"{file} is not to be there: run make generate", file=sys.stderr)
        else:
            file.unlink()
            print(f"removed {file.name}")
    return 1 if check and (stale or gone) else 0
