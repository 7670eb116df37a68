"""The environment that the engine's benchmarks fork. On loopback it takes one line and answers with one:

    dirty KIB      write to so much memory, in 64 runs of equal length, half as far apart as they are long
    pace MS        from now on take a step every MS milliseconds; 0: none
    steps          what the steps since the last such question took, as JSON

A step is always the same work: a byte in each of 256 pages all over memory, and a digest.
"""

from __future__ import annotations

import hashlib
import json
import selectors
import socket
import time

PORT = 7000
RUNS = 64
LARGEST_KIB = 64 * 1024
PAGE = 4096
STEP_PAGES = 256


class Worker:
    def __init__(self) -> None:
        size = LARGEST_KIB * 1024 * 3 // 2
        # Written to at once, so that all of it is in the baseline and nothing is first touched later.
        self.memory = memoryview(bytearray(b"\x01") * size)
        self.patterns = [bytes([fill]) * (LARGEST_KIB * 1024 // RUNS) for fill in (2, 3)]
        self.turn = 0
        self.pace_seconds = 0.0
        self.began_at: list[float] = []
        self.took: list[float] = []
        self.digest = b""

    def dirty(self, kib: int) -> None:
        run = kib * 1024 // RUNS
        self.turn = 1 - self.turn  # Each time other bytes, in the same places.
        pattern = memoryview(self.patterns[self.turn])[:run]
        for index in range(RUNS):
            start = index * run * 3 // 2
            self.memory[start : start + run] = pattern

    def step(self) -> None:
        began = time.monotonic()
        stride = len(self.memory) // STEP_PAGES // PAGE * PAGE
        for at in range(0, STEP_PAGES * stride, stride):
            self.memory[at] = 255 - self.memory[at]
        self.digest = hashlib.sha256(self.digest + self.memory[:PAGE]).digest()
        self.began_at.append(began)
        self.took.append(time.monotonic() - began)

    def steps(self) -> str:
        """Milliseconds. `late`: how much longer than the pace it was from one step to the next."""
        late = [
            (after - before - self.pace_seconds) * 1000
            for before, after in zip(self.began_at, self.began_at[1:])  # noqa: B905 (one is shorter)
        ]
        told = json.dumps({"took": [each * 1000 for each in self.took], "late": late})
        self.began_at, self.took = [], []
        return told

    def answer(self, words: list[str]) -> str:
        match words:
            case ["dirty", kib]:
                self.dirty(int(kib))
            case ["pace", milliseconds]:
                self.pace_seconds = float(milliseconds) / 1000
            case ["steps"]:
                return self.steps()
            case _:
                raise ValueError(f"not understood: {words}")
        return "done"


def serve(worker: Worker, client: socket.socket) -> None:
    client.settimeout(5)
    with client, client.makefile("rw") as lines:
        try:
            verdict = f"ok {worker.answer(lines.readline().split())}"
        except ValueError as error:
            verdict = f"refused {error}"
        lines.write(f"{verdict}\n")
        lines.flush()


def main() -> None:
    worker = Worker()
    with socket.create_server(("127.0.0.1", PORT)) as server, selectors.DefaultSelector() as ready:
        ready.register(server, selectors.EVENT_READ)
        due = time.monotonic()
        while True:
            paced = worker.pace_seconds > 0
            if ready.select(max(0.0, due - time.monotonic()) if paced else None):
                try:
                    serve(worker, server.accept()[0])
                except OSError:
                    continue  # A client that hung up must not end the environment.
            elif paced:
                worker.step()
                due = time.monotonic() + worker.pace_seconds


if __name__ == "__main__":
    main()
