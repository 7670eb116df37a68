"""The OpenAPI 3.1 document of the API, made of the same tables as what is served."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final, Literal

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from forktree.wire import IDEMPOTENCY_KEY, ErrorBody
from forktree_agent.http.errors import STATUS, Code
from forktree_agent.http.repeating import KEY_LONGEST
from forktree_agent.http.streaming import NDJSON
from forktree_agent.http.table import PARAMETERS, Each, Lines, OpenRoute, Raw, Route, Shape

Json = dict[str, Any]
_Schemas = Mapping[type[BaseModel], Json]

_REF: Final = "#/components/schemas/{model}"
_ABOUT: Final = """\
Sessions are live environments; a fork makes children of one that go on from its very state. All of it belongs
to a namespace: every path stands under `/ns/{namespace}/v1` and, for the namespace of the caller's own
service account, under `/v1`.

A caller sends a token of a Kubernetes service account, made for the audience `forktree.dev`. An unset value
is left out, never null. An error has a `code` and a sentence; only `at_capacity` and `session_bringup_failed`
promise that nothing was begun, so that a POST may be sent again as it is.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Routes that stand apart in the document, under a tag of their own."""

    tag: str
    about: str
    routes: tuple[Route, ...]


def document(
    routes: Iterable[Route], open_routes: Iterable[OpenRoute], sections: Iterable[Section] = ()
) -> Json:
    """The whole document, the same for the same tables."""
    own, open_routes, sections = tuple(routes), tuple(open_routes), tuple(sections)
    routes = (*own, *(route for section in sections for route in section.routes))
    schemas, components = _schemas(routes, open_routes)
    paths: Json = {}
    for route in own:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, schemas, components)
    for section in sections:
        for route in section.routes:
            operation: Json = {**_operation(route, schemas, components), "tags": [section.tag]}
            paths.setdefault(route.path, {})[route.method.lower()] = operation
    for each in open_routes:
        operation = {
            "summary": each.summary,
            "operationId": _operation_id("GET", each.path),
            "security": [],
            "responses": _responses(each.answers, schemas),
        }
        paths[each.path] = {"servers": [{"url": "/v1"}], "get": operation}
    for query in {route.query for route in routes if route.query is not None}:
        components.pop(query.__name__, None)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "forktree",
            "version": importlib.metadata.version("forktree"),
            "description": _ABOUT,
        },
        "servers": [
            {"url": "/ns/{namespace}/v1", "variables": {"namespace": {"default": "default"}}},
            {"url": "/v1", "description": "The namespace of the caller's own service account."},
        ],
        "security": [{"token": []}],
        "tags": [{"name": section.tag, "description": section.about} for section in sections],
        "paths": dict(sorted(paths.items())),
        "components": {
            "schemas": dict(sorted(components.items())),
            "securitySchemes": {
                "token": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "kubectl create token SERVICE_ACCOUNT --audience forktree.dev",
                }
            },
        },
    }


def _schemas(routes: tuple[Route, ...], open_routes: tuple[OpenRoute, ...]) -> tuple[_Schemas, Json]:
    """A reference to each model that is sent either way, and the components that they refer to."""
    sent: dict[type[BaseModel], Literal["validation", "serialization"]] = {ErrorBody: "serialization"}
    for answers in (*(each.answers for each in routes), *(each.answers for each in open_routes)):
        for model in _models(shape for shapes in answers.values() for shape in shapes):
            sent[model] = "serialization"
    for route in routes:
        for asked in (route.body, route.query):
            if asked is not None and not isinstance(asked, Raw):
                sent[asked] = "validation"
    references, definitions = models_json_schema(list(sent.items()), ref_template=_REF)
    components: Json = definitions["$defs"]
    requests = {model.__name__ for model, mode in sent.items() if mode == "validation"}
    in_requests = _with_what_they_hold(requests, components)
    for name, schema in components.items():
        _tidy(schema, nulls=name in in_requests)
    components["ErrorBody"]["properties"]["code"]["enum"] = sorted(Code)
    return {model: references[model, mode] for model, mode in sent.items()}, components


def _with_what_they_hold(names: set[str], components: Json) -> set[str]:
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            held = re.findall(r"#/components/schemas/(\w+)", str(components[name]))
            waiting += held
    return found


def _models(shapes: Iterable[Shape]) -> Iterator[type[BaseModel]]:
    for shape in shapes:
        match shape:
            case Each(of=model):
                yield model
            case Lines(of=models):
                yield from models
            case Raw():
                pass
            case model:
                yield model


def _tidy(schema: Json, *, nulls: bool) -> None:
    """Texts as paragraphs and not as lines of source; what is never null does not say that it may be."""
    schema.pop("title", None)
    if "description" in schema:
        schema["description"] = " ".join(schema["description"].split())
    for field in schema.get("properties", {}).values():
        field.pop("title", None)
        if "description" in field:
            field["description"] = " ".join(field["description"].split())
        if "patternProperties" in field:
            field["additionalProperties"] = False  # Other keys are refused.
        if not nulls:
            _without_null(field)


def _without_null(field: Json) -> None:
    """In place: a value that may be unset, as it is where it is set."""
    kinds = [each for each in field.get("anyOf", []) if each.get("type") != "null"]
    if len(kinds) == len(field.get("anyOf", [])):
        return
    del field["anyOf"]
    if field.get("default") is None:
        field.pop("default", None)
    field |= kinds[0] if len(kinds) == 1 else {"anyOf": kinds}


def _operation(route: Route, schemas: _Schemas, components: Json) -> Json:
    operation: Json = {
        "summary": route.summary,
        "operationId": _operation_id(route.method, route.path),
        "description": _rights(route),
        "parameters": [*_path_parameters(route), *_query_parameters(route, components), *_headers(route)],
        "responses": _responses(route.answers, schemas),
    }
    match route.body:
        case None:
            pass
        case Raw(content_type=content_type):
            operation["requestBody"] = {"required": True, "content": {content_type: {}}}
        case model:
            required = any(each.is_required() for each in model.model_fields.values())
            content = {"application/json": {"schema": schemas[model]}}
            operation["requestBody"] = {"required": required, "content": content}
    return operation


def _rights(route: Route) -> str:
    if not route.rights:
        return "Takes the rights that each of its parts takes alone; one that is missing is told of its part."
    rights = ", ".join(f"`{each.verb}` on `{each.resource}`" for each in route.rights)
    return f"Takes the right to {rights}."


def _operation_id(method: str, path: str) -> str:
    words = [word.strip("{}").replace(".", "_") for word in path.split("/") if word]
    return "_".join((method.lower(), *words))


def _path_parameters(route: Route) -> Iterator[Json]:
    for name in route.parameters:
        parameter = PARAMETERS[name]
        yield {
            "name": name,
            "in": "path",
            "required": True,
            "description": parameter.meaning,
            "schema": {"type": "string", "pattern": f"^(?:{parameter.pattern})$"},
        }


def _query_parameters(route: Route, components: Json) -> Iterator[Json]:
    if route.query is None:
        return
    schema = components[route.query.__name__]
    for name, field in schema["properties"].items():
        schema_of = {key: value for key, value in field.items() if key != "description"}
        _without_null(schema_of)
        parameter = {"name": name, "in": "query", "schema": schema_of}
        if name in schema.get("required", []):
            parameter["required"] = True
        if "description" in field:
            parameter["description"] = field["description"]
        yield parameter


def _headers(route: Route) -> Iterator[Json]:
    if route.repeatable:
        yield {
            "name": IDEMPOTENCY_KEY,
            "in": "header",
            "description": "Makes the call repeatable, like a name that is the caller's alone.",
            "schema": {
                "type": "string",
                "minLength": 1,
                "maxLength": KEY_LONGEST,
                "pattern": "^[!-~]([ -~]*[!-~])?$",
            },
        }


def _responses(answers: Mapping[HTTPStatus, tuple[Shape, ...]], schemas: _Schemas) -> Json:
    responses: Json = {}
    for status, shapes in answers.items():
        responses[str(int(status))] = {"description": status.phrase}
        content = dict(_content(shape, schemas) for shape in shapes)
        if content:
            responses[str(int(status))]["content"] = content
    statuses = ", ".join(str(int(status)) for status in sorted(set(STATUS.values())))
    responses["default"] = {
        "description": f"Refused or failed, with one of {statuses}.",
        "content": {"application/json": {"schema": schemas[ErrorBody]}},
    }
    return responses


def _content(shape: Shape, schemas: _Schemas) -> tuple[str, Json]:
    match shape:
        case Each(of=model):
            return "application/json", {"schema": {"type": "array", "items": schemas[model]}}
        case Lines(of=models):
            return NDJSON, {"schema": {"description": "Of each line."} | _any_of(models, schemas)}
        case Raw(content_type=content_type):
            return content_type, {}
        case model:
            return "application/json", {"schema": schemas[model]}


def _any_of(models: Iterable[type[BaseModel]], schemas: _Schemas) -> Json:
    return {"anyOf": [schemas[model] for model in models]}
