"""The committed reference is what the models say, and says something about everything."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from forktree.models import Fork, Session
from forktree.models.base import ApiObject
from forktree_dev import crds, reference


def rows(text: str) -> list[list[str]]:
    """The cells of every row of every table, without headings."""
    split = [re.split(r"(?<!\\)\|", line)[1:-1] for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row] for row in split if row[0].strip() not in ("field", "of", "word")]


def section(title: str) -> str:
    return reference.render().partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def leaves(schema: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for name, field in schema.get("properties", {}).items():
        if name == "conditions":
            continue
        inner = field.get("items", field)
        path = f"{prefix}{name}" + ("[]" if "items" in field else "")
        if "properties" in inner:
            yield from leaves(inner, f"{path}.")
        else:
            yield f"{prefix}{name}"


def test_the_committed_file_is_what_the_models_say() -> None:
    assert reference.FILE.read_text() == reference.render(), "run make generate"


@pytest.mark.parametrize("model", crds.KINDS, ids=lambda model: model.__name__)
def test_every_field_of_every_kind_has_a_row_with_a_type_and_a_meaning(model: type[ApiObject]) -> None:
    own: dict[str, Any] = crds.object_schema(model)
    found = {row[0].strip("*`"): row for row in rows(section(model.__name__))}
    for part in own["properties"].keys() & {"spec", "status"}:
        for path in leaves(own["properties"][part]):
            assert all(found[path]), path


def test_what_must_be_given_is_bold_and_what_has_a_default_shows_it() -> None:
    fork = section("Fork")
    assert "| **`source`** | object |" in fork
    assert "| `seedMode` | `Fresh`, `Common`, `Derived`; default `Fresh` |" in fork


def test_what_the_api_server_refuses_is_listed_in_its_own_words() -> None:
    assert "\n- spec.templateRef cannot be changed: create another Session.\n" in section("Session")


def test_every_reason_condition_and_step_is_explained() -> None:
    for title in ("Reasons", "Conditions", "Phases"):
        explained = rows(section(title))
        assert len(explained) > 3
        assert all(all(row) for row in explained), title


@pytest.mark.parametrize("model", [Session, Fork])
def test_no_row_is_broken_by_what_stands_in_it(model: type[ApiObject]) -> None:
    assert {len(row) for row in rows(section(model.__name__))} == {3}
