"""The outside of a keeper that has a network namespace to itself, like a pod, and servers in it.

As a program, the servers: on every address of the namespace, so that only what is between keeps anybody away.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

from component.keeper_fixtures import KeeperProcess, keeper_process

INSIDE = "10.77.0.1"
"""An address of the keeper's namespace, from a private network."""
OWN = "9.77.0.1"
"""Another, from the internet's."""
METADATA = "169.254.169.254"
ALLOWED, ALLOWED_NETWORK = "10.77.1.1", "10.77.1.0/24"
RESOLVER = "10.77.0.53"
PORT = 8080

SETUP = f"""
set -e
ip link set lo up
ip link add out type veth peer name other
ip link set other up
ip link set out up
for address in {INSIDE} {OWN} {ALLOWED} {RESOLVER} {METADATA}; do ip addr add $address/32 dev out; done
ip addr add fd77::1/64 dev out nodad
ip route add default dev out
ip -6 route add default dev out
mount --bind "$RESOLV_CONF" /etc/resolv.conf
exec "$@"
"""


@asynccontextmanager
async def keeper_outside(state_dir: Path, cgroup_root: str) -> AsyncGenerator[KeeperProcess]:
    """A keeper in a network of its own, in which the servers run."""
    state_dir.mkdir(parents=True)
    resolv_conf = state_dir / "resolv.conf"
    resolv_conf.write_text(f"search inside.test\nnameserver {RESOLVER}\n")
    namespaces = ("unshare", "--net", "--mount", "--propagation", "private", "--")
    prefix = (*namespaces, "env", f"RESOLV_CONF={resolv_conf}", "/bin/sh", "-c", SETUP, "setup")
    async with (
        keeper_process(state_dir, cgroup_root, prefix=prefix) as keeper,
        servers(keeper),
    ):
        yield keeper


@asynccontextmanager
async def servers(keeper: KeeperProcess) -> AsyncGenerator[None]:
    process = await asyncio.create_subprocess_exec(
        *("nsenter", "--net", "--target", str(keeper.pid), "--", sys.executable, __file__),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert await process.stdout.readline() == b"serving\n"
        yield
    finally:
        process.stdin.close()
        await process.wait()


class Names(asyncio.DatagramProtocol):
    """Answers every question for an address with `ALLOWED`."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        question_end = data.index(b"\0", 12) + 5
        is_address = data[question_end - 3] == 1
        answer = b"\xc0\x0c\0\x01\0\x01\0\0\0\x3c\0\x04" + socket.inet_aton(ALLOWED) if is_address else b""
        head = data[:2] + b"\x81\x80\0\x01" + (b"\0\x01" if answer else b"\0\0") + b"\0\0\0\0"
        self.transport.sendto(head + data[12:question_end] + answer, addr)


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Says hello, and then whatever is said to it. Who speaks HTTP is told hello as its content."""
    try:
        line = await reader.readline()
        if line.startswith(b"GET "):
            while (await reader.readline()).strip():
                pass
            writer.write(b"HTTP/1.0 200 OK\r\n\r\nhello\n")
            return
        writer.write(b"hello\n")
        while line:
            writer.write(line)
            line = await reader.readline()
    except ConnectionError:
        pass
    finally:
        writer.close()


async def serve() -> None:
    loop = asyncio.get_running_loop()
    await loop.create_datagram_endpoint(Names, local_addr=(RESOLVER, 53))
    await asyncio.start_server(echo, "0.0.0.0", PORT)
    print("serving", flush=True)
    await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(serve())
