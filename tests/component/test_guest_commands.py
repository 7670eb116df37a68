"""Commands in a real guest: every way they can run, end, misbehave, and what they can not do to init."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from component.guest_machine import GuestMachine, booted, soon
from forktree_agent.engine.contract import (
    AtCapacity,
    Command,
    CommandRefused,
    DeadlineExceeded,
    ExecResult,
)
from forktree_agent.engine.microvm.guest import UNIDENTIFIED
from forktree_agent.engine.microvm.guest_line import GuestError

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def guest(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[GuestMachine]:
    """One guest for all tests here: that it still works after each of them is part of what they show."""
    async with booted(tmp_path_factory.mktemp("guest")) as machine:
        yield machine


def ok(stdout: bytes = b"", stderr: bytes = b"", exit_code: int = 0) -> ExecResult:
    return ExecResult(stdout=stdout, stderr=stderr, exit_code=exit_code, timed_out=False, truncated=False)


async def test_output_and_exit_code_come_back(guest: GuestMachine) -> None:
    assert await guest.exec("sh", "-c", "echo out; echo err >&2; exit 7") == ok(b"out\n", b"err\n", 7)
    assert await guest.exec("true") == ok()


async def test_input_environment_and_folder_are_as_asked(guest: GuestMachine) -> None:
    script = 'cat; echo "$A|$HOME|$FORKTREE_GENERATION|$PWD"'
    result = await guest.exec("sh", "-c", script, stdin=b"\0\xff\n", env={"A": "ä\n'"}, cwd="/usr/bin")
    assert result == ok(b"\0\xff\n" + f"ä\n'|/root|{UNIDENTIFIED}|/usr/bin\n".encode())


async def test_arguments_are_given_as_they_are(guest: GuestMachine) -> None:
    argv = ("printf", "%s|", "", " a b ", "$HOME", "*", "ü\n", '"')
    assert (await guest.exec(*argv)).stdout.decode() == '| a b |$HOME|*|ü\n|"|'


async def test_a_signal_is_told_as_128_and_its_number(guest: GuestMachine) -> None:
    assert await guest.exec("sh", "-c", "kill -TERM $$") == ok(exit_code=143)


async def test_a_time_out_kills_the_whole_process_group(guest: GuestMachine) -> None:
    result = await guest.exec("sh", "-c", "echo begun; sleep 987 & sleep 987", seconds=0.5)
    assert (result.exit_code, result.timed_out, result.stdout) == (-1, True, b"begun\n")
    assert await guest.sh("ps | grep -c '[s]leep 987' || true") == "0\n"


async def test_a_command_whose_caller_leaves_is_killed(guest: GuestMachine) -> None:
    with pytest.raises(DeadlineExceeded):
        await guest.channel.exec(Command(argv=("sleep", "876")), guest.generation, deadline=soon(0.5))
    assert await guest.sh("while ps | grep -q '[s]leep 876'; do usleep 10000; done; echo gone") == "gone\n"


async def test_binary_output_arrives_byte_for_byte(guest: GuestMachine) -> None:
    sent = bytes(range(256)) * 4000
    assert (await guest.exec("cat", stdin=sent)).stdout == sent


async def test_large_input_arrives_whole(guest: GuestMachine) -> None:
    result = await guest.exec("wc", "-c", stdin=bytes(15 << 20))
    assert result.stdout.split() == [str(15 << 20).encode()]


async def test_output_beyond_the_limit_is_dropped_and_said_so(guest: GuestMachine) -> None:
    result = await guest.exec("sh", "-c", "head -c 20000000 /dev/zero; echo end >&2", limit=5_000_000)
    assert (len(result.stdout), result.truncated, result.exit_code) == (5_000_000, True, 0)
    assert result.stderr == b""
    exact = await guest.exec("sh", "-c", "head -c 1000 /dev/zero", limit=1000)
    assert (len(exact.stdout), exact.truncated) == (1000, False)
    assert await guest.exec("sh", "-c", "echo x", limit=0) == ExecResult(
        stdout=b"", stderr=b"", exit_code=0, timed_out=False, truncated=True
    )


@pytest.mark.parametrize(
    ("argv", "options", "message"),
    [
        (("no-such-program",), {}, r"no program \"no-such-program\""),
        (("/bin/no-such-program",), {}, r"no program"),
        (("/etc/passwd",), {}, r"cannot run \"/etc/passwd\": Permission denied"),
        (("/etc",), {}, r"cannot run"),
        (("true",), {"cwd": "/nowhere"}, r"cannot enter \"/nowhere\": No such file"),
        (("true",), {"cwd": "/etc/passwd"}, r"cannot enter .*Not a directory"),
        (("true",), {"env": {"A=B": ""}}, r"cannot name an environment variable"),
        (("a\0b",), {}, r"NUL"),
        ((), {}, r"the command is empty"),
        (("true", "x" * 200_000), {}, r"cannot run .*too long"),
        (("true", "\udcff"), {}, r"not valid Unicode"),
    ],
    ids=range(11),
)
async def test_what_cannot_be_run_is_refused_with_a_sentence(
    guest: GuestMachine, argv: tuple[str, ...], options: dict[str, object], message: str
) -> None:
    with pytest.raises(CommandRefused, match=message):
        await guest.exec(*argv, **options)  # type: ignore[arg-type]


async def test_a_script_is_run_by_its_interpreter_and_without_one_refused(guest: GuestMachine) -> None:
    await guest.sh(
        "printf '#!/bin/sh\necho script\n' > /tmp/s; printf 'echo x\n' > /tmp/t; chmod +x /tmp/s /tmp/t"
    )
    assert await guest.exec("/tmp/s") == ok(b"script\n")
    with pytest.raises(CommandRefused, match="Exec format error"):
        await guest.exec("/tmp/t")


async def test_a_name_is_looked_for_along_the_path_of_its_own_environment(guest: GuestMachine) -> None:
    await guest.sh("mkdir -p /tmp/a /tmp/b; printf '#!/bin/sh\necho mine\n' > /tmp/b/ls; chmod +x /tmp/b/ls")
    assert await guest.exec("ls", env={"PATH": "/tmp/a:/tmp/b:/bin"}) == ok(b"mine\n")


async def test_many_commands_run_at_once(guest: GuestMachine) -> None:
    async def one(number: int) -> bytes:
        return (await guest.exec("sh", "-c", f"yes {number} | head -c 20000")).stdout

    outputs = await asyncio.gather(*(one(number) for number in range(60)))
    for number, output in enumerate(outputs):
        assert output == (f"{number}\n" * 20_000).encode()[:20_000]


async def test_more_than_can_run_at_once_are_refused_and_the_others_finish(guest: GuestMachine) -> None:
    await guest.sh("mkfifo /tmp/gate")
    waiting = [asyncio.create_task(guest.exec("cat", "/tmp/gate"), name="cat") for _ in range(128)]
    await asyncio.sleep(0)  # Let each put its request into the channel, in order.
    with pytest.raises(AtCapacity, match="128 commands run already"):
        await guest.exec("true")
    waiting.pop().cancel()
    # Whoever opens both ends lets all in that wait for a writer, and lets them go by closing. Refused until
    # the one that was cancelled is reaped.
    script = "while pidof cat >/dev/null; do (exec 3<>/tmp/gate; usleep 100000); done"
    while True:
        try:
            await guest.sh(script)
            break
        except AtCapacity:
            continue
    results = await asyncio.gather(*waiting)
    assert {result.exit_code for result in results} == {0}


async def test_what_is_left_in_the_background_lives_on_and_holds_nobody_up(guest: GuestMachine) -> None:
    begun = time.monotonic()
    script = "(for i in 1 2 3; do echo noise; usleep 200000; done; touch /tmp/survived) & echo back"
    assert (await guest.exec("sh", "-c", script)).stdout.startswith(b"back\n")
    assert time.monotonic() - begun < 50  # The command's own time-out: it did not wait for that.
    await guest.sh("while [ ! -e /tmp/survived ]; do usleep 10000; done")


async def test_orphans_are_reaped(guest: GuestMachine) -> None:
    await guest.sh("for i in $(seq 20); do (sh -c 'exit 0' &) ; done")
    await guest.sh("while grep -l 'State:.Z' /proc/[0-9]*/status 2>/dev/null; do usleep 10000; done")


async def test_init_is_ahead_of_everybody_and_its_children_are_not(guest: GuestMachine) -> None:
    ranks = await guest.sh("cut -d' ' -f40-41 /proc/1/stat; cut -d' ' -f40-41 /proc/self/stat")
    assert ranks == "99 1\n0 0\n"


async def test_a_command_starts_with_a_clean_slate(guest: GuestMachine) -> None:
    signals = await guest.sh("grep -E '^Sig(Blk|Ign)' /proc/self/status | cut -f2 | uniq")
    assert signals == "0000000000000000\n"
    assert await guest.sh("ls /proc/$$/fd; :") == "0\n1\n2\n"
    assert (
        await guest.sh("cat /proc/self/cgroup; umask; ulimit -n; ulimit -Hn")
        == "0::/workload\n0022\n1024\n1048576\n"
    )


async def test_killing_everything_does_not_end_init(guest: GuestMachine) -> None:
    others = asyncio.create_task(guest.exec("sleep", "765"), name="sleep")
    await guest.sh("while ! ps | grep -q '[s]leep 765'; do usleep 10000; done")
    assert await guest.exec("sh", "-c", "kill -9 -1; kill -9 1; kill -TERM 1; kill -SEGV 1; exit 5") == ok(
        exit_code=5
    )
    assert (await others).exit_code == 137
    assert await guest.sh("echo alive") == "alive\n"


async def test_a_command_that_takes_all_memory_is_killed_and_init_is_not(guest: GuestMachine) -> None:
    assert (await guest.exec("tail", "/dev/zero")).exit_code == 137
    assert await guest.sh("echo alive") == "alive\n"


async def test_commands_run_even_beside_a_workload_that_has_all_its_processes(guest: GuestMachine) -> None:
    limit = int(await guest.sh("cat /sys/fs/cgroup/workload/pids.max"))
    assert limit < int(await guest.sh("cat /proc/sys/kernel/threads-max"))
    await guest.sh("echo 10 > /sys/fs/cgroup/workload/pids.max")
    await guest.exec("sh", "-c", "for i in $(seq 12); do sleep 654 & done")
    assert await guest.exec("echo", "alive") == ok(b"alive\n")
    with pytest.raises(AssertionError, match="can't fork"):
        await guest.sh("true | true")
    await guest.exec("sh", "-c", f"kill -9 -1; echo {limit} > /sys/fs/cgroup/workload/pids.max")


async def test_a_full_disk_is_the_commands_problem(guest: GuestMachine) -> None:
    result = await guest.exec("sh", "-c", "dd if=/dev/zero of=/tmp/big bs=1M")
    assert b"No space left" in result.stderr
    assert await guest.sh("rm /tmp/big; echo x > /tmp/small; cat /tmp/small") == "x\n"


async def test_a_command_for_another_machine_is_not_run(guest: GuestMachine) -> None:
    with pytest.raises(GuestError, match="generation is 0000"):
        await guest.channel.exec(
            Command(argv=("touch", "/tmp/wrong")), "6f1c2d3e-4a5b-4c6d-8e7f-901a2b3c4d5e", deadline=soon()
        )
    assert (await guest.exec("ls", "/tmp/wrong")).exit_code == 1


async def test_the_usual_places_are_there(guest: GuestMachine) -> None:
    places = "/dev/shm/x /run/x /tmp/x"
    script = (
        f"ping -c1 -w5 127.0.0.1 >/dev/null && for i in {places}; do echo x > $i; done; df -k / | tail -1"
    )
    assert (await guest.sh(script)).split()[1] == str((64 << 20) >> 10)
    assert await guest.sh(
        "stat -c %a / /tmp /dev/shm; readlink /dev/fd; ls /dev/pts; ls /modules /init 2>&1 | wc -l"
    ) == ("755\n1777\n1777\n/proc/self/fd\nptmx\n2\n")
