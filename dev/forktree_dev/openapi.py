"""Writes `docs/openapi.json` and `docs/http-reference.md`: `python -m forktree_dev.openapi`.

Both are made of the tables of routes that the agent serves, so what they say of a path is what is there.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from forktree_agent.http import routes
from forktree_dev.crds import REPOSITORY
from forktree_dev.generated import cell, write_or_check

DOCUMENT: Final = REPOSITORY / "docs" / "openapi.json"
REFERENCE: Final = REPOSITORY / "docs" / "http-reference.md"
_HEAD: Final = """\
<!-- Generated from node-agent/forktree_agent/http by `make generate`; change those files, not this one. -->
# HTTP reference

Every path of the HTTP API and every field of its bodies, as `GET /v1/openapi.json` has them for programs. How
to use them, by task: [HTTP](http.md). All paths stand under `/ns/{namespace}/v1`, and under `/v1` for the
namespace of the caller's own service account. A field in bold must be given.
"""

Json = dict[str, Any]


def render() -> dict[Path, str]:
    """What each file must say."""
    document = routes.document()
    text = json.dumps(document, indent=1, ensure_ascii=False) + "\n"
    return {DOCUMENT: text, REFERENCE: "\n".join(_page(document))}


def _page(document: Json) -> Iterator[str]:
    yield _HEAD
    yield "## Paths"
    yield ""
    yield from _paths(document, [])
    for tag in document["tags"]:
        yield f"## Paths for {tag['name']}"
        yield ""
        yield tag["description"]
        yield ""
        yield from _paths(document, [tag["name"]])
    yield "## Bodies"
    yield ""
    for name, schema in document["components"]["schemas"].items():
        yield from _body(name, schema)


def _paths(document: Json, tags: list[str]) -> Iterator[str]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            if method != "servers" and operation.get("tags", []) == tags:
                yield from _operation(f"{method.upper()} {path}", operation)


def _operation(title: str, operation: Json) -> Iterator[str]:
    yield f"### {title}"
    yield ""
    yield f"{operation['summary']}. {operation.get('description', 'Takes no token.')}"
    yield ""
    if body := operation.get("requestBody"):
        yield f"- is sent {_content(body['content'])}"
    for status, response in operation["responses"].items():
        if status != "default":
            yield f"- answers {status} {_content(response.get('content', {}))}".rstrip()
    given = [each for each in operation.get("parameters", []) if each["in"] != "path"]
    if given:
        yield ""
        yield "| parameter | type | meaning |"
        yield "|---|---|---|"
        for each in given:
            where = " (header)" if each["in"] == "header" else ""
            name = _bold(f"`{each['name']}`{where}", each.get("required", False))
            yield f"| {name} | {_type(each['schema'])} | {cell(each.get('description', ''))} |"
    yield ""


def _content(content: Json) -> str:
    return " or ".join(
        f"{_type(media['schema'])}{'' if kind == 'application/json' else f' a line ({kind})'}"
        if "schema" in media
        else f"`{kind}`"
        for kind, media in content.items()
    )


def _body(name: str, schema: Json) -> Iterator[str]:
    yield f"### {name}"
    yield ""
    if "description" in schema:
        yield schema["description"]
        yield ""
    if "enum" in schema:
        yield ", ".join(f"`{each}`" for each in schema["enum"])
        yield ""
    if fields := schema.get("properties"):
        yield "| field | type | meaning |"
        yield "|---|---|---|"
        for key, field in fields.items():
            must = key in schema.get("required", [])
            yield f"| {_bold(f'`{key}`', must)} | {_type(field)} | {cell(field.get('description', ''))} |"
        yield ""


def _type(schema: Json) -> str:
    said = _plain(schema)
    low = schema.get("minimum", schema.get("exclusiveMinimum"))
    high = schema.get("maximum", schema.get("exclusiveMaximum"))
    if low is not None and high is not None:
        said += f", {low:g} to {high:g}"
    default = schema.get("default")
    return said if default is None or isinstance(default, dict | list) else f"{said}; default `{default}`"


def _plain(schema: Json) -> str:
    match schema:
        case {"$ref": reference}:
            name = str(reference).rpartition("/")[2]
            return f"[{name}](#{name.lower()})"
        case {"anyOf": kinds}:
            return " or ".join(_plain(each) for each in kinds)
        case {"const": word}:
            return f"`{word}`"
        case {"enum": words}:
            return ", ".join(f"`{word}`" for word in words)
        case {"type": "array", "items": items}:
            return f"list of {_plain(items)}"
        case {"type": "object", "patternProperties": named}:
            of_each: list[Json] = list(named.values())
            return f"map to {' or '.join(_plain(each) for each in of_each)}"
        case {"type": "object", "additionalProperties": of} if of:
            return f"map to {_plain(of)}"
        case {"type": "string"}:
            return "text"
        case _:
            return str(schema.get("type", "any"))


def _bold(name: str, must: bool) -> str:
    return f"**{name}**" if must else name


def main() -> int:
    return write_or_check(
        render(),
        prog="python -m forktree_dev.openapi",
        description="Write the HTTP API's document and reference.",
    )


if __name__ == "__main__":
    sys.exit(main())
