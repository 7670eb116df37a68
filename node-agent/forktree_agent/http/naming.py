"""Names of forks whose callers do not care: they tell which node made them, before any object does."""

from __future__ import annotations

import hashlib
import re
import secrets

FOR_CALLERS = "forktree-for-callers"
"""Field manager of what an agent writes because a caller of the HTTP API asked it to."""

_TAG_DIGITS = 6
_MINTED = re.compile(rf"f-([0-9a-f]{{{_TAG_DIGITS}}})-[0-9a-f]{{10}}-[0-9]{{1,3}}-[0-9a-f]{{5}}")


def any_name(node: str) -> str:
    """A name for a fork made on `node`, like no other."""
    return f"f-{tag_of(node)}-{secrets.token_hex(5)}"


def tag_of(node: str) -> str:
    """Stands for a node in such names. Two nodes may have the same one; then the wrong one says so."""
    return hashlib.sha256(node.encode()).hexdigest()[:_TAG_DIGITS]


def tag_in(session_id: str) -> str | None:
    """Which node made the fork of which `session_id` is a child; None where the name does not tell."""
    found = _MINTED.fullmatch(session_id)
    return None if found is None else found[1]
