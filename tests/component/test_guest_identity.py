"""A real guest's life: it boots, starts its workload, becomes another machine; one that cannot boot ends."""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from component.guest_machine import GuestMachine, booted, soon, started
from forktree_agent.engine.contract import Command, CommandRefused, MachineGone
from forktree_agent.engine.microvm.guest import Identity
from forktree_agent.engine.microvm.guest_line import GuestError
from forktree_dev.images import guest_directory
from forktree_dev.images.initrd import initrd
from forktree_dev.images.kernel import kernel

pytestmark = pytest.mark.asyncio(loop_scope="module")

WORKLOAD = (
    "echo begun; echo $LEVEL >&2; i=0; while true; do i=$((i+1)); echo $i > /tmp/beat; usleep 20000; done"
)
YEAR_2030_NS = 1_893_456_000_000_000_000


def identity(**changes: object) -> Identity:
    fields: dict[str, object] = {
        "generation": str(uuid.uuid4()),
        "hostname": "branch-3",
        "unix_ns": YEAR_2030_NS,
        "entropy": os.urandom(32),
        "env": {"FORKTREE_SEED": "it's 7"},
    }
    return Identity(**fields | changes)  # type: ignore[arg-type]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def guest(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[GuestMachine]:
    """One guest, through whose life the tests go in order."""
    async with booted(tmp_path_factory.mktemp("guest")) as machine:
        yield machine


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def two_cpus(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[GuestMachine]:
    async with booted(tmp_path_factory.mktemp("two-cpus"), vcpus=2) as machine:
        yield machine


async def test_the_workload_runs_in_its_environment_and_so_do_commands(guest: GuestMachine) -> None:
    await guest.channel.start_workload(("sh", "-c", WORKLOAD), {"LEVEL": "3"}, deadline=soon())
    await guest.sh("while [ ! -e /tmp/beat ]; do usleep 10000; done")
    assert await guest.sh("echo $LEVEL; cat /run/forktree/workload.log") == "3\nbegun\n3\n"
    assert await guest.sh("grep -c . /sys/fs/cgroup/workload/cgroup.procs") != "0\n"
    assert guest.channel.workload_exit is None


async def test_a_refused_identity_leaves_the_machine_who_it_was_and_its_workload_running(
    guest: GuestMachine,
) -> None:
    for bad, message in [
        (identity(entropy=b"short"), "32 bytes"),
        (identity(hostname="x" * 65), "host name"),
    ]:
        guest.channel.queue_identity(bad)
        with pytest.raises(GuestError, match=message):
            await guest.channel.identified(bad.generation, deadline=soon())
    await beats(guest)


async def test_an_identity_changes_everything_that_tells_machines_apart(guest: GuestMachine) -> None:
    command = Command(
        argv=("sh", "-c", "while [ ! -e /tmp/go ]; do usleep 10000; done; echo heard"), id="carried"
    )
    before = asyncio.create_task(
        guest.channel.exec(command, guest.generation, deadline=soon()), name="before"
    )
    await guest.sh("true")  # The one before has begun by now: requests are taken in order.
    new = identity()
    guest.channel.queue_identity(new)
    await guest.channel.identified(new.generation, deadline=soon())
    old, guest.generation = guest.generation, new.generation

    assert await guest.sh("hostname; date +%Y; echo $FORKTREE_SEED $LEVEL $FORKTREE_GENERATION") == (
        f"branch-3\n2030\nit's 7 3 {new.generation}\n"
    )
    assert await guest.sh(
        ". /run/forktree/identity; echo $FORKTREE_HOSTNAME $FORKTREE_SEED $FORKTREE_GENERATION"
    ) == (f"branch-3 it's 7 {new.generation}\n")
    with pytest.raises(GuestError, match="not the one it was taken for"):
        await guest.channel.exec(Command(argv=("true",)), old, deadline=soon())
    # The command of before goes on under the new identity. Who asked for it asked the machine of before.
    await guest.sh("touch /tmp/go")
    await beats(guest)
    assert not before.done()
    before.cancel()


async def test_a_second_identity_keeps_what_the_first_one_told_and_it_does_not(guest: GuestMachine) -> None:
    new = identity(env={"BRANCH": "b", "FORKTREE_SEED": "8"})
    guest.channel.queue_identity(new)
    await guest.channel.identified(new.generation, deadline=soon())
    guest.generation = new.generation
    again = identity(env={"FORKTREE_SEED": "9"})
    guest.channel.queue_identity(again)
    await guest.channel.identified(again.generation, deadline=soon())
    guest.generation = again.generation
    assert await guest.sh("echo $BRANCH $FORKTREE_SEED; grep -c BRANCH= /run/forktree/identity") == "b 9\n1\n"


async def take_on(guest: GuestMachine, new: Identity) -> None:
    guest.channel.queue_identity(new)
    await guest.channel.identified(new.generation, deadline=soon())
    guest.generation = new.generation


async def test_the_identity_file_is_whole_whatever_was_done_to_it(guest: GuestMachine) -> None:
    show = "cut -d= -f1 /run/forktree/identity | tr '\\n' ' '"
    await take_on(guest, identity(env={"LONG": "x" * 5000}))
    told = await guest.sh(show)
    await take_on(guest, identity(env={"LONG": "", "FORKTREE_SEED": ""}))
    assert await guest.sh(show) == told  # No tail of the longer one before is left.
    await guest.sh("rm -r /run/forktree")
    await take_on(guest, identity())
    assert await guest.sh(show) == told
    # What a program fills up must not keep its machine from becoming another.
    await guest.exec("sh", "-c", "cat /dev/zero > /run/full")
    await take_on(guest, identity(env={"LONG": "y"}))
    assert await guest.sh(f"{show}; rm /run/full; grep LONG /run/forktree/identity") == f"{told}LONG='y'\n"


SEEN_HALF = """
while read -r before < /proc/sys/kernel/hostname; do
    . /run/forktree/identity
    read -r after < /proc/sys/kernel/hostname
    [ "$before" != "$after" ] || [ "$FORKTREE_HOSTNAME" = "$after" ] || echo "$FORKTREE_HOSTNAME in $after"
    [ ! -e /tmp/enough ] || break
done > /tmp/halves
touch /tmp/over
"""


async def test_no_program_runs_while_its_machine_becomes_another(guest: GuestMachine) -> None:
    await take_on(guest, identity(hostname="first"))
    watching = asyncio.create_task(guest.sh(SEEN_HALF), name="watching")
    await guest.sh("true")  # The one before has begun by now: requests are taken in order.
    for turn in range(40):
        await take_on(guest, identity(hostname=f"turn-{turn}"))
    await guest.sh("touch /tmp/enough; while [ ! -e /tmp/over ]; do usleep 10000; done")
    assert await guest.sh("cat /tmp/halves") == ""
    watching.cancel()  # It asked the machine of before.


@pytest.mark.parametrize("stopped", [True, False], ids=["stopped before", "running"])
async def test_with_two_cpus_no_program_runs_either(two_cpus: GuestMachine, *, stopped: bool) -> None:
    guest = two_cpus
    await take_on(guest, identity(hostname="first"))
    await guest.sh("rm -f /tmp/enough /tmp/over* /tmp/halves*")
    scripts = [SEEN_HALF.replace("halves", f"halves-{i}").replace("over", f"over-{i}") for i in range(3)]
    watching = [asyncio.create_task(guest.sh(script), name="watching") for script in scripts]
    await guest.sh("true")
    for turn in range(40):
        if stopped:
            await guest.channel.asking.freeze(deadline=soon())
        await take_on(guest, identity(hostname=f"turn-{turn}"))
    over = "[ -e /tmp/over-0 ] && [ -e /tmp/over-1 ] && [ -e /tmp/over-2 ]"
    await guest.sh(f"touch /tmp/enough; until {over}; do usleep 10000; done")
    assert await guest.sh("cat /tmp/halves*") == ""
    for each in watching:
        each.cancel()


async def test_programs_that_were_stopped_start_with_the_machine(two_cpus: GuestMachine) -> None:
    guest = two_cpus
    await guest.channel.asking.freeze(deadline=soon())
    await guest.channel.asking.freeze(deadline=soon())  # Again: they stand still, which is what was wanted.
    held = asyncio.create_task(guest.sh("echo goes on"), name="held")
    for _ in range(20):
        await guest.channel.asking.ping(deadline=soon())  # Init has taken the command long ago.
    assert not held.done()
    await guest.channel.asking.thawed(guest.channel.asking.queue_thaw(), deadline=soon())
    assert await held == "goes on\n"
    await guest.channel.asking.thawed(guest.channel.asking.queue_thaw(), deadline=soon())


async def test_a_machine_that_stood_still_is_told_the_time(guest: GuestMachine) -> None:
    guest.channel.set_clock(YEAR_2030_NS * 2)
    assert await guest.sh("date +%Y") == "2090\n"


async def test_an_identity_is_taken_on_under_load(guest: GuestMachine) -> None:
    busy = asyncio.create_task(
        guest.exec(
            "sh", "-c", "for i in 1 2 3 4 5 6; do while true; do :; done & done; yes", seconds=20, limit=1000
        ),
        name="busy",
    )
    await guest.sh("while [ $(grep -c . /sys/fs/cgroup/workload/cgroup.procs) -lt 7 ]; do usleep 1000; done")
    new = identity(hostname="busy-0")
    guest.channel.queue_identity(new)
    await guest.channel.identified(new.generation, deadline=soon())
    guest.generation = new.generation
    assert await guest.sh("hostname") == "busy-0\n"
    busy.cancel()
    await guest.exec("killall", "-9", "yes", "sh")


async def test_the_end_of_the_workload_is_told(guest: GuestMachine) -> None:
    await guest.channel.asking.ping(deadline=soon())
    assert guest.channel.workload_exit is not None  # Killed at the end of the test before.
    assert (guest.channel.workload_exit.code, guest.channel.workload_exit.signal) == (137, 9)


async def beats(guest: GuestMachine) -> None:
    """The workload runs: its counter moves on."""
    await guest.sh('old=$(cat /tmp/beat); while [ "$(cat /tmp/beat)" = "$old" ]; do usleep 5000; done')


async def test_without_a_command_only_the_environment_is_set_and_only_once(tmp_path: Path) -> None:
    async with booted(tmp_path) as machine:
        await machine.channel.start_workload((), {"LEVEL": "4"}, deadline=soon())
        assert await machine.sh("echo $LEVEL; ls /run/forktree/*; cat /run/forktree/identity") == (
            "4\n/run/forktree/identity\n\n"
        )
        with pytest.raises(CommandRefused, match="started already"):
            await machine.channel.start_workload(("true",), {}, deadline=soon())


async def test_a_workload_that_cannot_run_is_refused_and_a_noisy_one_has_a_bounded_log(
    tmp_path: Path,
) -> None:
    async with booted(tmp_path) as machine:
        with pytest.raises(CommandRefused, match="no program"):
            await machine.channel.start_workload(("no-such-program",), {}, deadline=soon())
    async with booted(tmp_path) as machine:
        noisy = ("sh", "-c", "yes | head -c 3500000; echo last; exit 3")
        await machine.channel.start_workload(noisy, {}, deadline=soon())
        await machine.sh("while ! grep -qs last /run/forktree/workload.log; do usleep 10000; done")
        sizes = [int(size) for size in (await machine.sh("stat -c %s /run/forktree/workload.log*")).split()]
        assert len(sizes) == 2
        assert max(sizes) <= 1 << 20
        deadline = soon()
        while machine.channel.workload_exit is None:  # It ends some time after its last words.
            await machine.channel.asking.ping(deadline=deadline)
        assert machine.channel.workload_exit.code == 3


async def test_a_machine_that_cannot_boot_says_why_on_its_console_and_ends(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.write_bytes(bytes(1 << 20))
    guest = await asyncio.to_thread(guest_directory, ["tiny"])
    async with started(tmp_path, guest, disk) as (channel, console, process):
        with pytest.raises(MachineGone, match="ended"):
            await channel.wait_booted(deadline=soon())
        assert await asyncio.to_thread(process.wait, 20) == 0
        assert "forktree-init: mount the root disk: Invalid argument" in console.read_text(errors="replace")


@pytest.mark.parametrize("missing", ["tcp_diag.ko", "udp_diag.ko"])
async def test_a_kernel_that_could_not_end_connections_at_a_fork_does_not_boot(
    tmp_path: Path, missing: str
) -> None:
    whole = await asyncio.to_thread(kernel)
    modules = tuple(module for module in whole.modules if module.name != missing)
    assert len(modules) == len(whole.modules) - 1
    (tmp_path / "vmlinux").symlink_to(whole.vmlinux)
    (tmp_path / "initrd").symlink_to(await asyncio.to_thread(initrd, replace(whole, modules=modules)))
    guest = await asyncio.to_thread(guest_directory, ["tiny"])
    async with started(tmp_path, tmp_path, guest / "images" / "tiny.erofs") as (channel, console, process):
        with pytest.raises(MachineGone, match="ended"):
            await channel.wait_booted(deadline=soon())
        assert await asyncio.to_thread(process.wait, 20) == 0
        said = console.read_text(errors="replace")
        assert "forktree-init: end connections to the outside, as every fork has to" in said
