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
from forktree_dev.generated import surplus, write_or_check

RULES = "x-kubernetes-validations"


def schemas_below(schema: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, schema
    for name, each in schema.get("properties", {}).items():
        yield from schemas_below(each, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if key in schema:
            yield from schemas_below(schema[key], f"{path}[]")


def test_committed_files_are_what_the_models_say() -> None:
    there = {path: path.read_text() for folder in crds.DIRECTORIES for path in folder.glob("*.yaml")}
    assert there == crds.files(), "run make generate"


def test_a_changed_a_missing_and_a_surplus_file_are_stale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in {"same": "1", "changed": "2", "surplus": "3"}.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    files = {tmp_path / "same.yaml": "1", tmp_path / "changed.yaml": "0", tmp_path / "missing.yaml": "4"}

    def run(*arguments: str) -> int:
        monkeypatch.setattr("sys.argv", ["generate", *arguments])
        remove = surplus([tmp_path], "*.yaml", files)
        return write_or_check(files, prog="generate", description="Write.", remove=remove)

    assert run("--check") == 1
    said = capsys.readouterr().err
    assert [name for name in ("same", "changed", "missing", "surplus") if name in said] == [
        "changed", "missing", "surplus",
    ]  # fmt: skip
    assert (tmp_path / "surplus.yaml").exists()
    assert run() == 0
    assert {path: path.read_text() for path in tmp_path.iterdir()} == files
    assert run("--check") == 0


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
