"""Runs in the guest: a program with connections of every kind, each with a reader that blocks in recv().

"Outside" is an address of the guest's own that is not a loopback one, since guests have no network device.
It can be hidden: what is sent there then goes nowhere, as if the far end were another machine.
"""

import contextlib
import errno
import fcntl
import itertools
import json
import socket
import struct
import sys
import threading
from collections.abc import Callable

OUTSIDE, OUTSIDE_6 = "10.9.9.1", "fd09::1"
HOSTS = {"outside": (OUTSIDE, OUTSIDE_6), "loopback": ("127.0.0.1", "::1")}
ASK = ("127.0.0.1", 7001)
SET_ADDRESS, DELETE_ADDRESS = 0x8916, 0x8936  # SIOCSIFADDR, SIOCDIFADDR
SECONDS = 60.0


def show(shown: bool) -> None:
    """Give the loopback device the outside addresses, or take them away."""
    address = socket.inet_aton(OUTSIDE if shown else "0.0.0.0")
    address_6 = socket.inet_pton(socket.AF_INET6, OUTSIDE_6)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, SET_ADDRESS, struct.pack("16sHH4s16x", b"lo:1", socket.AF_INET, 0, address))
    with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as control:
        request = address_6 + struct.pack("Ii", 128, socket.if_nametoindex("lo"))
        fcntl.ioctl(control, SET_ADDRESS if shown else DELETE_ADDRESS, request)


class Links:
    """Receiving sockets by name, how to send to each, and what each one's reader saw last."""

    def __init__(self) -> None:
        self.news = threading.Condition()
        self.seen: dict[str, str] = {}
        self.senders: dict[str, Callable[[bytes], object]] = {}

    def add(self, name: str, receive: Callable[[int], bytes], sender: Callable[[bytes], object]) -> None:
        """Call `receive` in a thread until that fails. `sender` is the way to send there."""

        def read() -> None:
            heard = "0"
            while heard.isdigit():
                try:
                    heard = receive(100).decode() or "closed"
                except OSError as err:
                    heard = errno.errorcode[err.errno or 0]
                with self.news:
                    self.seen[name] = heard
                    self.news.notify_all()

        self.senders[name] = sender
        threading.Thread(target=read, daemon=True).start()

    def add_pair(self, name: str, near: socket.socket, far: socket.socket) -> None:
        self.add(name, near.recv, far.send)
        self.add(f"{name} far", far.recv, near.send)

    def talk(self, word: str) -> dict[str, str]:
        """Send the number `word` to every reader, and wait until each has it or has ended."""
        for send in self.senders.values():
            with contextlib.suppress(OSError):  # The reader at the other end says what happened there.
                send(word.encode())

        def settled(name: str) -> bool:
            last = self.seen.get(name, "0")
            return last == word or not last.isdigit()

        with self.news:
            self.news.wait_for(lambda: all(settled(name) for name in self.senders), SECONDS)
            last = {name: self.seen.get(name, "0") for name in self.senders}
        return {name: "goes on" if each == word else each for name, each in last.items()}


def tcp(family: int, host: str) -> tuple[socket.socket, socket.socket, socket.socket]:
    server = socket.create_server((host, 0), family=family)
    return *connected(server, host, family), server


def connected(server: socket.socket, host: str, family: int) -> tuple[socket.socket, socket.socket]:
    near = socket.socket(family)
    near.connect((host, server.getsockname()[1]))
    return near, server.accept()[0]


def udp(family: int, host: str) -> tuple[socket.socket, socket.socket]:
    near, far = socket.socket(family, socket.SOCK_DGRAM), socket.socket(family, socket.SOCK_DGRAM)
    for end in (near, far):
        end.bind((host, 0))
    near.connect(far.getsockname())
    far.connect(near.getsockname())
    return near, far


