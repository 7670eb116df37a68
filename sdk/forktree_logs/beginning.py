"""What a program does with its log at its start."""

from __future__ import annotations

import logging
import sys
from typing import Final

from forktree_logs.json_lines import JsonLines, More

FORMATS: Final = ("text", "json")
TEXT: Final = "%(asctime)s %(levelname)s %(name)s %(message)s"


def begin(form: str, level: str, *, text: str = TEXT, more: More | None = None) -> None:
    """Write lines from `level` on to standard error, in one of `FORMATS`.

    `text`: how a line looks that is not JSON. `more`: what else a JSON line says, asked for each.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines(more) if form == "json" else logging.Formatter(text))
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(level.upper())
