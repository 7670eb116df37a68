"""A PID, network and mount namespace that a node lives in, held by one process.

`python -m forktree_dev.real_node.sandbox STATE` makes it and waits. When that process ends, however it ends,
the kernel kills all that runs inside: kubelet, containerd, its shims, and every container. What they mounted
and the interfaces they made go with them.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from forktree_dev.processes import Service

_CLONE_NEWNS, _CLONE_NEWPID, _CLONE_NEWNET = 0x0002_0000, 0x2000_0000, 0x4000_0000
_PR_SET_PDEATHSIG = 1
_START_SECONDS = 30.0
_TUNABLES = {
    "vm/overcommit_memory": "1",
    "vm/panic_on_oom": "0",
    "kernel/panic": "10",
    "kernel/panic_on_oops": "1",
    "kernel/keys/root_maxkeys": "1000000",
    "kernel/keys/root_maxbytes": "25000000",
}
"""What a kubelet sets on its machine. Inside they are plain files: the machine's own stay as they are."""


class Sandbox:
    """The sandbox in `folder`."""

    def __init__(self, folder: Path, *, outlives_us: bool) -> None:
        self._ready = folder / "sandbox.fifo"
        self._service = Service(
            "sandbox",
            [sys.executable, "-m", "forktree_dev.real_node.sandbox", str(self._ready)],
            folder,
            outlives_us=outlives_us,
        )

    async def start(self) -> None:
        """Returns when it is there. Raises `ProcessFailed` when it cannot be made."""
        self._ready.parent.mkdir(parents=True, exist_ok=True)
        self._ready.unlink(missing_ok=True)
        os.mkfifo(self._ready, 0o600)
        # Open for writing too: else it counts as ended before the other side has opened it.
        fifo = os.open(self._ready, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            self._service.start()
            await self._told(fifo)
        finally:
            os.close(fifo)

    async def stop(self) -> None:
        """End it, and with it all that is inside. Safe to repeat."""
        await self._service.stop()

    @property
    def init(self) -> int:
        """Process id, as seen from outside, of the first process inside."""
        children = Path(f"/proc/{self._service.pid}/task/{self._service.pid}/children")
        return int(children.read_text().split()[0])

    def inside(self, argv: Sequence[str]) -> list[str]:
        """The command that runs `argv` inside. It ends with the sandbox, not with whoever started it."""
        return ["nsenter", f"--target={self.init}", "--mount", "--net", "--pid", "--", *argv]

    def in_network(self, argv: Sequence[str]) -> list[str]:
        """The command that runs `argv` with the network of the sandbox, and nothing else of it."""
        return ["nsenter", f"--target={self.init}", "--net", "--", *argv]

    def run_inside(self, *argv: str) -> None:
        """Run a command of some milliseconds inside. Raises `CalledProcessError`."""
        subprocess.run(self.inside(argv), check=True, capture_output=True, text=True)

    async def _told(self, fifo: int) -> None:
        loop = asyncio.get_running_loop()
        ready = asyncio.Event()
        loop.add_reader(fifo, ready.set)
        ended = asyncio.create_task(
            self._service.ended(deadline=loop.time() + _START_SECONDS), name="sandbox-ended"
        )
        waiting = asyncio.create_task(ready.wait(), name="sandbox-ready")
        try:
            await asyncio.wait([ended, waiting], return_when=asyncio.FIRST_COMPLETED)
            if not ready.is_set():
                raise self._service.failure()
        finally:
            loop.remove_reader(fifo)
            for task in (ended, waiting):
                task.cancel()


def main() -> int:
    """Make the namespaces, say so, and wait for the end of either side."""
    ready = Path(sys.argv[1])
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS | _CLONE_NEWPID | _CLONE_NEWNET) != 0:
        number = ctypes.get_errno()
        print(f"cannot make namespaces: {os.strerror(number)}", file=sys.stderr)
        return 1
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD})
    child = os.fork()
    if child == 0:
        # Set before anything else can be started in here.
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        _be_init(ready)
    while signal.sigwait({signal.SIGTERM, signal.SIGINT, signal.SIGCHLD}) == signal.SIGCHLD:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            print(f"the first process inside has ended, status {status}", file=sys.stderr)
            return 1
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)  # Returns when the kernel has ended everything inside.
    return 0


def _be_init(ready: Path) -> None:
    """Process 1 inside: prepare what a machine has after its boot, then collect orphans for ever."""
    try:
        for command in (
            # Mounts of pods must be able to reach other pods; none of them reaches the machine outside.
            ["mount", "--make-rprivate", "/"],
            ["mount", "--make-rshared", "/"],
            ["mount", "-t", "proc", "proc", "/proc"],
            ["mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", "/run"],
            ["ip", "link", "set", "lo", "up"],
        ):
            subprocess.run(command, check=True)
        for name, value in _TUNABLES.items():
            shown = Path("/run/tunables") / name
            shown.parent.mkdir(parents=True, exist_ok=True)
            shown.write_text(f"{value}\n")
            subprocess.run(["mount", "--bind", str(shown), f"/proc/sys/{name}"], check=True)
        Path("/proc/sys/net/ipv4/ip_forward").write_text("1")  # Of this network namespace alone.
        ready.write_text("ready\n")
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"cannot prepare the sandbox: {error}", file=sys.stderr)
        os._exit(1)
    while True:
        signal.sigwait({signal.SIGCHLD})
        _reap()


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass
    except ChildProcessError:
        pass


if __name__ == "__main__":
    sys.exit(main())
