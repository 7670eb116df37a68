"""The environment that the demo forks: small, with every kind of state that a fork has to carry.

Memory that is written at every step, a file that grows, and a loopback connection to a child process that
keeps a counter. Each step draws fresh random numbers, so no history can be made twice: machines that have
the same lines in their files were one machine when those lines were written.
"""

from __future__ import annotations

import hashlib
import json
import os
import selectors
import socket
import time
from pathlib import Path

PORT = 7000
STEP_SECONDS = 0.1
BLOCK_BYTES = 4096
BLOCKS = 256
LEDGER = Path("/var/tmp/ledger")


def keep_counter(port: int) -> None:
    """The child process: adds what it is sent to a counter that nobody else has."""
    total = 0
    with socket.create_connection(("127.0.0.1", port)) as connection, connection.makefile("rwb") as lines:
        for line in lines:
            total += int(line)
            lines.write(b"%d\n" % total)
            lines.flush()


class Environment:
    """All state, and one step after the other."""

    def __init__(self, counter: socket.socket, counter_pid: int) -> None:
        self.counter = counter
        self.counter_lines = counter.makefile("rwb")
        self.counter_pid = counter_pid
        self.memory = bytearray(BLOCKS * BLOCK_BYTES)
        self.digest = ""
        self.step = 0
        self.total = 0
        self.name = socket.gethostname()
        self.awakenings: list[dict[str, object]] = []
        self.last_step_at = time.monotonic()
        self.slowest_step_ms = 0.0
        self.ledger = LEDGER.open("a")

    def take_step(self, note: str = "-") -> None:
        """Change memory, counter and file, each by what the others are."""
        luck = os.urandom(4).hex()
        self.notice_new_name()  # Only now: a fork in between gives another draw, so this step is not shared.
        now = time.monotonic()
        self.slowest_step_ms = max(self.slowest_step_ms, (now - self.last_step_at) * 1000)
        self.last_step_at = now
        self.step += 1
        self.counter_lines.write(b"%d\n" % int(luck, 16))
        self.counter_lines.flush()
        self.total = int(self.counter_lines.readline())
        words = f"{self.step} {luck} {self.total} {note}"
        self.digest = hashlib.sha256(f"{self.digest} {words}".encode()).hexdigest()
        at = self.step % BLOCKS * BLOCK_BYTES
        self.memory[at : at + 32] = bytes.fromhex(self.digest)
        self.ledger.write(f"{words} {self.digest}\n")
        self.ledger.flush()

    def notice_new_name(self) -> None:
        """A machine that finds itself under another name has just been forked."""
        name = socket.gethostname()
        if name != self.name:
            self.name = name
            self.awakenings.append({"name": name, "step": self.step})

    def answer(self) -> dict[str, object]:
        """All of it, as seen from inside."""
        slowest, self.slowest_step_ms = self.slowest_step_ms, 0.0
        return {
            "name": self.name,
            "step": self.step,
            "total": self.total,
            "digest": self.digest,
            "memory_sha256": hashlib.sha256(self.memory).hexdigest(),
            "pids": [os.getpid(), self.counter_pid],
            "connection": [self.counter.getsockname()[1], self.counter.getpeername()[1]],
            "awakenings": self.awakenings,
            "slowest_step_ms": slowest,
            "history": LEDGER.read_text().splitlines(),
        }


def start_counter() -> tuple[socket.socket, int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pid = os.fork()
        if pid == 0:
            keep_counter(listener.getsockname()[1])
            os._exit(0)
        connection, _ = listener.accept()
    return connection, pid


def serve(environment: Environment, client: socket.socket) -> None:
    """One question: a line with a note to be written into the history, or an empty one."""
    client.settimeout(5)
    with client, client.makefile("rw") as lines:
        note = lines.readline().strip()
        if note:
            environment.take_step(note)
        environment.notice_new_name()
        lines.write(json.dumps(environment.answer()) + "\n")
        lines.flush()


def main() -> None:
    environment = Environment(*start_counter())
    with socket.create_server(("127.0.0.1", PORT)) as server, selectors.DefaultSelector() as ready:
        ready.register(server, selectors.EVENT_READ)
        next_step_at = time.monotonic()
        while True:
            if ready.select(max(0.0, next_step_at - time.monotonic())):
                try:
                    serve(environment, server.accept()[0])
                except (OSError, ValueError):
                    continue  # A bad question must not end the environment.
            elif time.monotonic() >= next_step_at:
                environment.take_step()
                next_step_at = time.monotonic() + STEP_SECONDS


if __name__ == "__main__":
    main()
