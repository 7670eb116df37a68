"""`python -m forktree_keeper`: own the state directory and the root group, listen, serve until SIGTERM."""

from __future__ import annotations

import argparse
import fcntl
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import forktree_logs
from forktree_keeper.cgroups import CgroupsUnavailable, ControlGroups
from forktree_keeper.protocol import LOG_FOLDER, SOCKET_NAME, socket_address
from forktree_keeper.server import Server
from forktree_keeper.wall import Wall

_CGROUP_MOUNT = Path("/sys/fs/cgroup")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

_log = logging.getLogger("forktree_keeper")


class StateDirectoryBusy(Exception):
    """Another keeper owns the state directory."""


def main() -> None:
    """Exit code 0 after SIGTERM or SIGINT, 1 with a message when this keeper cannot begin."""
    parser = argparse.ArgumentParser(prog="forktree-keeper", description="Holds the machines of one node.")
    parser.add_argument(
        "--state-dir", type=Path, required=True, help="folder for socket, lock and logs; on tmpfs"
    )
    parser.add_argument(
        "--cgroup-root", required=True, help="name of the group below which each tree gets its own"
    )
    parser.add_argument(
        "--log-format", default="text", choices=forktree_logs.FORMATS, help="json: one object a line"
    )
    arguments = parser.parse_args()
    forktree_logs.begin(arguments.log_format, "info", text="%(asctime)s %(levelname)s %(message)s")
    try:
        _run(arguments.state_dir, arguments.cgroup_root)
    except (OSError, CgroupsUnavailable, StateDirectoryBusy) as error:
        _log.error("cannot_begin error=%r", str(error))
        sys.exit(1)


def _run(state_dir: Path, cgroup_root: str) -> None:
    _raise_descriptor_limit()
    _keep_descriptors_private()
    groups = ControlGroups.found(_CGROUP_MOUNT, cgroup_root)
    with ExitStack() as stack:
        stack.enter_context(_owned(state_dir))
        stack.enter_context(groups.owned())
        wakeup = stack.enter_context(_signal_socket())
        listener = stack.enter_context(_listening(state_dir))
        wall = stack.enter_context(Wall.owned(cgroup_root))
        server = Server(listener, state_dir, groups, wall, _BOOT_ID.read_text().strip())
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda _number, _frame: server.stop())
        _log.info("listening cgroups=v%d", groups.version)
        server.serve(wakeup)
    _log.info("ended")


def _raise_descriptor_limit() -> None:
    """Each machine and each layer costs some; a process may raise its own limit up to the hard one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _keep_descriptors_private() -> None:
    """What the keeper was started with by accident (a runtime's pipe) must not live on in every machine."""
    for entry in list(Path("/proc/self/fd").iterdir()):
        if int(entry.name) > 2:
            with suppress(OSError):  # The listing's own is gone.
                os.set_inheritable(int(entry.name), False)


@contextmanager
def _owned(state_dir: Path) -> Generator[None]:
    """Lock the state directory and clear it of an earlier keeper's logs: its machines went with it."""
    state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = os.open(state_dir / "keeper.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StateDirectoryBusy(f"another keeper owns {state_dir}") from error
        logs = state_dir / LOG_FOLDER
        logs.mkdir(mode=0o700, exist_ok=True)
        for log in logs.iterdir():
            log.unlink()
        yield
    finally:
        os.close(lock)


@contextmanager
def _listening(state_dir: Path) -> Generator[socket.socket]:
    """Only the owner of the lock may replace the socket, so a live keeper's is never taken away."""
    folder = os.open(state_dir, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        (state_dir / SOCKET_NAME).unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            before = os.umask(0o177)  # The socket's mode is set by nothing else at its birth.
            listener.bind(socket_address(folder))
            os.umask(before)
            listener.listen(128)
            yield listener
            (state_dir / SOCKET_NAME).unlink(missing_ok=True)
    finally:
        os.close(folder)


@contextmanager
def _signal_socket() -> Generator[socket.socket]:
    """A socket that becomes readable with every signal: select alone would be resumed after the handler."""
    readable, writable = socket.socketpair()
    with readable, writable:
        readable.setblocking(False)
        writable.setblocking(False)
        signal.set_wakeup_fd(writable.fileno())
        try:
            yield readable
        finally:
            signal.set_wakeup_fd(-1)


if __name__ == "__main__":
    main()
