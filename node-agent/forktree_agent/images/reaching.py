"""Whom the agent asks on a tenant's behalf: registries that the operator named, and public HTTPS servers.

A tenant chooses the first address, and whoever answers there chooses the next ones, of redirects and of token
services. All are held to the same rule, and it holds for the addresses that a connection is made to, not for
those that a name had a moment before.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from forktree_agent.images.errors import ImagePullFailed, cleaned
from forktree_agent.images.references import NamedRegistry, Place, Reference

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_NAMES_AT_ONCE = 16
_NUMBER = re.compile(r"[0-9]+|0[xX][0-9a-fA-F]*")
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


class Rule:
    """Which servers may be asked."""

    def __init__(self, named: Iterable[NamedRegistry], *, only_named: bool) -> None:
        self._named = {each.place: each.scheme for each in named}
        self._only_named = only_named

    def base(self, reference: Reference) -> URL:
        """Where a reference's registry is. Raises `ImagePullFailed` if it may not be asked."""
        host, port = reference.host, reference.port
        for scheme in ("https", "http"):
            at = port or (443 if scheme == "https" else 80)
            if self._named.get(Place(host, at)) == scheme:
                return URL.build(scheme=scheme, host=host, port=at)
        url = URL.build(scheme="https", host=host, port=port or 443)
        self.check(url)
        if self._only_named:
            raise ImagePullFailed(
                f"registry {reference.registry} is none that this cluster takes images from: use one of"
                " those, or ask for --registry to name it"
            )
        return url

    def check(self, url: URL) -> None:
        """Before a request of any kind. Raises `ImagePullFailed`."""
        scheme = self._named.get(place_of(url))
        if scheme is not None and url.scheme == scheme:
            return
        if url.scheme != "https" or url.host is None or url.user is not None:
            raise ImagePullFailed(
                f"{_told(url)} is not asked, as it is no https address: only a registry that the node's agent"
                " is told of by --registry HOST:PORT=http is asked without TLS"
            )
        # As it would be connected to: `host` is what was made readable again.
        host = url.raw_host or url.host
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            if _spells_an_address(host):
                raise ImagePullFailed(not_public(host)) from None
            return  # A name: what it leads to is seen when a connection is made.
        if not is_public(address):
            raise ImagePullFailed(not_public(host))

    def named(self, place: Place) -> bool:
        return place in self._named


class GuardedResolver(AbstractResolver):
    """Finds addresses for connections, and none that the rule forbids.

    An address that is written as such does not come here: `Rule.check` looks at those. Threads that wait for
    name servers, which may be a tenant's, are the resolver's own: the loop's are for everybody.
    """

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self._threads = ThreadPoolExecutor(_NAMES_AT_ONCE, thread_name_prefix="image-names")

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        ask = partial(
            socket.getaddrinfo, host, port, type=socket.SOCK_STREAM, family=family, flags=socket.AI_ADDRCONFIG
        )
        try:
            found = await asyncio.get_running_loop().run_in_executor(self._threads, ask)
        except UnicodeError:  # A part of it is empty or too long, which is no `OSError` of name servers.
            raise ImagePullFailed(f"{cleaned(host)} is no name of a server") from None
        everything = self._rule.named(Place(host.lower(), port))
        results: list[ResolveResult] = []
        for kind, _, protocol, _, address in found:
            text = str(address[0])
            if not everything and not is_public(ipaddress.ip_address(text.partition("%")[0])):
                raise ImagePullFailed(not_public(host))
            results.append(
                ResolveResult(
                    hostname=host,
                    host=text,
                    port=port,
                    family=kind,
                    proto=protocol,
                    flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
                )
            )
        return results

    async def close(self) -> None:
        """Who is still waited for is waited for by nobody."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def place_of(url: URL) -> Place:
    return Place((url.host or "").lower(), url.port or 0)


def _spells_an_address(host: str) -> bool:
    """Whether a host that is no address as we write them may be one for others: 127.1, 0x7f000001, 127.0.0.1.

    As browsers decide it, by the last part: no name that anybody can have ends in a number.
    """
    return _NUMBER.fullmatch(host.removesuffix(".").rpartition(".")[2]) is not None


def is_public(address: Address) -> bool:
    """Whether anybody on the internet could reach it as well. Of one that stands for another, the other."""
    if isinstance(address, ipaddress.IPv6Address):
        if address in _NAT64:
            return is_public(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
        within = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
        if any(each is not None and not is_public(each) for each in within):
            return False
        if address.ipv4_mapped is not None:
            return True
        if address.is_site_local:
            return False
    return address.is_global and not (address.is_multicast or address.is_reserved or address.is_unspecified)


def not_public(host: str) -> str:
    return (
        f"{cleaned(host)} is not at a public address, so it is not asked: an operator can allow it by"
        " --registry HOST:PORT of the node's agent"
    )


def _told(url: URL) -> str:
    return cleaned(f"{url.scheme}://{url.host}:{url.port}")
