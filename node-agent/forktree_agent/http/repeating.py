"""Calls that may be repeated: by a name that the client chose, or by a key in a header."""

from __future__ import annotations

import hashlib

from aiohttp import web

from forktree.wire import IDEMPOTENCY_KEY
from forktree_agent.http.auth import Caller
from forktree_agent.http.errors import Code, Refusal

KEY_LONGEST = 255

_DIGITS = 24
"""96 bits: no two keys of a namespace ever meet, and names of children still fit."""


def name_of(request: web.Request, caller: Caller, given: str | None) -> str | None:
    """The name of the object that a call asks for: the one given, one made of its key, or None for any.

    The object remembers for us: as long as it exists, the same key means it. Raises `Refusal`.
    """
    key = request.headers.get(IDEMPOTENCY_KEY)
    if key is None:
        return given
    if given is not None:
        raise Refusal(
            Code.BAD_REQUEST, f"`name` and {IDEMPOTENCY_KEY} both make this call repeatable: send one of them"
        )
    if not key or len(key) > KEY_LONGEST or not key.isprintable():
        sentence = f"{IDEMPOTENCY_KEY} must have 1 to {KEY_LONGEST} printable characters"
        raise Refusal(Code.BAD_REQUEST, sentence)
    digest = hashlib.sha256("\0".join((caller.username, key)).encode()).hexdigest()
    return f"k-{digest[:_DIGITS]}"


def called(request: web.Request, kind: str, name: str) -> str:
    """The object that a call asked for, for a sentence: by the word that its caller used."""
    return f"{kind} {name}" if IDEMPOTENCY_KEY not in request.headers else f"{kind} of this {IDEMPOTENCY_KEY}"