def open_all(links: Links) -> dict[str, socket.socket]:
    """Connections of every kind. Returns the servers that listen."""
    servers: dict[str, socket.socket] = {}
    for place, hosts in HOSTS.items():
        for family, host in zip((socket.AF_INET, socket.AF_INET6), hosts, strict=True):
            near, far, servers[host] = tcp(family, host)
            links.add_pair(f"tcp {host} {place}", near, far)
            links.add_pair(f"udp {host} {place}", *udp(family, host))
        ipv4_server = servers[hosts[0]]
        near, far = connected(ipv4_server, f"::ffff:{hosts[0]}", socket.AF_INET6)  # IPv4 over an IPv6 socket.
        links.add_pair(f"mapped {place}", near, far)
    half_closed, far = connected(servers[OUTSIDE], OUTSIDE, socket.AF_INET)
    half_closed.shutdown(socket.SHUT_WR)
    links.add("half-closed outside", half_closed.recv, far.send)
    links.add_pair("unix", *socket.socketpair())
    unconnected = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    unconnected.bind((OUTSIDE, 0))
    stranger = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    links.add("unconnected", unconnected.recv, lambda word: stranger.sendto(word, unconnected.getsockname()))
    return servers


def open_twins(links: Links) -> None:
    """Two sockets with the same addresses and ports: by those, the kernel finds one of them only.

    That is the one connected last; a list of all sockets begins with the one bound last.
    """
    far, first, second = (socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(3))
    far.bind((OUTSIDE, 0))
    for near in (first, second):
        near.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    first.bind(("", 0))
    second.bind(first.getsockname())
    for near in (second, first):
        near.connect(far.getsockname())
    for number, near in enumerate((first, second)):
        links.add(f"twin {number} outside", near.recv, lambda _: None)


def open_busy(links: Links) -> None:
    """A send() that waits for a reader, and a connect() that waits for a server whose queue is full."""
    server = socket.create_server((OUTSIDE, 0), backlog=0)
    near, far = connected(server, OUTSIDE, socket.AF_INET)
    queued, waiting = socket.socket(), socket.socket()
    queued.connect(server.getsockname())

    def send(_: int) -> bytes:
        near.sendall(bytes(1 << 26))
        return far.recv(1)  # Never reached, and keeps both ends from being closed.

    def connect(_: int) -> bytes:
        waiting.connect(server.getsockname())
        return queued.recv(1)

    links.add("send outside", send, lambda _: None)
    links.add("connect outside", connect, lambda _: None)


def open_many(links: Links, count: int) -> None:
    with socket.create_server((OUTSIDE, 0)) as server:
        for number in range(count):
            near, far = connected(server, OUTSIDE, socket.AF_INET)
            links.add(f"{number} outside", near.recv, far.send)


def accepted_by(server: socket.socket) -> str:
    """What a new client hears from a server that listened before."""
    with (
        socket.create_connection(server.getsockname()[:2], SECONDS) as client,
        server.accept()[0] as accepted,
    ):
        accepted.sendall(b"welcome")
        return client.recv(100).decode()


def serve() -> None:
    show(True)
    links = Links()
    servers: dict[str, socket.socket] = {}
    near, far, _ = tcp(socket.AF_INET, OUTSIDE)
    links.add_pair("baked outside", near, far)
    control = socket.create_server(ASK)

    def obey(order: str, word: str) -> object:
        match order.split():
            case ["show"]:
                show(True)
            case ["hide"]:
                show(False)
                return {}
            case ["open"]:
                servers.update(open_all(links))
            case ["open-twins"]:
                open_twins(links)
                return {}
            case ["open-busy"]:
                open_busy(links)
                return {}
            case ["open-many", count]:
                open_many(links, int(count))
            case ["accept"]:
                return {host: accepted_by(server) for host, server in servers.items()}
            case _:
                assert order.strip() == "talk", order
        return links.talk(word)

    for number in itertools.count(1):
        client, _ = control.accept()
        with client:
            client.sendall(json.dumps(obey(client.makefile().readline(), str(number))).encode())


def ask(order: str) -> None:
    with socket.create_connection(ASK) as client:
        client.sendall(f"{order}\n".encode())
        print(client.makefile().read())


if __name__ == "__main__":
    serve() if sys.argv[1] == "serve" else ask(" ".join(sys.argv[2:]))
