"""What may be sent to the HTTP API: whatever it is, it fits its model, or one clear sentence says why not.

The first byte chooses what is read and how it is made: as it comes, or of the words that models know.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from typing import TypeVar, cast
from urllib.parse import urlencode

from aiohttp.test_utils import make_mocked_request
from pydantic import BaseModel

from forktree import wire, wire_batches, wire_exec, wire_files, wire_trees
from forktree_agent.http import auth, bodies, queries
from forktree_agent.http.errors import Refusal
from fuzz.dealt import Dealt

LONGEST_SENTENCE = 600
DEEPEST = 6

Model = TypeVar("Model", bound=BaseModel)
MODULES = (wire, wire_batches, wire_exec, wire_files, wire_trees)


def models(base: type[Model]) -> tuple[type[Model], ...]:
    """All that a client may send, by name."""
    found = {
        each
        for module in MODULES
        for each in vars(module).values()
        if isinstance(each, type) and issubclass(each, base) and each is not base
    }
    return tuple(sorted(found, key=lambda each: each.__name__))


REQUESTS = models(wire.Request)
QUERIES = models(wire.Query)
KEYS = tuple(
    sorted(
        {field.alias or name for model in (*REQUESTS, *QUERIES) for name, field in model.model_fields.items()}
    )
)
VALUES: tuple[object, ...] = (
    None,
    True,
    0,
    1,
    -1,
    0.5,
    3600,
    1 << 31,
    1 << 63,
    10**400,
    float("nan"),
    float("inf"),
    "",
    "a",
    "true",
    "eA==",
    "eA",
    "\0",
    "\ud800",
    "\x1b[2J\n",
    "complete",
    "Derived",
    "/etc",
    "../..",
    "k=v",
    "forktree.dev/x",
    "secret-" * 50,
    "é" * 5000,
)
SECRET = "secret-secret-"


def value(dealt: Dealt, depth: int = 0) -> object:
    kind = dealt.byte()
    if kind % 8 == 0 and depth < DEEPEST:
        return {
            str(dealt.one_of((*KEYS, *VALUES))): value(dealt, depth + 1) for _ in range(dealt.byte() % 40)
        }
    if kind % 8 == 1 and depth < DEEPEST:
        return [value(dealt, depth + 1) for _ in range(dealt.byte() % 40)]
    if kind % 8 == 2:
        return dealt.piece(64).decode(errors="replace")
    return dealt.one_of(VALUES)


def fitting(dealt: Dealt, model: type[BaseModel]) -> dict[str, object]:
    """An object with some of the keys of `model`."""
    keys = [field.alias or name for name, field in model.model_fields.items()]
    return {dealt.one_of((*keys, dealt.one_of(KEYS))): value(dealt) for _ in range(dealt.byte() % 8)}


def one_input(data: bytes) -> None:
    """Raises where what comes out is neither what was asked for nor a refusal that shows nothing of it."""
    dealt = Dealt(data)
    match dealt.byte() % 6:
        case 0:
            _body(dealt.rest(), REQUESTS)
        case 1 | 2:
            model = dealt.one_of(REQUESTS)
            _body(json.dumps(fitting(dealt, model)).encode(errors="replace"), (model,))
        case 3:
            _query(dealt.rest().decode(errors="surrogateescape"), QUERIES)
        case 4:
            model_of_query = dealt.one_of(QUERIES)
            given = fitting(dealt, model_of_query)
            _query(urlencode(given, doseq=True, errors="replace"), (model_of_query,))
        case _:
            _packed(dealt)


def _body(raw: bytes, tried: tuple[type[wire.Request], ...]) -> None:
    for model in tried:
        with _refusing(raw):
            assert isinstance(bodies.decode(raw, model), model)


def _query(text: str, tried: tuple[type[wire.Query], ...]) -> None:
    path = "/?" + "".join(each for each in text if each.isprintable() and each not in " #")
    with suppress(ValueError):  # The server's own parser refuses it, as it does before any handler.
        request = make_mocked_request("GET", path)
        for model in tried:
            with _refusing(path.encode(errors="replace")):
                assert isinstance(queries.read(request, model), model)


def _packed(dealt: Dealt) -> None:
    encoding = dealt.one_of(("gzip", "deflate"))
    packed = dealt.rest()
    with _refusing(packed):
        assert len(bodies.unpacked(packed, encoding)) <= wire.MAX_BODY_BYTES
    auth.claims_of(f"a.{packed.decode('latin-1')}.c")


class _refusing(suppress):
    """Lets refusals pass that are as they should be."""

    def __init__(self, sent: bytes) -> None:
        super().__init__(Refusal)
        self._sent = sent

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, Refusal):
            assert error.sentence.isprintable(), error.sentence
            assert 0 < len(error.sentence) <= LONGEST_SENTENCE, error.sentence
            shown = [each for each in _values(self._sent) if len(each) > 12 and each in error.sentence]
            assert not shown, f"{shown} is shown in: {error.sentence}"
            assert error.__cause__ is None or SECRET not in str(error.__cause__)
            assert error.status < 500
        return isinstance(error, Refusal)


def _values(sent: bytes) -> Iterator[str]:
    """The texts in it that are no keys."""
    try:
        waiting: list[object] = [json.loads(sent)]
    except (ValueError, RecursionError):
        return
    keys = set[str]()
    found = list[str]()
    while waiting:
        each = waiting.pop()
        if isinstance(each, dict):
            items = cast("dict[str, object]", each)
            keys |= set(items)
            waiting += items.values()
        elif isinstance(each, list):
            waiting += cast("list[object]", each)
        elif isinstance(each, str):
            found.append(each)
    yield from (text for text in found if not any(text in key for key in keys))
