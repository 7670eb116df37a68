"""What of a request's head goes to a server in a guest, and what of its answer's to the caller.

All guests of a node answer under one origin, the agent's, and any of them may be hostile. So nothing of a
caller's that is meant for the agent enters a guest, tokens first of all; and no answer of a guest can set
state of that origin, speak for the agent, or lead a caller who carries a token to another of its paths.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final
from urllib.parse import urlsplit

from multidict import CIMultiDict

from forktree_agent.http.hosts import may_be_same

Headers = list[tuple[str, str]]

FROM_SESSION: Final = "Forktree-Session"
"""Stands in every answer that a server in a guest has given, with the session's name, and in no other."""

_OURS: Final = "forktree-"

_OF_A_HOP: Final = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "expect",
    }
)
"""About one connection, not about what is said over it (RFC 9110, 7.6.1)."""

_LENGTH: Final = frozenset({"content-length"})
"""Of a request's body. Whoever sends that says how its end is told."""

_NOT_TO_GUESTS: Final = frozenset(
    {
        "authorization",
        "proxy-authorization",
        "cookie",
        "cookie2",
        "host",
        "forwarded",
        "x-real-ip",
        "http2-settings",
    }
)

_NOT_FROM_GUESTS: Final = frozenset(
    {
        # State of an origin that is not theirs alone.
        "set-cookie",
        "set-cookie2",
        "clear-site-data",
        "strict-transport-security",
        "public-key-pins",
        "expect-ct",
        "alt-svc",
        "service-worker-allowed",
        "report-to",
        "reporting-endpoints",
        "nel",
        # What asks for, or is about, credentials of the agent's callers.
        "www-authenticate",
        "proxy-authenticate",
        "authentication-info",
        "proxy-authentication-info",
        # Another way to say `Location`.
        "refresh",
        # The agent's own.
        "x-request-id",
    }
)

SANDBOX: Final = "sandbox allow-scripts allow-forms allow-modals allow-popups allow-downloads"
"""A browser holds a page with this for one of an origin of its own: it gets at nothing of ours."""

_LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "::1"})

_DOTS: Final = "%2e"


def of_a_hop(headers: Iterable[tuple[str, str]]) -> frozenset[str]:
    """Names, in lower case, of what does not go beyond this connection."""
    named = (each for name, value in headers if name.lower() == "connection" for each in value.split(","))
    names = _OF_A_HOP | {each.strip().lower() for each in named}
    # A length beside chunks is the length of nothing (RFC 9112, 6.3).
    chunked = any(name.lower() == "transfer-encoding" for name, _ in headers)
    return names | {"content-length"} if chunked else names


def to_guest(
    headers: Headers, *, authority: str, prefix: str, asked_at: str, is_upgrade: bool
) -> Iterator[tuple[str, str]]:
    """What a server is told. `authority`: its own; `prefix`: the path under which callers see it; `asked_at`:
    the host that the caller asked."""
    dropped = of_a_hop(headers) | _NOT_TO_GUESTS | _LENGTH
    yield "Host", authority
    for name, value in headers:
        lower = name.lower()
        if lower not in dropped and not lower.startswith((_OURS, "x-forwarded-")):
            yield name, value
    yield "X-Forwarded-Proto", "https"
    if asked_at:
        yield "X-Forwarded-Host", asked_at
    yield "X-Forwarded-Prefix", prefix
    yield from _connection(is_upgrade)


def to_agent(
    headers: Headers, *, authority: str, added: Iterable[tuple[str, str]], is_upgrade: bool
) -> Iterator[tuple[str, str]]:
    """What another agent is told: all but what is about this connection."""
    dropped = of_a_hop(headers) | {"host"} | _LENGTH
    yield "Host", authority
    for name, value in headers:
        if name.lower() not in dropped:
            yield name, value
    yield from added
    yield from _connection(is_upgrade)


def _connection(is_upgrade: bool) -> Iterator[tuple[str, str]]:
    """Each of these connections is for one request."""
    if is_upgrade:
        yield "Upgrade", "websocket"
        yield "Connection", "Upgrade"
    else:
        yield "Connection", "close"


def from_guest(
    headers: Headers, *, session: str, prefix: str, path: str, ports: frozenset[str], asked_at: str
) -> CIMultiDict[str]:
    """What the caller is told. `path`: of the request, as the server saw it; `ports`: the server's own, as in
    addresses."""
    dropped = of_a_hop(headers) | _NOT_FROM_GUESTS
    told: CIMultiDict[str] = CIMultiDict()
    for name, value in headers:
        lower = name.lower()
        if lower in dropped or lower.startswith(_OURS):
            continue
        if lower == "location":
            where = location(value, prefix=prefix, path=path, ports=ports, asked_at=asked_at)
            if where is not None:
                told.add(name, where)
            continue
        told.add(name, value)
    told[FROM_SESSION] = session
    told.add("Content-Security-Policy", SANDBOX)
    told["X-Content-Type-Options"] = "nosniff"
    return told


def from_agent(headers: Headers, *, asked_at: str) -> CIMultiDict[str]:
    """What another agent has said, itself or for one of its guests."""
    dropped = of_a_hop(headers)
    return CIMultiDict(
        (name, value)
        for name, value in headers
        if name.lower() not in dropped and not (name.lower() == "location" and may_be_same(value, asked_at))
    )


def location(said: str, *, prefix: str, path: str, ports: frozenset[str], asked_at: str) -> str | None:
    """Where a server's redirect leads, for a caller: below `prefix` if to the server itself, to another host
    as it is, and nowhere else of the agent. None: left out.

    Clients resolve dots by themselves, and browsers take `%2e` for one, so that is done here. What a
    backslash is they do not agree upon.
    """
    if not said.isascii() or not said.isprintable() or set(said) & {" ", "\\"}:
        return None
    try:
        parts = urlsplit(said)
        port = parts.port
    except ValueError:
        return None
    if parts.scheme not in {"", "http", "https"} or (parts.scheme and not parts.netloc):
        return None
    if parts.netloc:
        if parts.hostname not in _LOOPBACK or (port is not None and str(port) not in ports):
            return None if may_be_same(said, asked_at) else said
        whole = parts.path or "/"
    elif not parts.path:
        whole = path
    elif parts.path.startswith("/"):
        whole = parts.path
    else:
        whole = path.rpartition("/")[0] + "/" + parts.path
    return (
        prefix
        + _resolved(whole)
        + (f"?{parts.query}" if parts.query else "")
        + (f"#{parts.fragment}" if parts.fragment else "")
    )


def _resolved(path: str) -> str:
    """An absolute path without dots that lead upwards, however they are written."""
    kept: list[str] = []
    segments = path.split("/")[1:]
    for at, segment in enumerate(segments):
        plain = segment.lower().replace(_DOTS, ".")
        is_last = at == len(segments) - 1
        if plain == "..":
            del kept[-1:]
        if plain not in {".", ".."}:
            kept.append(segment)
        elif is_last:
            kept.append("")
    return "/" + "/".join(kept)
