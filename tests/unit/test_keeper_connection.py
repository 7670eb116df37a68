"""The keeper's side of one connection, with a peer that reads late, never, or is gone."""

from __future__ import annotations

import os
import selectors
import socket
from collections.abc import Iterator

import pytest

from forktree_keeper.connection import MAX_QUEUED_PACKETS, Connection
from forktree_keeper.protocol import receive_packet


class Peer:
    """A connection, what it handed on, and its other end."""

    def __init__(self) -> None:
        ours, self.sock = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.selector = selectors.DefaultSelector()
        self.handled: list[bytes] = []
        self.closed = 0
        self.connection = Connection(ours, self.selector, handle=self.handle, on_closed=self.on_closed)

    def handle(self, _: Connection, data: bytes, files: list[int]) -> None:
        if data == b"bug":
            raise RuntimeError("a bug")
        if data == b"take":
            os.close(files.pop())
        self.handled.append(data)

    def on_closed(self, _: Connection) -> None:
        self.closed += 1

    def turn(self) -> None:
        for key, events in self.selector.select(0):
            key.data(events)


@pytest.fixture
def peer() -> Iterator[Peer]:
    before = descriptors()
    peer = Peer()
    yield peer
    peer.connection.close()
    peer.sock.close()
    peer.selector.close()
    assert descriptors() == before


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - the numbers alone


def test_a_late_reader_gets_everything_in_order_with_its_descriptors(peer: Peer) -> None:
    file = os.memfd_create("x")
    sent = 0
    while descriptors() < 60:  # Until some are queued: a queued packet has duplicates of its own.
        peer.connection.send(str(sent).encode(), [file])
        sent += 1
    os.close(file)
    for number in range(sent):
        peer.turn()
        data, (received,) = receive_packet(peer.sock)
        assert data == str(number).encode()
        os.close(received)
    peer.sock.send(b"read again")
    peer.turn()
    peer.turn()
    assert peer.handled == [b"read again"]


def test_who_never_reads_is_dropped_with_all_that_was_queued(peer: Peer) -> None:
    file = os.memfd_create("x")
    sent = 0
    while peer.connection.open:
        peer.connection.send(b"event", [file])
        sent += 1
        assert sent < 100_000
    assert sent > MAX_QUEUED_PACKETS
    assert peer.closed == 1
    peer.connection.send(b"nobody hears this", [file])
    os.close(file)


def test_who_does_not_read_is_not_read_from(peer: Peer) -> None:
    while peer.selector.get_map()[peer.connection._sock].events == selectors.EVENT_READ:  # pyright: ignore[reportPrivateUsage]
        peer.connection.send(b"x" * 1000)
    peer.sock.send(b"more work")
    peer.turn()
    assert peer.handled == []


def test_descriptors_that_nobody_takes_are_closed(peer: Peer) -> None:
    before = descriptors()
    for data in (b"take", b"leave"):
        socket.send_fds(peer.sock, [data], [0, 1, 2])
        peer.turn()
    assert peer.handled == [b"take", b"leave"]
    assert descriptors() == before


def test_a_bug_in_handling_costs_the_connection_alone(peer: Peer) -> None:
    socket.send_fds(peer.sock, [b"bug"], [0, 1, 2])
    peer.turn()
    assert not peer.connection.open
    assert receive_packet(peer.sock) == (b"", [])


def test_a_peer_that_is_gone_closes_it_once(peer: Peer) -> None:
    peer.sock.close()
    peer.connection.send(b"x")
    peer.connection.send(b"x")
    peer.connection.close()
    assert peer.closed == 1
