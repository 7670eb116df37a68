"""Writes `crds/*.yaml` and the chart's copies from the API's models: `python -m forktree_dev.crds`.

Pydantic's JSON schema becomes the structural schema that the API server asks for: no references, no unions
with null, no titles. What JSON schema cannot say (CEL rules, list kinds, columns) the models carry.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, cast

import yaml
from pydantic import JsonValue

from forktree.models import Fork, ForkNode, Session, SessionTemplate
from forktree.models.base import GROUP, VERSION, ApiObject
from forktree.models.schema import Column
from forktree_dev.generated import surplus, write_or_check

Schema = dict[str, JsonValue]

REPOSITORY: Final = Path(__file__).resolve().parents[2]
KINDS: Final[tuple[type[ApiObject], ...]] = (SessionTemplate, Session, Fork, ForkNode)
DIRECTORIES: Final = (REPOSITORY / "crds", REPOSITORY / "charts" / "forktree" / "files" / "crds")
"""For whoever applies them by hand; and in the chart, which is packed without anything around it."""
CATEGORY: Final = "forktree"
_RULES: Final = "x-kubernetes-validations"


class _Dumper(yaml.SafeDumper):
    """Writes text of several paragraphs as it reads, and a part that is used twice in both places."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    # A parameter of it has no type.
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style)  # pyright: ignore[reportUnknownMemberType]


_Dumper.add_representer(str, _represent_text)


def file_name(model: type[ApiObject]) -> str:
    return f"{model.resource.plural}.yaml"


def render(model: type[ApiObject]) -> str:
    """The whole file of one CRD, the same text for the same models."""
    source = Path(inspect.getfile(model)).relative_to(REPOSITORY)
    body: str = yaml.dump(  # pyright: ignore[reportUnknownMemberType]  (a parameter of its has no type)
        definition(model), Dumper=_Dumper, sort_keys=False, width=110, allow_unicode=True
    )
    return f"# Generated from {source} by `make generate`; change that file, not this one.\n{body}"


def definition(model: type[ApiObject]) -> Schema:
    """The CustomResourceDefinition of one kind."""
    resource = model.resource
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{resource.plural}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced" if resource.namespaced else "Cluster",
            "names": {
                "kind": resource.kind,
                "listKind": f"{resource.kind}List",
                "plural": resource.plural,
                "singular": resource.kind.lower(),
                "shortNames": list(resource.short_names),
                "categories": [CATEGORY],
            },
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "subresources": {"status": {}},
                    **_some("selectableFields", [{"jsonPath": path} for path in resource.selectable_fields]),
                    "additionalPrinterColumns": [_column(column) for column in resource.columns],
                    "schema": {"openAPIV3Schema": object_schema(model)},
                }
            ],
        },
    }


def object_schema(model: type[ApiObject]) -> Schema:
    """The structural schema of one kind."""
    whole = model.model_json_schema()
    definitions = _schema(whole.pop("$defs", {}))
    own = _schema(whole["properties"])
    name_rules: list[JsonValue] = [
        {"rule": rule, "message": message, "fieldPath": ".metadata.name"}
        for rule, message in model.resource.name_rules
    ]
    properties: Schema = {
        "apiVersion": {"type": "string"},
        "kind": {"type": "string"},
        # The API server checks metadata by itself. Its name stands here for the rules that point to it.
        "metadata": {
            "type": "object",
            **({"properties": {"name": {"type": "string"}}} if name_rules else {}),
        },
    }
    if "spec" in own:
        properties["spec"] = _structural(_schema(own["spec"]), definitions)
    # A default in status would be a fact that nobody has seen.
    properties["status"] = _without_defaults(_structural(_schema(own["status"]), definitions))
    return {
        "type": "object",
        "description": _one_line(inspect.getdoc(model) or ""),
        **({"required": ["spec"]} if "spec" in own else {}),
        "properties": properties,
        **_some(_RULES, name_rules),
    }


