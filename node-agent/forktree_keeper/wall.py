"""The wall around machines that reach the outside: what their companions may send packets to, and what never.

It is a table of the kernel's packet filter (nftables) in the keeper's own network namespace, which holds for
every process with a machine's user id, whatever a cluster's network makes of NetworkPolicies.
"""

from __future__ import annotations

import ipaddress
import logging
import re
import socket
import subprocess
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

from forktree_keeper.protocol import RaiseWall

NFT = "/usr/sbin/nft"
NFT_SECONDS = 10.0
RESOLVERS = Path("/etc/resolv.conf")
DNS_PORT = 53

# The groups of NETLINK_NETFILTER on which the kernel tells of changes (linux/netfilter/nfnetlink.h).
_NETLINK_NETFILTER = 12
_NFNLGRP_NFTABLES = 7

INSIDE_4 = (
    "0.0.0.0/8",
    "10.0.0.0/8",
    "100.64.0.0/10",
    "127.0.0.0/8",
    "169.254.0.0/16",
    "172.16.0.0/12",
    "192.0.0.0/24",
    "192.0.2.0/24",
    "192.168.0.0/16",
    "198.18.0.0/15",
    "198.51.100.0/24",
    "203.0.113.0/24",
    "224.0.0.0/3",
)
"""No address of the internet: this host, private, shared by a carrier, link-local (the metadata services of
clouds), for tests and examples, multicast and reserved."""

_log = logging.getLogger("forktree_keeper")

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class WallFailed(Exception):
    """The wall could not be put up, or is not what it was. In a sentence."""


def table_name(keeper: str) -> str:
    """Of a keeper's table; each keeper of a machine has a name to itself."""
    return "forktree_" + re.sub("[^A-Za-z0-9]", "_", keeper)


def resolvers(text: str) -> tuple[Address, ...]:
    """The name servers of a resolv.conf, which companions ask."""
    found: list[Address] = []
    for line in text.splitlines():
        words = line.split()
        # One with a zone (%eth0) is of this link, where companions may send nothing.
        if len(words) >= 2 and words[0] == "nameserver" and "%" not in words[1]:
            with suppress(ValueError):
                found.append(ipaddress.ip_address(words[1]))
    return tuple(found)


def ruleset(table: str, wanted: RaiseWall, asked: Iterable[Address]) -> str:
    """What nft is told (pure). One transaction: an older table of the name counts until this one does.

    A rejected packet's sender is told at once: a guest sees that it is refused, and does not wait.
    """
    refused = "reject with icmpx admin-prohibited"
    dns = f"meta l4proto {{ tcp, udp }} th dport {DNS_PORT} accept"
    lines = [
        f"table inet {table}",
        f"delete table inet {table}",
        f"table inet {table} {{",
        "chain machines {",
        *(f"{_to(each)} {dns}" for each in asked),
        *(f"{_to(ipaddress.ip_network(each))} accept" for each in wanted.allow),
        # Every address of this namespace, on whatever network, and what goes to all of a network.
        f"fib daddr type {{ local, broadcast, anycast, multicast }} {refused}",
        *(f"{_to(ipaddress.ip_network(each))} {refused}" for each in (*wanted.deny, *INSIDE_4)),
        # Companions speak version 4 alone. Should one be taken over, it does not reach more for that.
        f"meta nfproto ipv6 {refused}",
        "}",
        "chain leaving {",
        # Before any address is translated: what a packet was sent to is what counts.
        "type filter hook output priority raw; policy accept;",
        f"meta skuid {wanted.first_uid}-{wanted.first_uid + wanted.uids - 1} jump machines",
        "}",
        "}",
    ]
    return "\n".join(lines) + "\n"


