"""The keeper's one loop: callbacks for descriptors that became ready, one after the other."""

from __future__ import annotations

import logging
import selectors
import socket
from collections.abc import Callable

_log = logging.getLogger("forktree_keeper")


class ReadyLoop:
    """Owns a selector. A callback may add and remove any descriptor, its own too."""

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        """For who waits for more than reading; the data of its keys is a callback that takes the events."""

    def watch(self, file: socket.socket | int, act: Callable[[], object]) -> None:
        """Call `act` whenever there is something to read."""

        def on_ready(_events: int) -> None:
            act()

        self.selector.register(file, selectors.EVENT_READ, on_ready)

    def unwatch(self, file: socket.socket | int) -> None:
        """Before it is closed."""
        self.selector.unregister(file)

    def step(self, timeout_seconds: float) -> None:
        """Wait for the next that are ready, and call each once."""
        for key, events in self.selector.select(timeout_seconds):
            # An earlier callback of this round may have closed this one, and its number may be another's now.
            if self.selector.get_map().get(key.fd) is key:
                callback: Callable[[int], None] = key.data
                try:
                    callback(events)
                except Exception:
                    # The other machines are worth more than a clean end. No callback fails twice for the
                    # same reason: each unregisters, or takes what made it ready, first.
                    _log.exception("callback_failed")

    def close(self) -> None:
        self.selector.close()
