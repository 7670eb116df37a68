"""The command line of whatever writes files that are made of others and kept in the checkout."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path


def write_or_check(files: Mapping[Path, str], *, prog: str, description: str) -> int:
    """Write those of `files` that are not as they should be; with `--check` only say which. The exit code."""
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
    return 1 if check and stale else 0
