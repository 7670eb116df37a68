"""Asks the environment of this machine for its state, and prints it with its file as one JSON object.

An argument is a note that it shall write into its history first.
"""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path

with (
    socket.create_connection(("127.0.0.1", 7000), timeout=20) as connection,
    connection.makefile("rw") as lines,
):
    lines.write(json.dumps({"note": sys.argv[1]} if len(sys.argv) > 1 else {}) + "\n")
    lines.flush()
    state = json.loads(lines.readline())

# The environment goes on working: what it wrote after its answer is no part of that answer.
history = Path("/var/tmp/ledger").read_text().splitlines()[: state["step"]]
print(json.dumps({**state, "history": history}))
