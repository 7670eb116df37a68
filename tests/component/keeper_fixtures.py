"""A real keeper for tests, which proves at its end that it leaves no process and no control group behind."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import sys
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from forktree_agent.keeper_client import Channel, Companion, Exit, Keeper, Started
from forktree_dev.parent_death import die_with_us

CGROUP_MOUNT = Path("/sys/fs/cgroup")
HIERARCHIES = ("memory", "cpu", "pids", "unified", "")
"""Of version 1 by name, of version 2 the mount itself, or `unified` where version 1 rules."""
STEP_SECONDS = 20.0
MACHINE_UID = 64_201
MACHINE_ENV = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}


@dataclass(slots=True)
class KeeperProcess:
    """A keeper that was started and has told that it listens."""

    process: asyncio.subprocess.Process
    state_dir: Path
    cgroup_root: str
    log: list[str] = field(default_factory=list[str])
    """Its lines so far."""

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def socket_path(self) -> Path:
        return self.state_dir / "keeper.sock"

    def descriptors(self) -> int:
        """How many it has open now."""
        return len(list(Path(f"/proc/{self.pid}/fd").iterdir()))

    async def kill(self) -> None:
        """SIGKILL, as a crash would end it."""
        self.process.kill()
        await self.process.wait()


def soon() -> float:
    """A deadline that only a bug reaches."""
    return asyncio.get_running_loop().time() + STEP_SECONDS


async def start_machine(
    keeper: Keeper,
    machine: str,
    argv: Sequence[str],
    *,
    env: Mapping[str, str] = MACHINE_ENV,
    cgroup: str | None = None,
    network_namespace: bool = False,
    files: Sequence[int] = (),
    channels: Sequence[Channel] = (),
    nice: int | None = None,
    companion: Companion | None = None,
) -> Started:
    """Start a machine with settings that most tests do not care about."""
    return await keeper.start(
        machine,
        argv,
        env=env,
        uid=MACHINE_UID,
        gid=MACHINE_UID,
        cgroup=cgroup,
        network_namespace=network_namespace,
        files=files,
        channels=channels,
        nice=nice,
        companion=companion,
        deadline=soon(),
    )


async def next_exit(keeper: Keeper) -> Exit:
    """The next exit that the keeper tells."""
    async with asyncio.timeout(STEP_SECONDS):
        exited = await anext(keeper.exits())
        assert isinstance(exited, Exit)
        return exited


@asynccontextmanager
async def running_keeper(state_dir: Path, cgroup_root: str) -> AsyncGenerator[Path]:
    """Start `python -m forktree_keeper` and yield its socket's path. Everything else is `keeper_process`."""
    async with keeper_process(state_dir, cgroup_root) as keeper:
        yield keeper.socket_path


@asynccontextmanager
async def keeper_process(
    state_dir: Path, cgroup_root: str, *, prefix: Sequence[str] = ()
) -> AsyncGenerator[KeeperProcess]:
    """Start a keeper (through the command `prefix`, which must exec it) and wait until it listens.

    At the end it gets SIGTERM, and SIGKILL where that does not help. Whatever the test did to it before, an
    `AssertionError` tells when a process that it had started, or a group of `cgroup_root`, is still there.
    """
    command = [*prefix, sys.executable, "-m", "forktree_keeper"]
    process = await asyncio.create_subprocess_exec(
        *die_with_us([*command, "--state-dir", str(state_dir), "--cgroup-root", cgroup_root]),
        stdin=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    keeper = KeeperProcess(process, state_dir, cgroup_root)
    listens = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(_read_log(keeper, listens), name="keeper-log")
        try:
            async with asyncio.timeout(STEP_SECONDS):
                await listens.wait()
            assert process.returncode is None, _report("the keeper did not begin", keeper)
            yield keeper
        finally:
            await _end(keeper)


async def _read_log(keeper: KeeperProcess, listens: asyncio.Event) -> None:
    assert keeper.process.stderr is not None
    async for line in keeper.process.stderr:
        keeper.log.append(line.decode().rstrip())
        if " listening " in keeper.log[-1]:
            listens.set()
    await keeper.process.wait()
    listens.set()  # It has ended without: whoever waits looks at its exit code.


async def _end(keeper: KeeperProcess) -> None:
    left = {pid: pidfd for pid in _descendants(keeper) if (pidfd := _pidfd(pid)) is not None}
    try:
        ended_well = keeper.process.returncode in (None, 0)
        if keeper.process.returncode is None:
            keeper.process.send_signal(signal.SIGTERM)
            try:
                async with asyncio.timeout(STEP_SECONDS):
                    await keeper.process.wait()
            except TimeoutError:
                await keeper.kill()
                raise AssertionError(_report("the keeper did not end by SIGTERM", keeper)) from None
        alive = await asyncio.to_thread(_outliving, left)
        assert not alive, _report(f"processes outlived their keeper: {alive}", keeper)
        if not ended_well:
            _remove_groups(keeper.cgroup_root)  # Nobody else could: the keeper was killed.
        groups = [str(path) for path in group_folders(keeper.cgroup_root)]
        assert not groups, _report(f"groups are left: {groups}", keeper)
    finally:
        for pidfd in left.values():
            os.close(pidfd)


def _report(what: str, keeper: KeeperProcess) -> str:
    return "\n".join([f"{what} (exit code {keeper.process.returncode}); its log:", *keeper.log])


def _descendants(keeper: KeeperProcess) -> set[int]:
    """By its family, and by its groups, which also tell who has lost its parent."""
    found = {
        int(pid)
        for folder in group_folders(keeper.cgroup_root)
        for pid in (folder / "cgroup.procs").read_text().split()
    }
    unseen = [keeper.pid] if keeper.process.returncode is None else []
    while unseen:
        pid = unseen.pop()
        with suppress(OSError):
            children = set(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
            unseen += children - found
            found |= children
    return found


def _pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None


def _outliving(pidfds: dict[int, int]) -> list[int]:
    """Those that have not ended in time. They are killed then: one failed test must not spoil the others."""
    deadline = time.monotonic() + STEP_SECONDS
    alive: list[int] = []
    for pid, pidfd in pidfds.items():
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            alive.append(pid)
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    return alive


def group_folders(cgroup_root: str) -> Iterator[Path]:
    """The root group and those below, deepest first, in every hierarchy."""
    for hierarchy in HIERARCHIES:
        root = CGROUP_MOUNT / hierarchy / cgroup_root
        if root.is_dir():
            yield from (entry for entry in root.iterdir() if entry.is_dir())
            yield root


def _remove_groups(cgroup_root: str) -> None:
    for folder in group_folders(cgroup_root):
        folder.rmdir()
