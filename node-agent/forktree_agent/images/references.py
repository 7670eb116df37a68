"""`oci:HOST[:PORT]/REPOSITORY[:TAG][@sha256:DIGEST]`, as tenants write it, and hosts as operators do."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from forktree_agent.images.errors import ImageInvalid

OCI = "oci:"
_HOST = r"[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?"
_PART = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_REFERENCE = re.compile(
    rf"oci:(?P<host>{_HOST})(?::(?P<port>[0-9]{{1,5}}))?/(?P<repository>{_PART}(?:/{_PART})*)"
    r"(?::(?P<tag>[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?"
)
_NAMED = re.compile(rf"(?P<host>{_HOST}|\[[0-9a-fA-F:.]+\])(?::(?P<port>[0-9]{{1,5}}))?(?P<http>=http)?")
_HTTPS_PORT, _HTTP_PORT, _PORT_MAX = 443, 80, 65535
_DOCKER_HUB, _DOCKER_HUB_API = "docker.io", "registry-1.docker.io"
_LENGTH = 512


@dataclass(frozen=True, slots=True)
class Place:
    """Where a server is: what a rule about registries is about."""

    host: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedRegistry:
    """One that the operator vouches for. It may be anywhere, and without TLS if that is said."""

    place: Place
    scheme: Literal["http", "https"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """One image of one registry."""

    text: str
    """As it was written."""
    registry: str
    """Host and port as they were written: what a pull Secret is about."""
    host: str
    """Where its API is."""
    port: int | None
    """None: the scheme's own."""
    repository: str
    tag: str | None
    digest: str | None
    """With both, the digest counts."""

    @property
    def manifest(self) -> str:
        """What to ask the registry for."""
        return self.digest or self.tag or "latest"


def parse_reference(text: str) -> Reference:
    """Raises `ImageInvalid`."""
    found = _REFERENCE.fullmatch(text) if len(text) <= _LENGTH else None
    port = None if found is None or found["port"] is None else int(found["port"])
    if found is None or (port is not None and not 0 < port <= _PORT_MAX):
        raise ImageInvalid(
            f"{text[:_LENGTH]!r} names no image: write oci:HOST[:PORT]/REPOSITORY[:TAG][@sha256:DIGEST]"
        )
    host, repository = found["host"].lower(), found["repository"]
    registry = host if port is None else f"{host}:{port}"
    if registry == _DOCKER_HUB:
        # As its own clients write it: official images have no owner in their name.
        host = _DOCKER_HUB_API
        repository = repository if "/" in repository else f"library/{repository}"
    return Reference(
        text=text, registry=registry, host=host, port=port, repository=repository, tag=found["tag"],
        digest=found["digest"],
    )  # fmt: skip


def parse_named_registry(text: str) -> NamedRegistry:
    """`HOST[:PORT][=http]`. Raises `ValueError`."""
    found = _NAMED.fullmatch(text)
    if found is None or (found["port"] is not None and not 0 < int(found["port"]) <= _PORT_MAX):
        raise ValueError(f"{text!r} is not HOST[:PORT] or HOST[:PORT]=http")
    plain = found["http"] is not None
    port = int(found["port"]) if found["port"] else (_HTTP_PORT if plain else _HTTPS_PORT)
    host = found["host"].strip("[]").lower()
    host = _DOCKER_HUB_API if host == _DOCKER_HUB else host
    return NamedRegistry(place=Place(host, port), scheme="http" if plain else "https")
