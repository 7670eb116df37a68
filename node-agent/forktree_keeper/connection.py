"""One agent's connection: packets in one at a time, packets out through a bounded queue."""

from __future__ import annotations

import logging
import os
import selectors
import socket
from collections import deque
from collections.abc import Callable, Sequence

from forktree_keeper.protocol import Code, Refusal, close_all, encode_failure, receive_packet, send_packet

MAX_QUEUED_PACKETS = 256
"""For a reader that does not read. It loses its connection then, and can list again on the next one."""

_log = logging.getLogger("forktree_keeper")


class Connection:
    """Owns its socket. `handle` gets each packet with descriptors that it may take; the rest are closed."""

    def __init__(
        self,
        sock: socket.socket,
        selector: selectors.BaseSelector,
        *,
        handle: Callable[[Connection, bytes, list[int]], None],
        on_closed: Callable[[Connection], None],
    ) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._selector = selector
        self._handle = handle
        self._on_closed = on_closed
        self._queue: deque[tuple[bytes, list[int]]] = deque()
        self.open = True
        self.greeted = False
        """It has said hello once: it is in charge, or another one has taken over since."""
        selector.register(sock, selectors.EVENT_READ, self._on_ready)

    def send(self, data: bytes, files: Sequence[int] = ()) -> None:
        """Send or queue one packet. `files` stay the caller's. To a connection that has gone: nothing."""
        if not self.open or (not self._queue and self._send_now(data, files)):
            return
        if len(self._queue) >= MAX_QUEUED_PACKETS:
            _log.warning("reader_too_slow queued=%d", len(self._queue))
            self.close()
            return
        self._queue.append((data, [os.dup(file) for file in files]))
        # Who does not read is not read from either, so that answers alone cannot fill the queue.
        self._selector.modify(self._sock, selectors.EVENT_WRITE, self._on_ready)

    def refuse(self, request_id: int | None, refusal: Refusal) -> None:
        """Answer that a request is not carried out."""
        self.send(encode_failure(request_id, refusal.code, refusal.message))

    def close(self) -> None:
        """Idempotent."""
        if not self.open:
            return
        self.open = False
        self._selector.unregister(self._sock)
        self._sock.close()
        while self._queue:
            close_all(self._queue.popleft()[1])
        self._on_closed(self)

    def _on_ready(self, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                self._flush()
            else:
                self._receive()
        except Exception:
            # Whatever one connection does, the others and the machines stay.
            _log.exception("connection_failed")
            self.close()

    def _flush(self) -> None:
        while self._queue and self._send_now(*self._queue[0]):
            if self.open:
                close_all(self._queue.popleft()[1])
        if self.open and not self._queue:
            self._selector.modify(self._sock, selectors.EVENT_READ, self._on_ready)

    def _send_now(self, data: bytes, files: Sequence[int]) -> bool:
        """False when there is no room now. A peer that has gone closes the connection."""
        try:
            send_packet(self._sock, data, files)
        except BlockingIOError:
            return False
        except OSError as error:
            _log.info("connection_lost error=%r", str(error))
            self.close()
        return True

    def _receive(self) -> None:
        try:
            data, files = receive_packet(self._sock)
        except BlockingIOError:
            return
        except OSError as error:
            _log.info("connection_lost error=%r", str(error))
            self.close()
            return
        except ValueError as error:
            self.refuse(None, Refusal(Code.BAD_MESSAGE, str(error)))
            self.close()
            return
        if not data:
            self.close()
            return
        try:
            self._handle(self, data, files)
        finally:
            close_all(files)
