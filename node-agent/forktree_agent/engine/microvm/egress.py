"""How a machine with egress reaches the outside: by a `passt` of its own at the other end of its wire (pure).

passt speaks Ethernet with the guest on a socket, opens sockets of its own for it, and needs no rights. Whom
it may speak to is a matter of the keeper's wall.
"""

from __future__ import annotations

from forktree_agent.keeper_client import Companion, child_descriptor

BINARY = "/usr/bin/passt"

# Of a network for tests of devices (RFC 2544): a guest could not reach what really has these addresses.
ADDRESS, PREFIX = "198.18.0.2", 29
GATEWAY = "198.18.0.1"
RESOLVER = "198.18.0.3"
"""What is asked here is asked of the node's own resolver."""
MAC = "52:54:00:12:34:56"
KERNEL_ARGUMENT = f"forktree.network={ADDRESS}/{PREFIX},{GATEWAY},{RESOLVER}"

COMPANION_BYTES = 48 << 20
"""A passt at its worst: its buffers, all of which it writes to (30 MB), and what its sockets hold."""


def companion() -> Companion:
    """Of any machine: they differ in nothing."""
    arguments = [
        BINARY,
        "--foreground",
        "--quiet",
        *("--fd", str(child_descriptor(0))),
        # Version 6 would have to come with addresses of the node's network.
        "--ipv4-only",
        *("--address", ADDRESS),
        *("--netmask", str(PREFIX)),
        *("--gateway", GATEWAY),
        # Otherwise the gateway's address would stand for the node's loopback.
        "--no-map-gw",
        *("--dns-forward", RESOLVER),
        # The guest knows its addresses from the start, and answers to no one.
        *("--no-dhcp", "--no-ndp", "--no-ra", "--no-dhcpv6"),
        *("--tcp-ports", "none", "--udp-ports", "none"),
        "--no-icmp",
    ]
    return Companion(argv=tuple(arguments), env={})
