"""What stands after the `?` of a request, as the model that its route declares."""

from __future__ import annotations

from typing import TypeVar, get_origin

from aiohttp import web
from pydantic import ValidationError

from forktree.wire import Query
from forktree_agent.http.bodies import refusal_of
from forktree_agent.http.errors import Code, Refusal

QueryT = TypeVar("QueryT", bound=Query)


def read(request: web.Request, model: type[QueryT]) -> QueryT:
    """The query as `model`. Raises `Refusal` with the first thing wrong."""
    given: dict[str, str | list[str]] = {}
    for name, field in model.model_fields.items():
        key = field.alias or name
        values = request.query.getall(key, [])
        if values and get_origin(field.annotation) is tuple:
            given[key] = values
        elif len(values) > 1:
            raise Refusal(Code.BAD_REQUEST, f"`{key}` is given twice")
        elif values:
            given[key] = values[0]
    try:
        query = model.model_validate(given)
    except ValidationError as err:
        refusal = refusal_of(err)
    else:
        return query
    raise refusal
