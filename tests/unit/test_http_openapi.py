"""The OpenAPI document and the reference are what the tables of routes say, and say it of all of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from forktree_agent.http.collimate.gateway import GATEWAY
from forktree_agent.http.routes import EXISTING_CLIENTS, OPEN, ROUTES, document
from forktree_agent.http.table import PARAMETERS
from forktree_dev.openapi import render

DOCUMENT = document()


def parts(value: Any) -> Iterator[dict[str, Any]]:
    below: list[Any] = []
    if isinstance(value, dict):
        yield value
        below = [*value.values()]
    elif isinstance(value, list):
        below = [*value]
    for each in below:
        yield from parts(each)


def test_the_committed_files_are_not_stale() -> None:
    for file, text in render().items():
        assert file.read_text() == text, f"{file} is stale: run make generate"


def test_every_route_is_in_the_document_once() -> None:
    told = {
        (method, path)
        for path, methods in DOCUMENT["paths"].items()
        for method in methods
        if method != "servers"
    }
    served = {(each.method.lower(), each.path) for each in (*ROUTES, *GATEWAY.routes)}
    assert told == served | {("get", each.path) for each in OPEN}
    assert len(ROUTES) + len(EXISTING_CLIENTS.routes) + len(OPEN) == len(told)
    names = [each["operationId"] for each in parts(DOCUMENT) if "operationId" in each]
    assert len(names) == len(set(names))


def test_what_a_path_leaves_open_is_checked_by_the_table() -> None:
    assert {name for route in ROUTES for name in route.parameters} == set(PARAMETERS)


def test_every_reference_leads_to_a_schema() -> None:
    schemas = DOCUMENT["components"]["schemas"]
    used = {each["$ref"].rpartition("/")[2] for each in parts(DOCUMENT) if isinstance(each.get("$ref"), str)}
    assert used == set(schemas)


def test_an_answer_never_promises_null() -> None:
    answers = [
        response
        for methods in DOCUMENT["paths"].values()
        for method, operation in methods.items()
        if method != "servers"
        for response in operation["responses"].values()
    ]
    waiting = [each["$ref"].rpartition("/")[2] for each in parts(answers) if "$ref" in each]
    seen: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        schema = DOCUMENT["components"]["schemas"][name]
        assert not [each for each in parts(schema) if each.get("type") == "null"], name
        waiting += [each["$ref"].rpartition("/")[2] for each in parts(schema) if "$ref" in each]


def test_every_field_of_a_path_and_of_a_query_says_what_it_means() -> None:
    told = [each for each in parts(DOCUMENT["paths"]) if each.get("in") in {"path", "query", "header"}]
    assert len(told) > len(ROUTES)
    for parameter in told:
        assert parameter.get("description"), parameter
