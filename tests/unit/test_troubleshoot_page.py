"""What the page on trouble quotes is what the programs and the API server say, word for word."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from functools import cache
from typing import cast

import pytest
import yaml

from forktree_dev.checkout import CHECKOUT

PAGE = (CHECKOUT / "docs" / "troubleshoot.md").read_text()
SOURCES = ("sdk", "operator/forktree_operator", "node-agent/forktree_agent", "node-agent/forktree_keeper")
VARIES = "…"
NOT_OURS = {'is forbidden: User "…" cannot create resource "sessiontemplates"', "exceeded quota: …"}
"""What the API server says by itself; tests of roles and quotas have it from there."""


GROUP = "forktree.dev"
"""Part of many sentences by its constant."""


def quoted() -> list[str]:
    """The first cell of each row below the symptoms."""
    symptoms = PAGE.partition("\n## By symptom\n")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| (`.*?`) \| ", symptoms, re.MULTILINE)
    return [cell.strip("`").strip() for cell in cells]


@cache
def said() -> tuple[str, ...]:
    """All texts in the code, with `…` for what is put in, and the sentences of schemas and policies."""
    files = [path for folder in SOURCES for path in (CHECKOUT / folder).rglob("*.py")]
    texts = [text for path in files for text in _texts(path.read_text())]
    for folder in ("crds", "charts/forktree/files/manifests"):
        for path in (CHECKOUT / folder).glob("*.yaml"):
            texts += _messages(yaml.safe_load_all(path.read_text()))
    return tuple(text.replace(GROUP, VARIES) for text in texts)


def _texts(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            parts = (each.value if isinstance(each, ast.Constant) else VARIES for each in node.values)
            yield "".join(str(part) for part in parts)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def _messages(value: object) -> Iterator[str]:
    """What stands under `message` anywhere in a manifest: beside a rule, for who breaks it."""
    match value:
        case dict():
            for key, inner in cast("dict[str, object]", value).items():
                if key == "message" and isinstance(inner, str):
                    yield inner
                yield from _messages(inner)
        case str():
            pass
        case Iterable():
            for inner in cast("Iterable[object]", value):
                yield from _messages(inner)
        case _:
            pass


def test_the_page_quotes_for_each_symptom() -> None:
    assert len(quoted()) > 50
    assert set(quoted()) > NOT_OURS


@pytest.mark.parametrize("message", sorted(set(quoted()) - NOT_OURS))
def test_what_is_quoted_is_what_is_said(message: str) -> None:
    parts = [re.escape(part.strip()) for part in message.replace(GROUP, VARIES).split(VARIES)]
    pattern = re.compile(".*".join(parts), re.DOTALL)
    assert any(pattern.search(text) for text in said()), f"nothing says: {message}"
