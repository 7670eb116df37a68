"""Free ports on the loopback address, for programs that cannot be handed a bound socket."""

from __future__ import annotations

import random
import socket


def free(count: int) -> tuple[int, ...]:
    """`count` distinct ports that nobody listens on now.

    Taken from below the kernel's ephemeral range (32768 up), so that no outgoing connection gets one of them
    before its program binds it; random, so that two runs at once rarely meet.
    """
    ports: dict[int, None] = {}
    while len(ports) < count:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        ports[port] = None
    return tuple(ports)
