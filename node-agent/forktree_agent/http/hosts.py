"""Whether two addresses lead to the same host, for clients that know many spellings of one.

To most of them `10.0.5`, `0xa000005`, `167772165` and `10.0.0.%35` are the host `10.0.0.5`. What is not
written in a plain way is not worked out here but taken for the same host: only what is surely another is one.
"""

from __future__ import annotations

import re
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Final
from urllib.parse import urlsplit

_NAME: Final = re.compile(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*")

_NUMBER: Final = re.compile(r"[0-9]+|0x[0-9a-f]*")
"""A host with this for its last label is an IPv4 address or nothing (URL Standard, "ends in a number")."""

_THIS_MACHINE: Final = "localhost"


def may_be_same(address: str, authority: str) -> bool:
    """Whether the URL `address` may lead to the host of `authority`, whatever its port. No host: no."""
    try:
        netloc = urlsplit(address).netloc
    except ValueError:
        return True
    if not netloc:
        return False
    host, other = _plain(netloc), _plain(authority)
    return host is None or other is None or host == other


def _plain(netloc: str) -> str | None:
    """The one spelling of its host. None: nobody can tell."""
    try:
        host = urlsplit(f"//{netloc}").hostname or ""
        if "[" in netloc:
            return _spelled(IPv6Address(host)) if "%" not in host else None
        host = host.removesuffix(".")
        if _NUMBER.fullmatch(host.rpartition(".")[2]):
            return _spelled(ip_address(host))
    except ValueError:
        return None
    if not _NAME.fullmatch(host):
        return None
    return _THIS_MACHINE if host.endswith(f".{_THIS_MACHINE}") else host


def _spelled(address: IPv4Address | IPv6Address) -> str:
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    # Who connects to no address at all gets to this machine as well.
    return _THIS_MACHINE if address.is_loopback or address.is_unspecified else str(address)
