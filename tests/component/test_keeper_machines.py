"""Machines as real processes: what they get, what they do not get, how they start, fail and end."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from component.keeper_fixtures import (
    MACHINE_ENV,
    MACHINE_UID,
    KeeperProcess,
    keeper_process,
    next_exit,
    soon,
    start_machine,
)
from forktree_agent.keeper_client import (
    Channel,
    ChannelType,
    Code,
    Keeper,
    KeeperError,
    Started,
    child_descriptor,
)


@pytest.fixture
async def process(tmp_path: Path) -> AsyncGenerator[KeeperProcess]:
    async with keeper_process(tmp_path / "state", f"ft-test-{os.getpid()}") as process:
        yield process


@pytest.fixture
async def keeper(process: KeeperProcess) -> AsyncGenerator[Keeper]:
    async with Keeper.connected(process.socket_path, deadline=soon()) as keeper:
        yield keeper


async def said_by(keeper: Keeper, argv: Sequence[str], **settings: Any) -> str:
    """What a machine prints that ends by itself and well."""
    await start_machine(keeper, "printer", argv, **settings)
    assert (await next_exit(keeper)).text == "exited with code 0"
    text = keeper.log_tail("printer")
    await keeper.forget("printer", deadline=soon())
    return text


async def said_by_shell(keeper: Keeper, script: str, **settings: Any) -> str:
    return await said_by(keeper, ["/bin/sh", "-c", script], **settings)


async def receive(sock: socket.socket) -> bytes:
    sock.setblocking(False)
    async with asyncio.timeout(20):
        return await asyncio.get_running_loop().sock_recv(sock, 65536)


def close(started: Started) -> None:
    for sock in started.channels.values():
        sock.close()


async def test_it_runs_with_its_own_ids_and_no_group_of_the_keeper(keeper: Keeper) -> None:
    said = await said_by_shell(keeper, "id -u; id -g; id -G")
    assert said.split() == [str(MACHINE_UID)] * 3


async def test_its_environment_is_exactly_the_one_given(keeper: Keeper) -> None:
    assert await said_by(keeper, ["/usr/bin/env"], env={"ONLY": "this"}) == "ONLY=this\n"


def open_files(pid: int) -> dict[int, str]:
    """By descriptor. What is closed meanwhile is left out."""
    found: dict[int, str] = {}
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            found[int(entry.name)] = str(entry.readlink())
    return found


async def test_it_gets_files_and_channels_in_order_and_nothing_else(keeper: Keeper) -> None:
    first, second = os.memfd_create("first"), os.memfd_create("second")
    started = await start_machine(
        keeper,
        "m",
        ["/bin/sleep", "1000"],
        files=[second, first],
        channels=[Channel("a", ChannelType.STREAM), Channel("b", ChannelType.SEQPACKET)],
    )
    async with asyncio.timeout_at(soon()):
        # A program that begins has its libraries open for a moment.
        while (links := open_files(started.pid)).keys() != {0, 1, 2, 3, 4, 5, 6}:  # noqa: ASYNC110 (no event)
            await asyncio.sleep(0)
    assert links[0] == "/dev/null"
    assert links[1] == links[2]
    assert links[1].endswith("/logs/m.log")
    assert links[child_descriptor(0)].startswith("/memfd:second")
    assert links[child_descriptor(1)].startswith("/memfd:first")
    assert links[child_descriptor(2)].startswith("socket:")
    close(started)
    os.close(first)
    os.close(second)


async def test_what_the_keeper_itself_inherited_does_not_reach_a_machine(tmp_path: Path) -> None:
    prefix = ["/bin/bash", "-c", 'exec 77</dev/zero; exec "$@"', "bash"]
    async with (
        keeper_process(tmp_path, f"ft-test-{os.getpid()}", prefix=prefix) as process,
        Keeper.connected(process.socket_path, deadline=soon()) as keeper,
    ):
        assert Path(f"/proc/{process.pid}/fd/77").exists()
        assert "77" not in (await said_by_shell(keeper, "ls /proc/self/fd")).split()


async def test_channels_carry_bytes_and_packets_both_ways(keeper: Keeper) -> None:
    started = await start_machine(
        keeper,
        "echo",
        ["/bin/sh", "-c", "cat <&3 >&3 & cat <&4 >&4; wait"],
        channels=[Channel("stream", ChannelType.STREAM), Channel("packets", ChannelType.SEQPACKET)],
    )
    for sock in started.channels.values():
        sock.send(b"one")
        assert await receive(sock) == b"one"
    started.channels["packets"].send(b"x" * 1000)
    assert await receive(started.channels["packets"]) == b"x" * 1000
    close(started)


async def test_its_network_is_empty_and_its_loopback_down(keeper: Keeper) -> None:
    own = Path("/proc/self/ns/net").readlink()
    started = await start_machine(keeper, "m", ["/bin/sleep", "1000"], network_namespace=True)
    assert Path(f"/proc/{started.pid}/ns/net").readlink() != own
    devices = Path(f"/proc/{started.pid}/net/dev").read_text().splitlines()[2:]
    assert [line.split(":")[0].strip() for line in devices] == ["lo"]
    said = await said_by_shell(
        keeper, "cat /sys/class/net/lo/operstate; ip -o link show lo", network_namespace=True
    )
    assert "UP" not in said


async def test_it_has_no_new_privileges_a_session_of_its_own_default_signals_and_no_core(
    keeper: Keeper,
) -> None:
    started = await start_machine(keeper, "m", ["/bin/sleep", "1000"], nice=7)
    status = dict(
        line.split(":\t", 1)
        for line in Path(f"/proc/{started.pid}/status").read_text().splitlines()
        if ":\t" in line
    )
    assert status["NoNewPrivs"] == "1"
    assert status["Groups"].strip() == ""
    # Bit n - 1 is signal n. 32 and 33 are the C library's own: no program can set them, only inherit them.
    ours = ~(1 << 31 | 1 << 32)
    assert [int(status[each], 16) & ours for each in ("SigBlk", "SigIgn", "SigCgt")] == [0, 0, 0]
    assert os.getsid(started.pid) == started.pid
    assert os.getpriority(os.PRIO_PROCESS, started.pid) == 7
    assert "Max core file size        0 " in Path(f"/proc/{started.pid}/limits").read_text()
    assert Path(f"/proc/{started.pid}/cwd").readlink() == Path("/")


async def test_ld_preload_reaches_the_machine_alone(keeper: Keeper, process: KeeperProcess) -> None:
    missing = "/nonexistent/shim.so"  # The dynamic linker complains into the log of whom it reaches.
    assert missing in await said_by_shell(keeper, "true", env={**MACHINE_ENV, "LD_PRELOAD": missing})
    assert await said_by_shell(keeper, "true") == ""
    assert not any(missing in line for line in process.log)
    assert missing.encode() not in Path(f"/proc/{process.pid}/environ").read_bytes()


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs a C compiler")
async def test_a_preloaded_library_runs_in_the_machine_and_not_on_the_way_there(
    keeper: Keeper, tmp_path: Path
) -> None:
    source, library = tmp_path / "mark.c", tmp_path / "mark.so"
    source.write_text(
        '#include <unistd.h>\n__attribute__((constructor)) void mark(void) { write(2, "loaded\\n", 7); }\n'
    )
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source], check=True)
    shim = os.open(library, os.O_RDONLY)
    await start_machine(keeper, "m", ["/bin/true"], env={"LD_PRELOAD": "/proc/self/fd/3"}, files=[shim])
    await next_exit(keeper)
    assert keeper.log_tail("m") == "loaded\n"
    os.close(shim)


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("/nonexistent/qemu", "cannot execute /nonexistent/qemu: No such file or directory"),
        ("/etc/passwd", "cannot execute /etc/passwd: Permission denied"),
    ],
)
async def test_a_failed_start_says_why_and_leaves_nothing(
    keeper: Keeper, process: KeeperProcess, program: str, message: str
) -> None:
    before = process.descriptors()
    with pytest.raises(KeeperError) as raised:
        await start_machine(keeper, "m", [program], channels=[Channel("c", ChannelType.STREAM)])
    assert (raised.value.code, str(raised.value)) == (Code.START_FAILED, message)
    assert (await keeper.listing(deadline=soon())).machines == ()
    assert process.descriptors() == before
    assert list((process.state_dir / "logs").iterdir()) == []
    # The name is free again, and no exit is told of what never ran.
    assert await said_by_shell(keeper, "true") == ""


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs setpriv")
@pytest.mark.parametrize(
    ("lacking", "message"),
    [
        ("setgid", "cannot drop the groups: Operation not permitted"),
        ("setuid", "cannot set the uid: Operation not permitted"),
        ("sys_admin", "cannot make a network namespace: Operation not permitted"),
        ("sys_nice", "cannot set its priority: Permission denied"),
    ],
)
async def test_each_setting_that_fails_is_named(tmp_path: Path, lacking: str, message: str) -> None:
    prefix = ["setpriv", f"--bounding-set=-{lacking}"]
    async with (
        keeper_process(tmp_path, f"ft-test-{os.getpid()}", prefix=prefix) as process,
        Keeper.connected(process.socket_path, deadline=soon()) as keeper,
    ):
        with pytest.raises(KeeperError) as raised:
            await start_machine(keeper, "m", ["/bin/true"], network_namespace=True, nice=-20)
        assert (raised.value.code, str(raised.value)) == (Code.START_FAILED, message)


async def test_a_log_or_a_group_that_cannot_be_used_is_named(keeper: Keeper, process: KeeperProcess) -> None:
    (process.state_dir / "logs" / "m.log").mkdir()
    with pytest.raises(KeeperError, match="cannot open its log: Is a directory"):
        await start_machine(keeper, "m", ["/bin/true"])
    with pytest.raises(KeeperError, match=r"cannot make .*/tasks: File exists") as raised:
        await start_machine(keeper, "n", ["/bin/true"], cgroup="tasks")
    assert raised.value.code is Code.CGROUP_FAILED
    (process.state_dir / "logs" / "m.log").rmdir()


async def test_a_name_is_taken_until_it_is_forgotten(keeper: Keeper) -> None:
    await start_machine(keeper, "m", ["/bin/sleep", "1000"])
    with pytest.raises(KeeperError) as raised:
        await start_machine(keeper, "m", ["/bin/sleep", "1000"])
    assert raised.value.code is Code.MACHINE_EXISTS
    with pytest.raises(KeeperError) as raised:
        await keeper.forget("m", deadline=soon())
    assert raised.value.code is Code.MACHINE_RUNNING
    await keeper.kill("m", deadline=soon())
    await keeper.forget("m", deadline=soon())
    await keeper.forget("m", deadline=soon())
    with pytest.raises(KeeperError) as raised:
        await keeper.kill("m", deadline=soon())
    assert raised.value.code is Code.NO_SUCH_MACHINE
    await start_machine(keeper, "m", ["/bin/sleep", "1000"])


@pytest.mark.parametrize(
    ("script", "exit_code", "number", "text"),
    [
        ("exit 0", 0, None, "exited with code 0"),
        ("exit 3", 3, None, "exited with code 3"),
        ("kill -TERM $$", None, 15, "killed by signal 15 (SIGTERM)"),
        ("kill -36 $$", None, 36, "killed by signal 36 (real-time)"),
    ],
)
async def test_an_exit_is_told_in_words_and_stays_in_the_listing(
    keeper: Keeper, script: str, exit_code: int | None, number: int | None, text: str
) -> None:
    started = await start_machine(keeper, "m", ["/bin/bash", "-c", script])
    ended = await next_exit(keeper)
    assert (ended.machine, ended.pid) == ("m", started.pid)
    assert (ended.exit_code, ended.signal, ended.text) == (exit_code, number, text)
    (entry,) = (await keeper.listing(deadline=soon())).machines
    assert entry.exit == ended
    assert await keeper.kill("m", deadline=soon()) == ended


async def test_kill_answers_when_the_process_is_gone_and_is_told_as_an_event_too(keeper: Keeper) -> None:
    started = await start_machine(keeper, "m", ["/bin/sh", "-c", "trap '' TERM INT HUP; sleep 1000"])
    first, second = await asyncio.gather(keeper.kill("m", deadline=soon()), keeper.kill("m", deadline=soon()))
    assert not Path(f"/proc/{started.pid}").exists()
    assert first == second == await next_exit(keeper)
    assert first.text == "killed by signal 9 (SIGKILL)"


async def test_what_a_machine_had_started_ends_with_it(keeper: Keeper) -> None:
    started = await start_machine(
        keeper,
        "m",
        ["/bin/sh", "-c", "sleep 1000 & echo $!; wait"],
        channels=[Channel("c", ChannelType.STREAM)],
    )
    await keeper.kill("m", deadline=soon())
    assert await receive(started.channels["c"]) == b""  # The far end's last holder, the sleep, is gone.
    close(started)


async def test_a_stopped_process_is_killed_as_well(keeper: Keeper) -> None:
    started = await start_machine(keeper, "m", ["/bin/sleep", "1000"])
    os.kill(started.pid, signal.SIGSTOP)
    assert (await keeper.kill("m", deadline=soon())).signal == signal.SIGKILL


async def test_many_machines_start_at_once_and_each_gets_its_own_channel(keeper: Keeper) -> None:
    names = [f"m{number}" for number in range(40)]
    started = await asyncio.gather(
        *(
            start_machine(
                keeper,
                name,
                ["/bin/sh", "-c", f"echo {name} >&3; sleep 1000"],
                channels=[Channel("c", ChannelType.STREAM)],
            )
            for name in names
        )
    )
    for name, each in zip(names, started, strict=True):
        assert await receive(each.channels["c"]) == f"{name}\n".encode()
        close(each)
    listing = await keeper.listing(deadline=soon())
    assert [entry.machine for entry in listing.machines] == sorted(names)
    assert {entry.pid for entry in listing.machines} == {each.pid for each in started}


async def test_a_log_keeps_only_its_tail_for_the_reader(keeper: Keeper) -> None:
    await start_machine(keeper, "m", ["/bin/sh", "-c", "echo out; echo err >&2; seq 1000"])
    await next_exit(keeper)
    assert keeper.log_tail("m").endswith("999\n1000\n")
    assert keeper.log_tail("m", 5) == "1000\n"
    assert keeper.log_tail("m", 1_000_000).startswith("out\nerr\n1\n")
    assert keeper.log_tail("unknown") == ""


async def test_what_a_machine_has_for_itself_is_told_and_of_one_that_exited_nothing(keeper: Keeper) -> None:
    script = "held=$(head -c 30000000 /dev/zero | tr '\\0' x); echo ready >&3; read -r _ <&3"
    channels = [Channel("talk", ChannelType.STREAM)]
    started = await start_machine(keeper, "m", ["/bin/bash", "-c", script], channels=channels)
    assert await receive(started.channels["talk"]) == b"ready\n"
    assert 30_000_000 < await keeper.own_bytes("m", deadline=soon()) < 300_000_000
    await keeper.kill("m", deadline=soon())
    assert await keeper.own_bytes("m", deadline=soon()) == 0
    close(started)
    with pytest.raises(KeeperError) as caught:
        await keeper.own_bytes("nobody", deadline=soon())
    assert caught.value.code is Code.NO_SUCH_MACHINE
