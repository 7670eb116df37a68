"""Writes `docs/reference.md`, every field of every object: `python -m forktree_dev.reference`.

It is made from the schema that the API server gets, so what a table says of a type, a default or a rule is
what the API server does.
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Final, TypeVar, cast

from pydantic import JsonValue

from forktree.models.base import API_VERSION, ApiObject
from forktree.models.conditions import ConditionType
from forktree.models.reasons import BAKE_STEPS, FORK_STEPS, SESSION_STEPS, Reason
from forktree_dev.crds import KINDS, REPOSITORY, Schema, object_schema
from forktree_dev.generated import cell, write_or_check

FILE: Final = REPOSITORY / "docs" / "reference.md"
_RULES: Final = "x-kubernetes-validations"
_HEAD: Final = f"""\
<!-- Generated from sdk/forktree/models by `make generate`; change those files, not this one. -->
# Reference

All objects of `{API_VERSION}`, field by field; `kubectl explain session.spec` and the like tell the same.
A field in bold must be given. A field that is not listed does not exist: `kubectl apply` refuses it.
"""
_CONDITIONS: Final = "conditions"
_CONDITION: Final = """\
What programs wait for, as in `kubectl wait --for=condition=Ready`. Each has a `type` (below), a `status`
(`True`, `False`, or `Unknown` while nobody who knows can be asked), a `reason` and a `message`,
`lastTransitionTime`, and `observedGeneration`.
"""

Phase = TypeVar("Phase", bound=StrEnum)


def render() -> str:
    """The whole page, the same text for the same models."""
    parts = [_HEAD, *(_kind(model) for model in KINDS), _phases()]
    parts += [_words("Conditions", ConditionType, _CONDITION), _words("Reasons", Reason)]
    return "\n".join(parts)


def _kind(model: type[ApiObject]) -> str:
    resource, schema = model.resource, object_schema(model)
    scope = "In a namespace" if resource.namespaced else "One for the whole cluster"
    names = ", ".join(f"`{name}`" for name in (resource.plural, *resource.short_names))
    lines = [f"## {resource.kind}", "", str(schema["description"]), "", f"{scope}; `kubectl get` {names}."]
    if resource.selectable_fields:
        fields = ", ".join(f"`{path.removeprefix('.')}`" for path in resource.selectable_fields)
        lines += [f"Field selectors: {fields}."]
    for part in ("spec", "status"):
        own = _properties(schema).get(part)
        if own is not None:
            lines += [
                "",
                f"### {resource.kind}: {part}",
                "",
                str(own.get("description", "")),
                "",
                *_table(own),
            ]
    if rules := list(dict.fromkeys(_rules(schema))):
        lines += ["", f"### {resource.kind}: refused with", "", *(f"- {rule}." for rule in rules)]
    return "\n".join([*lines, ""])


def _table(schema: Schema) -> Iterator[str]:
    yield "| field | type | meaning |"
    yield "|---|---|---|"
    for path, field, required in _fields(schema):
        name = f"**`{path}`**" if required else f"`{path}`"
        yield f"| {name} | {_type(path, field)} | {cell(str(field.get('description', '')))} |"


def _fields(schema: Schema, prefix: str = "") -> Iterator[tuple[str, Schema, bool]]:
    """Path, schema and whether it is required, of all fields below `schema`, each before those in it."""
    required = cast("list[JsonValue]", schema.get("required", []))
    for name, field in _properties(schema).items():
        path = f"{prefix}{name}"
        yield path, field, name in required
        if path == _CONDITIONS:
            continue  # They are alike everywhere, so they have a section of their own.
        if field.get("type") == "array":
            yield from _fields(_schema(field["items"]), f"{path}[].")
        else:
            yield from _fields(field, f"{path}.")


def _type(path: str, field: Schema) -> str:
    """Type, bounds and default, as short as a table wants it."""
    if path == _CONDITIONS:
        return "[conditions](#conditions)"
    said = _plain_type(field)
    low, high = field.get("minimum"), field.get("maximum")
    if low is not None and high is not None:
        said += f", {low} to {high}"
    if (default := field.get("default")) is not None and not isinstance(default, dict):
        said += f"; default `{default if isinstance(default, str) else json.dumps(default)}`"
    return said


def _plain_type(field: Schema) -> str:
    words = cast("list[JsonValue]", field.get("enum", []))
    if set(words) == set(Reason):
        return "[reason](#reasons)"
    if words:
        return ", ".join(f"`{word}`" for word in words)
    match field.get("type"):
        case "array":
            return f"list of {_plain_type(_schema(field['items']))}"
        case "object" if isinstance(each := field.get("additionalProperties"), dict):
            return f"map to {_plain_type(each)}"
        case "string" if field.get("format") == "date-time":
            return "time"
        case "string":
            return "text"
        case kind:
            return str(kind)


def _rules(schema: Schema) -> Iterator[str]:
    """What the API server says when a rule on `schema` or below does not hold."""
    for rule in cast("list[Schema]", schema.get(_RULES, [])):
        yield str(rule["message"])
    for field in _properties(schema).values():
        yield from _rules(field)
    for key in ("items", "additionalProperties"):
        if isinstance(below := schema.get(key), dict):
            yield from _rules(below)


def _phases() -> str:
    lines = ["## Phases", "", "For eyes; programs wait for conditions.", ""]
    lines += ["| of | phase | may become |", "|---|---|---|"]
    lines += [*_steps("Session", SESSION_STEPS), *_steps("Fork", FORK_STEPS)]
    lines += [*_steps("a template on a node", BAKE_STEPS), ""]
    return "\n".join(lines)


def _steps(of: str, steps: Mapping[Phase, frozenset[Phase]]) -> Iterator[str]:
    for phase, following in steps.items():
        # In the order of the table, as a set has none.
        names = ", ".join(f"`{each}`" for each in steps if each in following)
        yield f"| {of} | `{phase}` | {names or 'nothing: it is final'} |"


def _words(title: str, words: type[StrEnum], introduction: str = "") -> str:
    meanings = _docstrings(words)
    lines = [f"## {title}", "", *([introduction] if introduction else []), "| word | meaning |", "|---|---|"]
    lines += [f"| `{word}` | {cell(meanings.get(word.name, ''))} |" for word in words]
    return "\n".join([*lines, ""])


def _docstrings(words: type[StrEnum]) -> dict[str, str]:
    """Texts under an enum's members, by the members' names. Python keeps them in the source only."""
    (definition,) = ast.parse(inspect.getsource(words)).body
    found: dict[str, str] = {}
    member = ""
    for statement in cast("ast.ClassDef", definition).body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)]):
                member = name
            case ast.Expr(value=ast.Constant(value=str(text))) if member:
                found[member] = " ".join(text.split())
            case _:
                member = ""
    return found


def _properties(schema: Schema) -> dict[str, Schema]:
    return cast("dict[str, Schema]", schema.get("properties", {}))


def _schema(value: JsonValue) -> Schema:
    return cast("Schema", value)


def main() -> int:
    return write_or_check(
        {FILE: render()}, prog="python -m forktree_dev.reference", description="Write the reference."
    )


if __name__ == "__main__":
    sys.exit(main())