class Wall:
    """One table, up from `raise_up` on. `changes` becomes readable when anybody changed the packet filter."""

    def __init__(self, table: str, *, nft: str = NFT, resolv_conf: Path = RESOLVERS) -> None:
        self._table = table
        self._nft = nft
        self._resolv_conf = resolv_conf
        self._up: RaiseWall | None = None
        self._listed = ""
        self.changes: socket.socket | None = None
        """None until the wall is up for the first time."""

    @classmethod
    @contextmanager
    def owned(cls, name: str) -> Generator[Self]:
        """A wall of this keeper's own, by whose name it can be found; down at the end."""
        wall = cls(table_name(name))
        try:
            yield wall
        finally:
            wall.take_down()

    def holds(self, uid: int) -> bool:
        """Whether what this user id sends meets the wall."""
        up = self._up
        return up is not None and up.first_uid <= uid < up.first_uid + up.uids

    def raise_up(self, wanted: RaiseWall) -> None:
        """Put it up, in place of an earlier one. Raises `WallFailed`: then what was up before is up."""
        try:
            asked = resolvers(self._resolv_conf.read_text())
        except OSError:
            asked = ()  # Names cannot be asked for, then.
        if self.changes is None:
            self.changes = _filter_changes()
        self._run("-f", "-", told=ruleset(self._table, wanted, asked))
        self._up = wanted
        self._listed = self._list()
        _log.info(
            "wall_up table=%s first_uid=%d last_uid=%d",
            self._table,
            wanted.first_uid,
            wanted.first_uid + wanted.uids - 1,
        )

    def check(self) -> None:
        """After a change of the packet filter: put it up again where it is not as it was.

        Raises `WallFailed`: then there is none any more.
        """
        assert self.changes is not None
        with suppress(OSError):  # Nothing (more) to read; or more came than fit, which counts as one change.
            while self.changes.recv(65536):
                pass
        if self._up is None:
            return
        with suppress(WallFailed):
            if self._list() == self._listed:
                return
        _log.error("wall_changed_by_others table=%s", self._table)  # It is put up again.
        try:
            self.raise_up(self._up)
        except WallFailed:
            self._up = None
            raise

    def take_down(self) -> None:
        """When nobody is behind it any more. Idempotent."""
        if self._up is not None:
            self._up = None
            try:
                self._run("delete", "table", "inet", self._table)
            except WallFailed as failed:
                _log.error("wall_left table=%s error=%r", self._table, str(failed))
        if self.changes is not None:
            self.changes.close()
            self.changes = None

    def _list(self) -> str:
        return self._run("list", "table", "inet", self._table)

    def _run(self, *arguments: str, told: str | None = None) -> str:
        """What nft prints; it takes some 10 ms, and few are needed."""
        try:
            ran = subprocess.run(
                [self._nft, *arguments],
                check=True,
                input=told,
                stdin=subprocess.DEVNULL if told is None else None,
                capture_output=True,
                text=True,
                timeout=NFT_SECONDS,
            )
        except OSError as error:
            raise WallFailed(f"{self._nft} cannot be started: {error.strerror}; install nftables") from error
        except subprocess.TimeoutExpired as error:
            raise WallFailed(f"{self._nft} did not answer in {NFT_SECONDS:g} s") from error
        except subprocess.CalledProcessError as error:
            said = " ".join(error.stderr.split())[:300]
            raise WallFailed(f"the kernel's packet filter cannot be set: {said}") from error
        return ran.stdout


def _to(network: Network | Address) -> str:
    return f"{'ip' if network.version == 4 else 'ip6'} daddr {network}"


def _filter_changes() -> socket.socket:
    kind = socket.SOCK_RAW | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
    try:
        changes = socket.socket(socket.AF_NETLINK, kind, _NETLINK_NETFILTER)
    except OSError as error:
        raise WallFailed(f"the kernel has no packet filter that can be set: {error.strerror}") from error
    try:
        changes.bind((0, 1 << (_NFNLGRP_NFTABLES - 1)))
    except OSError as error:
        changes.close()
        raise WallFailed(f"changes of the packet filter cannot be watched: {error.strerror}") from error
    return changes
