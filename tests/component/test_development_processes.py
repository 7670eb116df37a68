"""Processes that development starts can always be found again and ended, and never another in their place."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from forktree_dev.parent_death import die_with_us
from forktree_dev.processes import Service, running_recorded, stop_recorded

STUBBORN = "trap '' TERM; echo ready; exec 3<>$0; read x <&3"
"""A shell that does not end when asked, and waits for ever on the FIFO it is called by."""
ENDS_THREAD_BY_THREAD = """
import ctypes, os, threading, time
threading.Thread(target=lambda: (time.sleep(1), os._exit(3))).start()
ctypes.CDLL(None).syscall(60, 0)  # exit of this thread alone, on x86-64
"""


def shell(name: str, script: str, folder: Path, *, grace_seconds: float = 10.0) -> Service:
    fifo = folder / f"{name}.fifo"
    if not fifo.exists():
        os.mkfifo(fifo)
    return Service(name, ["/bin/sh", "-c", script, str(fifo)], folder, grace_seconds=grace_seconds)


def soon() -> float:
    return asyncio.get_running_loop().time() + 10


async def test_a_stopped_service_is_reaped_and_starts_again_as_another_process(tmp_path: Path) -> None:
    service = shell("one", "read x < $0", tmp_path)
    service.start()
    first = service.pid
    service.start()
    assert service.pid == first
    await service.restart()
    assert service.pid not in (None, first)
    assert not Path(f"/proc/{first}").exists()
    await service.stop()
    await service.stop()
    assert service.pid is None


async def test_a_service_that_ignores_the_request_is_killed(tmp_path: Path) -> None:
    service = shell("stubborn", STUBBORN, tmp_path, grace_seconds=0.2)
    service.start()
    pid = service.pid
    await service.stop()
    assert not Path(f"/proc/{pid}").exists()


async def test_the_failure_of_a_service_says_arguments_exit_and_the_end_of_its_log(tmp_path: Path) -> None:
    service = shell("broken", "echo cannot find the thing >&2; exit 3", tmp_path)
    service.start()
    assert await service.ended(deadline=soon())
    assert service.pid is None
    text = str(service.failure())
    assert "broken exited with code 3" in text
    assert "cannot find the thing\n" in f"{text}\n"
    assert "/bin/sh -c" in text


def test_a_service_whose_first_thread_ends_before_the_others_still_says_how_it_ended(tmp_path: Path) -> None:
    service = Service("threads", [sys.executable, "-c", ENDS_THREAD_BY_THREAD], tmp_path)
    service.start()
    pid = service.pid
    while Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z":
        pass
    assert service.pid is None
    assert "exited with code 3" in str(service.failure())


async def test_a_recorded_pid_that_somebody_else_has_now_is_left_alone(tmp_path: Path) -> None:
    service = shell("one", "read x < $0", tmp_path)
    service.start()
    record = tmp_path / "records" / "one.json"
    fields = json.loads(record.read_text())
    # As if the pid had been given out again: the process with it started at another time.
    record.write_text(json.dumps(fields | {"start_ticks": fields["start_ticks"] - 1}))
    assert running_recorded(tmp_path) == []
    assert await stop_recorded(tmp_path) == []
    assert not record.exists()
    record.write_text(json.dumps(fields))
    assert await stop_recorded(tmp_path) == ["one"]


async def test_what_was_started_last_is_ended_first(tmp_path: Path) -> None:
    for name in ("storage", "server", "client"):
        shell(name, "read x < $0", tmp_path).start()
    assert await stop_recorded(tmp_path) == ["client", "server", "storage"]


async def test_ending_all_goes_to_its_end_although_it_is_cancelled(tmp_path: Path) -> None:
    stubborn = shell("stubborn", STUBBORN, tmp_path)
    client = shell("client", "read x < $0", tmp_path)
    stubborn.start()
    client.start()
    stopping = asyncio.create_task(stop_recorded(tmp_path, grace_seconds=1.0))
    assert await client.ended(deadline=soon())
    stopping.cancel()  # As by Ctrl-C of somebody who sees that things are being ended.
    with pytest.raises(asyncio.CancelledError):
        await stopping
    assert running_recorded(tmp_path) == []
    await stubborn.stop()


@pytest.mark.parametrize("outlives", [False, True])
async def test_services_end_with_the_command_that_started_them_unless_they_are_to_stay(
    tmp_path: Path, outlives: bool
) -> None:
    script = (
        "import os, sys; from pathlib import Path; from forktree_dev.processes import Service;"
        f"s = Service('one', ['sleep', '600'], Path({str(tmp_path)!r}), outlives_us={outlives}); s.start();"
        "print(s.pid, flush=True); sys.stdin.read(); os.kill(os.getpid(), 9)"
    )
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout
        pid = int(await asyncio.to_thread(starter.stdout.readline))
    if not outlives:
        service = Service("one", ["sleep", "600"], tmp_path)
        assert await service.ended(deadline=soon())
    assert running_recorded(tmp_path) == (["one"] if outlives else [])
    await stop_recorded(tmp_path)
    assert running_recorded(tmp_path) == []
    assert not Path(f"/proc/{pid}").exists() or Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"


def test_a_service_whose_starter_has_gone_before_it_could_begin_does_not(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    command = die_with_us(["touch", str(begun)])
    assert subprocess.run(command, check=False).returncode == 0
    begun.unlink()
    # Its parent is another process than the one that it is to end with, as when that one has ended.
    again = ["/bin/sh", "-c", '"$@"; true', "sh", *command]
    assert subprocess.run(again, check=False).returncode == 0
    assert not begun.exists()


COUNTS_ITS_RUNS = "echo ran $$ >> $0; test $(wc -l < $0) -lt 4 && exit 7; echo settled; exec sleep 600"
"""Ends three times by itself, then stays."""


@asynccontextmanager
async def restarted(tmp_path: Path, script: str, *, settle_seconds: float = 0.0) -> AsyncGenerator[Service]:
    options = [f"--settle-seconds={settle_seconds}", "--delay-seconds=0.01"]
    command = [*options, "--", "/bin/sh", "-c", script, str(tmp_path / "runs")]
    service = Service("again", [sys.executable, "-m", "forktree_dev.restarting", *command], tmp_path)
    service.start()
    try:
        yield service
    finally:
        await service.stop()


def runs(tmp_path: Path) -> list[int]:
    """Pids of all runs so far."""
    path = tmp_path / "runs"
    return [int(line.split()[1]) for line in path.read_text().splitlines()] if path.exists() else []


async def until(there: Callable[[], object]) -> None:
    """What another process writes to a file can only be looked for."""
    async with asyncio.timeout(10):
        while True:
            if there():
                return
            await asyncio.sleep(0.01)


async def test_a_program_that_ends_by_itself_is_started_again_ever_later(tmp_path: Path) -> None:
    async with restarted(tmp_path, COUNTS_ITS_RUNS) as service:
        await until(lambda: "settled" in service.log_tail())
        assert len(set(runs(tmp_path))) == 4
        told = [line.split("ended ")[1] for line in service.log_tail().splitlines() if " ended " in line]
        assert [line.split()[0] for line in told] == ["code=7"] * 3
        assert [line.split()[2] for line in told] == [f"restart_in_seconds={s}" for s in (0.01, 0.02, 0.04)]
    assert not Path(f"/proc/{runs(tmp_path)[-1]}").exists()


async def test_a_program_that_is_told_to_end_stays_ended(tmp_path: Path) -> None:
    script = "trap 'exit 5' TERM; echo ran $$ >> $0; while :; do sleep 0.01; done"
    async with restarted(tmp_path, script) as service:
        await until(lambda: runs(tmp_path))
        assert service.pid is not None
        os.kill(service.pid, signal.SIGTERM)
        assert await service.ended(deadline=soon())
        assert "exited with code 5" in str(service.failure())
    assert len(runs(tmp_path)) == 1


async def test_a_program_that_cannot_begin_is_not_tried_again(tmp_path: Path) -> None:
    async with restarted(tmp_path, "echo ran $$ >> $0; exit 3", settle_seconds=60) as service:
        assert await service.ended(deadline=soon())
        assert "exited with code 3" in str(service.failure())
    assert len(runs(tmp_path)) == 1


async def test_a_program_that_somebody_kills_as_it_begins_is_started_again(tmp_path: Path) -> None:
    async with restarted(tmp_path, "echo ran $$ >> $0; exec sleep 600", settle_seconds=60):
        await until(lambda: runs(tmp_path))
        os.kill(runs(tmp_path)[0], signal.SIGKILL)
        await until(lambda: len(runs(tmp_path)) == 2)


async def test_a_program_ends_with_who_would_start_it_again(tmp_path: Path) -> None:
    script = "echo ran $$ >> $0; trap '' TERM; while :; do sleep 0.01; done"
    async with restarted(tmp_path, script) as service:
        await until(lambda: runs(tmp_path))
        pidfd = os.pidfd_open(runs(tmp_path)[0])
        try:
            await service.kill()
            readable, _, _ = select.select([pidfd], [], [], 10)
            assert readable
        finally:
            os.close(pidfd)
