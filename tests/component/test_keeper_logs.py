"""A machine's log cannot fill the state directory, which is memory."""

from __future__ import annotations

import json
import socket
from pathlib import Path

from forktree_keeper.cgroups import ControlGroups
from forktree_keeper.connection import Connection
from forktree_keeper.machines import MAX_LOG_BYTES, Machines, Waiter
from forktree_keeper.protocol import Start
from forktree_keeper.ready_loop import ReadyLoop
from forktree_keeper.wall import Wall

OUTPUT = f"head -c {MAX_LOG_BYTES} /dev/zero"


def ignore(*_: object) -> None:
    """A test that asks nothing over its connection needs no more."""


def lines_of(peer: socket.socket) -> str:
    """What the machine tells about itself; empty when it has ended."""
    peer.settimeout(20)
    return peer.recv(100).decode()


def test_a_log_that_has_grown_too_long_is_emptied_and_goes_on_from_the_start(tmp_path: Path) -> None:
    loop = ReadyLoop()
    groups = ControlGroups(roots=(), version=1)
    ours, agent = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection = Connection(ours, loop.selector, handle=ignore, on_closed=ignore)
    machines = Machines(loop, groups, Wall("unused"), tmp_path, lambda: connection)
    near, far = socket.socketpair()
    script = f"{OUTPUT}; echo full >&3; read go <&3; echo more; {OUTPUT} >&2; echo again >&3; read go <&3"
    machines.start(
        Waiter(connection, 1),
        Start(
            machine="m",
            argv=("/bin/sh", "-c", script),
            env={"PATH": "/usr/bin:/bin"},
            uid=64_201,
            gid=64_201,
            cgroup=None,
            network_namespace=False,
            nice=None,
            channels=(),
            companion=None,
        ),
        [far.fileno()],
    )
    far.close()
    loop.step(20)
    assert "pid" in json.loads(agent.recv(1000))["result"]
    log = tmp_path / "m.log"

    assert lines_of(near) == "full\n"
    machines.bound_logs()
    assert log.stat().st_size == MAX_LOG_BYTES  # As long as it may be.
    near.send(b"go\n")
    assert lines_of(near) == "again\n"
    machines.bound_logs()
    assert log.stat().st_size == 0
    machines.bound_logs()
    near.send(b"go\n")
    loop.step(20)
    assert machines.get("m").exit is not None
    machines.end()
    assert len(machines) == 0
    assert not log.exists()
    for each in (near, agent):
        each.close()
    connection.close()
    loop.close()
