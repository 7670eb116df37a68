"""The logins in a pull Secret. What it holds goes to the registry it is for, and nowhere else."""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import msgspec

_DOCKER_HUB = ("docker.io", "index.docker.io", "registry-1.docker.io")


@dataclass(frozen=True, slots=True)
class Login:
    user: str
    password: str = field(repr=False)


class NoLogins(ValueError):
    """A text is no `.dockerconfigjson`. Does not say what it is."""


class _Entry(msgspec.Struct, frozen=True):
    username: str = ""
    password: str = ""
    auth: str = ""


class _File(msgspec.Struct, frozen=True):
    auths: dict[str, _Entry]


def login_for(registry: str, text: bytes) -> Login | None:
    """Of a file `.dockerconfigjson`, as `docker login` and `kubectl create secret` write it.

    None: it has nothing for this registry. Raises `NoLogins`.
    """
    try:
        entries = msgspec.json.decode(text, type=_File).auths
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise NoLogins("it is no JSON of the form that docker login writes") from None
    for name, entry in entries.items():
        if _same(name, registry):
            return _login(entry)
    return None


def _same(name: str, registry: str) -> bool:
    # Old clients write an address with a scheme and a path.
    host = (urlsplit(name).netloc if "://" in name else name.partition("/")[0]).lower()
    return host == registry or (host in _DOCKER_HUB and registry in _DOCKER_HUB)


def _login(entry: _Entry) -> Login:
    user, password = entry.username, entry.password
    if entry.auth:
        try:
            user, _, password = base64.b64decode(entry.auth, validate=True).decode().partition(":")
        except (binascii.Error, UnicodeDecodeError):
            raise NoLogins("an `auth` in it is no base64 of USER:PASSWORD") from None
    return Login(user, password)
