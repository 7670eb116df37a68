"""The wire between this machine and a node in its sandbox, and the addresses at both ends."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from ipaddress import IPv4Interface, IPv4Network
from typing import Self

from forktree_dev.real_node.sandbox import Sandbox

_WIRES = IPv4Network("10.87.0.0/16")
_PODS = IPv4Network("10.88.0.0/16")
_PLACES = 256
"""As many nodes can be on one machine: each takes a /30 of the first network and a /24 of the second."""


class NoAddressLeft(Exception):
    """All networks that are meant for nodes are in use on this machine."""


@dataclass(frozen=True, slots=True)
class Wire:
    """A pair of interfaces. Its outer end is named by `name`, so that it can be removed by that alone."""

    name: str
    place: int

    @classmethod
    def free(cls, name: str) -> Self:
        """One whose addresses nobody has on this machine. `name` has at most 15 characters."""
        shown = subprocess.run(["ip", "-json", "address"], check=True, capture_output=True, text=True).stdout
        taken = {
            IPv4Interface(f"{each['local']}/{each['prefixlen']}").network
            for link in json.loads(shown)
            for each in link.get("addr_info", ())
            if each.get("family") == "inet"
        }
        for place in range(_PLACES):
            wire = cls(name, place)
            if not any(each.overlaps(wire._ends) for each in taken):
                return wire
        raise NoAddressLeft(f"all {_PLACES} networks below {_WIRES} are in use: end the nodes that have them")

    @property
    def outer(self) -> str:
        """This machine's address: the API server's."""
        return str(self._ends[1])

    @property
    def inner(self) -> str:
        """The node's address."""
        return str(self._ends[2])

    @property
    def pods(self) -> str:
        """The network that pods get their addresses from."""
        return str(IPv4Network((int(_PODS.network_address) + self.place * 256, 24)))

    def lay(self, sandbox: Sandbox) -> None:
        """Connect both sides. What is sent to pods from this machine goes through the node."""
        init = str(sandbox.init)
        _ip("link", "add", self.name, "type", "veth", "peer", "name", "eth0", "netns", init)
        _ip("address", "add", f"{self.outer}/30", "dev", self.name)
        _ip("link", "set", self.name, "up")
        sandbox.run_inside("ip", "address", "add", f"{self.inner}/30", "dev", "eth0")
        sandbox.run_inside("ip", "link", "set", "eth0", "up")
        sandbox.run_inside("ip", "route", "add", "default", "via", self.outer)
        _ip("route", "add", self.pods, "via", self.inner)

    @property
    def _ends(self) -> IPv4Network:
        return IPv4Network((int(_WIRES.network_address) + self.place * 4, 30))


def cut(name: str) -> None:
    """Remove a wire by its name. Safe to repeat: the kernel removes it with the sandbox, but later."""
    subprocess.run(["ip", "link", "delete", name], check=False, capture_output=True)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
