"""The committed CRDs are what the models say, and what the API server can take."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from forktree.models import Session
from forktree.models.base import ApiObject
from forktree_dev import crds

RULES = "x-kubernetes-validations"


def schemas_below(schema: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, schema
    for name, each in schema.get("properties", {}).items():
        yield from schemas_below(each, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if key in schema:
            yield from schemas_below(schema[key], f"{path}[]")


def test_committed_files_are_what_the_models_say() -> None:
    files = {crds.file_name(model): crds.render(model) for model in crds.KINDS}
    for directory in crds.DIRECTORIES:
        assert crds.stale(directory, files) == [], "run make generate"


def test_a_changed_a_missing_and_a_surplus_file_are_stale(tmp_path: Path) -> None:
    for name, text in {"same": "1", "changed": "2", "surplus": "3"}.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    files = {"same.yaml": "1", "changed.yaml": "0", "missing.yaml": "4"}
    assert crds.stale(tmp_path, files) == ["changed.yaml", "missing.yaml", "surplus.yaml"]


def test_the_first_line_names_the_source() -> None:
    first = crds.render(Session).splitlines()[0]
    assert "sdk/forktree/models/session.py" in first
    assert "make generate" in first


@pytest.mark.parametrize("model", crds.KINDS, ids=lambda model: model.__name__)
def test_schema_is_structural(model: type[ApiObject]) -> None:
    for path, schema in schemas_below(
        yaml.safe_load(crds.render(model))["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    ):
        assert "type" in schema, path
        assert not {"$ref", "$defs", "anyOf", "title", "const", "exclusiveMinimum"} & schema.keys(), path


@pytest.mark.parametrize("model", crds.KINDS, ids=lambda model: model.__name__)
def test_every_field_is_explained_and_status_has_no_defaults(model: type[ApiObject]) -> None:
    own = crds.object_schema(model)["properties"]
    assert isinstance(own, dict)
    for part in own.keys() & {"spec", "status"}:
        for path, schema in schemas_below(own[part], part):
            assert path.endswith("[]") or schema.get("description"), path
            assert part == "spec" or "default" not in schema, path


@pytest.mark.parametrize("model", crds.KINDS, ids=lambda model: model.__name__)
def test_rules_say_in_one_sentence_what_to_do(model: type[ApiObject]) -> None:
    for path, schema in schemas_below(crds.object_schema(model)):
        for rule in schema.get(RULES, []):
            message = rule["message"]
            assert ": " in message, f"{path}: {message}"
            assert not message.endswith("."), f"{path}: {message}"
            assert "\n" not in message, f"{path}: {message}"


@pytest.mark.parametrize("model", crds.KINDS, ids=lambda model: model.__name__)
def test_columns_fit_a_terminal(model: type[ApiObject]) -> None:
    shown = [column.name for column in model.resource.columns if column.priority == 0]
    assert len(shown) <= 7
    assert sum(max(len(name), 6) + 3 for name in shown) <= 70
