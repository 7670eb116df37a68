"""`python -m fuzz TARGET [options of libFuzzer] [corpus…]`: tries what nobody thought of."""

from __future__ import annotations

import importlib
import sys
from typing import Any


def main() -> None:
    atheris: Any = importlib.import_module("atheris")  # It has no types; and only some platforms have it.
    _, target, *options = sys.argv
    with atheris.instrument_imports(include=["forktree", "forktree_agent"]):
        tried = importlib.import_module(f"fuzz.{target}")
    atheris.Setup([sys.argv[0], *options], tried.one_input)
    atheris.Fuzz()


main()