def _structural(schema: Schema, definitions: Schema) -> Schema:
    """One node of the schema and all below it, as Kubernetes wants them."""
    schema = _resolved(schema, definitions)
    made: Schema = {}
    for key, value in schema.items():
        match key:
            case "title" | "const":
                pass
            case "minimum" | "maximum" if _RULES in schema:
                pass  # A rule says the same in a better sentence, and is not asked if the bound fails first.
            case "default":
                if (kept := _without_null(value)) not in (None, "", [], {}):
                    made[key] = kept
            case "description":
                made[key] = _one_line(str(value))
            case "properties":
                made[key] = {
                    name: _structural(_schema(each), definitions) for name, each in _schema(value).items()
                }
            case "items" | "additionalProperties":
                made[key] = _structural(_schema(value), definitions)
            case _:
                made[key] = value
    if made.get("type") == "integer":
        made["format"] = "int64"
    return {key: made[key] for key in sorted(made, key=_place)}


def _place(key: str) -> int:
    """What a reader looks for first comes first; all that is not named here stands in the middle."""
    return {
        "type": 0,
        "description": 1,
        "default": 2,
        _RULES: 4,
        "required": 5,
        "properties": 6,
        "items": 7,
    }.get(key, 3)


def _without_null(value: JsonValue) -> JsonValue:
    """A default as the API server takes it: not set is left out."""
    if isinstance(value, dict):
        return {key: _without_null(each) for key, each in value.items() if each is not None}
    return value


def _resolved(schema: Schema, definitions: Schema) -> Schema:
    """`schema` without a reference or a union with null on its first level; what a field says wins."""
    if "anyOf" in schema:
        choices = [_schema(each) for each in _list(schema["anyOf"])]
        real = [each for each in choices if each.get("type") != "null"]
        if len(real) != 1:
            raise ValueError(f"a union of {len(real)} kinds has no structural schema: {schema}")
        rest = {key: value for key, value in schema.items() if key != "anyOf"}
        schema = {**real[0], **rest}
    if "$ref" in schema:
        name = str(schema["$ref"]).removeprefix("#/$defs/")
        rest = {key: value for key, value in schema.items() if key != "$ref"}
        schema = {**_schema(definitions[name]), **rest, **_both_rules(_schema(definitions[name]), rest)}
    return schema


def _both_rules(inner: Schema, outer: Schema) -> Schema:
    """The rules of a type and of the field that has it: neither may hide the other."""
    return _some(_RULES, [*_list(inner.get(_RULES, [])), *_list(outer.get(_RULES, []))])


def _without_defaults(schema: Schema) -> Schema:
    kept: Schema = {}
    for key, value in schema.items():
        if key == "properties":
            kept[key] = {name: _without_defaults(_schema(each)) for name, each in _schema(value).items()}
        elif key in ("items", "additionalProperties"):
            kept[key] = _without_defaults(_schema(value))
        elif key != "default":
            kept[key] = value
    return kept


def _column(column: Column) -> Schema:
    return {
        "name": column.name,
        "type": column.type,
        "jsonPath": column.path,
        **({"description": column.description} if column.description else {}),
        **({"priority": column.priority} if column.priority else {}),
    }


def _some(key: str, values: Sequence[JsonValue]) -> Schema:
    return {key: list(values)} if values else {}


def _one_line(text: str) -> str:
    """Docstrings are wrapped for the source; `kubectl explain` wraps for the terminal."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in inspect.cleandoc(text).split("\n\n"))


def _schema(value: object) -> Schema:
    if not isinstance(value, dict):
        raise TypeError(f"a schema is an object, not {value!r}")
    return cast("Schema", value)


def _list(value: JsonValue) -> list[JsonValue]:
    if not isinstance(value, list):
        raise TypeError(f"expected a list, not {value!r}")
    return value


def files() -> dict[Path, str]:
    """What is to be in each of the folders."""
    rendered = {file_name(model): render(model) for model in KINDS}
    return {folder / name: text for folder in DIRECTORIES for name, text in rendered.items()}


def main() -> int:
    return write_or_check(
        files(),
        prog="python -m forktree_dev.crds",
        description="Write the CRDs.",
        remove=surplus(DIRECTORIES, "*.yaml", files()),
    )


if __name__ == "__main__":
    sys.exit(main())
