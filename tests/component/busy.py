"""Runs in the guest: a program whose memory, file, child process and connection change all the time.

Everything it holds is a function of how many steps it has made, so each copy of it can be checked by itself:
block of memory, file of lines `step total generation`, and the total that its child process keeps.
"""

import hashlib
import json
import pathlib
import socket
import subprocess
import sys
import threading
import time

BLOCK_BYTES = 2 << 20
FILE = pathlib.Path("/var/tmp/steps")
ADDER = (
    "import sys\ntotal = 0\nfor line in sys.stdin:\n    total += int(line)\n    print(total, flush=True)\n"
)


def mark(block: bytearray, step: int) -> None:
    at = step * 7919 * 64 % BLOCK_BYTES
    block[at : at + 32] = hashlib.sha256(str(step).encode()).digest()


def generation() -> str:
    try:
        lines = pathlib.Path("/run/forktree/identity").read_text().splitlines()
    except FileNotFoundError:
        return "none"
    found = (line.partition("=")[2] for line in lines if line.startswith("FORKTREE_GENERATION="))
    return next(found, "none").strip("'")  # Quoted for a shell.


def serve() -> None:
    block = bytearray(BLOCK_BYTES)
    state = {"step": 0, "total": 0}
    turn = threading.Lock()
    adder = subprocess.Popen(
        [sys.executable, "-c", ADDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    assert adder.stdin is not None
    assert adder.stdout is not None
    server = socket.create_server(("127.0.0.1", 7000))

    def answer() -> None:
        while True:
            client, _ = server.accept()
            with client, turn:
                seen = {**state, "memory": hashlib.sha256(block).hexdigest(), "adder": adder.pid}
                client.sendall(json.dumps(seen).encode())

    threading.Thread(target=answer, daemon=True).start()
    with FILE.open("a") as file:
        while True:
            with turn:
                step = state["step"] = state["step"] + 1
                mark(block, step)
                adder.stdin.write(f"{step}\n")
                state["total"] = int(adder.stdout.readline())
                file.write(f"{step} {state['total']} {generation()}\n")
                file.flush()
            time.sleep(0.02)


def check() -> None:
    """Print what the program holds, after recomputing it all from its step count; fail where they differ."""
    with socket.create_connection(("127.0.0.1", 7000)) as client:
        seen = json.loads(client.makefile().read())
    step = seen["step"]
    block = bytearray(BLOCK_BYTES)
    for each in range(1, step + 1):
        mark(block, each)
    lines = [line.split() for line in FILE.read_text().splitlines()]
    assert hashlib.sha256(block).hexdigest() == seen["memory"], "memory is not what so many steps make of it"
    assert seen["total"] == step * (step + 1) // 2, "the child process lost count"
    assert len(lines) >= step, "the file is short"
    for number, (line_step, total, _) in enumerate(lines, start=1):
        assert int(line_step) == number, f"line {number} is of step {line_step}"
        assert int(total) == number * (number + 1) // 2, f"line {number} has a wrong total"
    changes = {name: int(number) for number, _, name in reversed(lines)}
    print(json.dumps({"step": step, "adder": seen["adder"], "first_step_of": changes}))


if __name__ == "__main__":
    {"serve": serve, "check": check}[sys.argv[1]]()
