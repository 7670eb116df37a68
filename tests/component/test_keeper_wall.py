"""The keeper's wall and the companions behind it: real processes and the kernel's own packet filter."""

from __future__ import annotations

import asyncio
import os
import select
import subprocess
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path

import pytest

from component.keeper_fixtures import MACHINE_UID, KeeperProcess, soon, start_machine
from component.outside import ALLOWED, ALLOWED_NETWORK, INSIDE, METADATA, OWN, PORT, RESOLVER, keeper_outside
from forktree_agent.keeper_client import Code, Companion, CompanionExit, Exit, Keeper, KeeperError
from forktree_keeper.protocol import RaiseWall
from forktree_keeper.wall import INSIDE_4, Wall, WallFailed, resolvers, ruleset, table_name

SLEEP = Companion(argv=("/bin/sleep", "1000"), env={})
MACHINE = ["/bin/sleep", "1000"]
REFUSED = {"OSError 113", "PermissionError 13"}
"""EHOSTUNREACH and EACCES, as versions 4 and 6 of the protocol say it."""
CONNECT = """
import socket, sys
try:
    with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=20) as made:
        made.sendall(b"GET / HTTP/1.0\\r\\n\\r\\n")
        print(made.makefile().read().split()[-1])
except OSError as error:
    print(type(error).__name__, error.errno)
"""


@pytest.fixture
async def process(tmp_path: Path) -> AsyncGenerator[KeeperProcess]:
    async with keeper_outside(tmp_path / "state", f"ft-wall-{os.getpid()}") as process:
        yield process


@pytest.fixture
async def keeper(process: KeeperProcess) -> AsyncGenerator[Keeper]:
    async with Keeper.connected(process.socket_path, deadline=soon()) as keeper:
        yield keeper


async def raise_wall(keeper: Keeper, *, uids: int = 10, deny: tuple[str, ...] = ()) -> None:
    await keeper.raise_wall(
        first_uid=MACHINE_UID, uids=uids, allow=[ALLOWED_NETWORK], deny=deny, deadline=soon()
    )


def connects(process: KeeperProcess, address: str, uid: int = MACHINE_UID, port: int = PORT) -> str:
    """What a process with this user id hears from there, in the keeper's network."""
    inside = ("nsenter", "--net", "--target", str(process.pid), "--")
    as_user = ("setpriv", "--reuid", str(uid), "--clear-groups", "--")
    command = [*inside, *as_user, "/usr/bin/python3", "-c", CONNECT, address, str(port)]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout.strip()


def tables(process: KeeperProcess, *command: str) -> str:
    inside = ("nsenter", "--net", "--target", str(process.pid), "--", "nft")
    return subprocess.run([*inside, *command], check=True, capture_output=True, text=True).stdout


def children(process: KeeperProcess) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


async def test_behind_the_wall_only_what_is_allowed_is_reached(
    process: KeeperProcess, keeper: Keeper
) -> None:
    everywhere = (ALLOWED, INSIDE, OWN, METADATA, RESOLVER, "127.0.0.1")
    assert [connects(process, each) for each in everywhere] == ["hello"] * 6
    await raise_wall(keeper, deny=("203.0.114.0/24",))
    assert connects(process, ALLOWED) == "hello"
    for address in (
        INSIDE,
        OWN,
        METADATA,
        RESOLVER,
        "127.0.0.1",
        "172.16.3.4",
        "203.0.114.9",
        "::1",
        "fd00::7",
    ):
        assert connects(process, address) in REFUSED, address
    # Who is not behind it is not kept from anything.
    assert connects(process, INSIDE, uid=MACHINE_UID + 10) == "hello"


async def test_behind_the_wall_nothing_of_the_internet_is_reached_by_version_6(
    process: KeeperProcess, keeper: Keeper
) -> None:
    await keeper.raise_wall(
        first_uid=MACHINE_UID, uids=10, allow=["2001:db8:1::/48"], deny=[], deadline=soon()
    )
    refused = "PermissionError 13"
    assert connects(process, "2606:4700:4700::1111") == refused
    # These only find nobody there.
    assert connects(process, "2606:4700:4700::1111", uid=MACHINE_UID + 10) != refused
    assert connects(process, "2001:db8:1::7") != refused


async def test_the_wall_is_put_up_again_when_somebody_takes_it_away(
    process: KeeperProcess, keeper: Keeper
) -> None:
    await raise_wall(keeper)
    before = tables(process, "list", "ruleset")
    tables(process, "flush", "ruleset")
    async with asyncio.timeout_at(soon()):
        while await asyncio.to_thread(tables, process, "list", "ruleset") != before:
            pass
    assert connects(process, INSIDE) in REFUSED


async def test_the_wall_goes_with_its_keeper_and_leaves_other_tables_alone(tmp_path: Path) -> None:
    async with keeper_outside(tmp_path / "state", f"ft-wall-{os.getpid()}") as process:
        network = os.open(f"/proc/{process.pid}/ns/net", os.O_RDONLY)
        tables(process, "add", "table", "inet", "somebody_elses")
        async with Keeper.connected(process.socket_path, deadline=soon()) as keeper:
            await raise_wall(keeper)
    left = subprocess.run(
        ["nsenter", f"--net=/proc/self/fd/{network}", "--", "nft", "list", "tables"],
        check=True,
        capture_output=True,
        text=True,
        pass_fds=[network],
    ).stdout
    os.close(network)
    assert left == "table inet somebody_elses\n"


async def test_no_companion_is_started_without_a_wall_that_its_user_id_is_behind(keeper: Keeper) -> None:
    with pytest.raises(KeeperError, match="no wall is up that user id") as refused:
        await start_machine(keeper, "m", MACHINE, companion=SLEEP)
    assert refused.value.code is Code.WALL_FAILED
    await keeper.raise_wall(first_uid=MACHINE_UID + 1, uids=5, allow=[], deny=[], deadline=soon())
    with pytest.raises(KeeperError, match="no wall is up that user id"):
        await start_machine(keeper, "m", MACHINE, companion=SLEEP)
    assert (await keeper.listing(deadline=soon())).machines == ()


async def test_a_companion_has_the_machines_user_and_group_and_none_of_its_other_descriptors(
    process: KeeperProcess, keeper: Keeper
) -> None:
    await raise_wall(keeper)
    await start_machine(keeper, "m", MACHINE, cgroup="tree-1", network_namespace=True, companion=SLEEP)
    (machine,) = (await keeper.listing(deadline=soon())).machines
    (companion,) = [pid for pid in children(process) if pid != machine.pid]
    proc, other = Path(f"/proc/{companion}"), Path(f"/proc/{machine.pid}")
    assert proc.stat().st_uid == MACHINE_UID
    assert (proc / "cgroup").read_text() == (other / "cgroup").read_text()
    assert (proc / "ns/net").readlink() == Path(f"/proc/{process.pid}/ns/net").readlink()
    assert (other / "ns/net").readlink() != (proc / "ns/net").readlink()
    assert {entry.name for entry in (proc / "fd").iterdir()} == {"0", "1", "2", "3"}
    assert "NoNewPrivs:\t1" in (proc / "status").read_text()
    await keeper.kill("m", deadline=soon())
    assert children(process) == []  # Both are reaped when the kill is answered, so that their group can go.
    await keeper.forget("m", deadline=soon())
    await keeper.drop_cgroup("tree-1", deadline=soon())


async def test_a_companion_that_ends_is_told_and_its_machine_runs_on(
    process: KeeperProcess, keeper: Keeper
) -> None:
    await raise_wall(keeper)
    fails = Companion(argv=("/bin/sh", "-c", "echo no route >&2; exit 3"), env={})
    await start_machine(keeper, "m", MACHINE, companion=fails)
    events = aiter(keeper.exits())
    async with asyncio.timeout_at(soon()):
        assert await anext(events) == CompanionExit("m", "exited with code 3; it said: no route")
    (machine,) = (await keeper.listing(deadline=soon())).machines
    assert (machine.exit, machine.companion_lost) == (None, "exited with code 3; it said: no route")
    absent = Companion(argv=("/usr/bin/no-such-passt",), env={})
    await start_machine(keeper, "n", MACHINE, companion=absent)
    async with asyncio.timeout_at(soon()):
        expected = "cannot execute /usr/bin/no-such-passt: No such file or directory"
        assert await anext(events) == CompanionExit("n", expected)
    for name in ("m", "n"):
        await keeper.kill(name, deadline=soon())
        async with asyncio.timeout_at(soon()):
            assert isinstance(await anext(events), Exit)  # And nothing more of its companion.
        await keeper.forget(name, deadline=soon())
    assert list((process.state_dir / "logs").iterdir()) == []


async def test_a_companion_that_ends_before_its_machine_has_started_is_told_once_it_has(
    process: KeeperProcess, keeper: Keeper
) -> None:
    await raise_wall(keeper)
    events = aiter(keeper.exits())
    for name, program, how in (
        ("m", "/usr/bin/no-such-passt", "cannot execute /usr/bin/no-such-passt: No such file or directory"),
        ("n", "/bin/false", "exited with code 1"),
    ):
        companion = Companion(argv=(program,), env={})
        log = held_back(process, name)
        starting = asyncio.create_task(start_machine(keeper, name, MACHINE, companion=companion))
        told = asyncio.create_task(next_of(events))
        await companion_ended(keeper, name)
        assert not starting.done()
        assert not told.done()  # It could not know whose this is.
        let_go(log)
        await starting
        assert await told == CompanionExit(name, how)
    for name in ("m", "n"):
        await keeper.kill(name, deadline=soon())
        assert isinstance(await next_of(events), Exit)
        await keeper.forget(name, deadline=soon())


async def test_the_companion_of_a_machine_that_cannot_be_started_is_not_told_of(
    process: KeeperProcess, keeper: Keeper
) -> None:
    await raise_wall(keeper)
    events = aiter(keeper.exits())
    log = held_back(process, "m")
    ends = Companion(argv=("/bin/false",), env={})
    starting = asyncio.create_task(start_machine(keeper, "m", ["/no/such/program"], companion=ends))
    await companion_ended(keeper, "m")
    let_go(log)
    with pytest.raises(KeeperError, match="cannot execute /no/such/program"):
        await starting
    await start_machine(keeper, "n", ["/bin/true"])
    told = await next_of(events)
    assert (type(told), told.machine) == (Exit, "n")
    await keeper.forget("n", deadline=soon())


def held_back(process: KeeperProcess, machine: str) -> Path:
    """Makes a machine's log a pipe: its start stands still where it opens that, until `let_go`."""
    log = process.state_dir / "logs" / f"{machine}.log"
    os.mkfifo(log)
    return log


def let_go(log: Path) -> None:
    os.close(os.open(log, os.O_RDONLY | os.O_NONBLOCK))


async def companion_ended(keeper: Keeper, machine: str) -> None:
    """Until the keeper has noticed that. What it told before has been read then."""
    async with asyncio.timeout_at(soon()):
        while True:
            for entry in (await keeper.listing(deadline=soon())).machines:
                if entry.machine == machine and entry.companion_lost is not None:
                    return


async def next_of(events: AsyncIterator[Exit | CompanionExit]) -> Exit | CompanionExit:
    async with asyncio.timeout_at(soon()):
        return await anext(events)


async def test_a_machine_that_cannot_be_started_leaves_no_companion(
    process: KeeperProcess, keeper: Keeper
) -> None:
    await raise_wall(keeper)
    with pytest.raises(KeeperError, match="cannot execute /no/such/program") as failed:
        await start_machine(keeper, "m", ["/no/such/program"], companion=SLEEP)
    assert failed.value.code is Code.START_FAILED
    assert children(process) == []
    assert (await keeper.listing(deadline=soon())).machines == ()
    assert list((process.state_dir / "logs").iterdir()) == []


async def test_companions_end_with_a_keeper_that_is_killed(process: KeeperProcess, keeper: Keeper) -> None:
    await raise_wall(keeper)
    await start_machine(keeper, "m", MACHINE, companion=SLEEP)
    both = [os.pidfd_open(pid) for pid in children(process)]
    assert len(both) == 2
    await process.kill()
    for pidfd in both:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        assert await asyncio.to_thread(poll.poll, 20_000)
        os.close(pidfd)


def test_without_the_means_there_is_no_wall_and_a_sentence_says_why(tmp_path: Path) -> None:
    wanted = RaiseWall(first_uid=1, uids=2, allow=(), deny=())
    wall = Wall("unused", nft=str(tmp_path / "no-nft"))
    with pytest.raises(WallFailed, match="cannot be started: No such file or directory; install nftables"):
        wall.raise_up(wanted)
    assert not wall.holds(1)
    wall.take_down()
    broken = tmp_path / "nft"
    broken.write_text("#!/bin/sh\necho 'netlink: Operation not permitted' >&2\nexit 1\n")
    broken.chmod(0o755)
    wall = Wall("unused", nft=str(broken))
    with pytest.raises(WallFailed, match="cannot be set: netlink: Operation not permitted"):
        wall.raise_up(wanted)
    assert not wall.holds(1)
    wall.take_down()


def test_what_the_wall_is_told() -> None:
    assert table_name("forktree/a-b.c") == "forktree_forktree_a_b_c"
    text = "# made by dhcp\nnameserver 10.0.0.10\nnameserver fe80::1%eth0\nnameserver fd00::a\nsearch a.b\n"
    asked = resolvers(text)
    assert [str(each) for each in asked] == ["10.0.0.10", "fd00::a"]
    wanted = RaiseWall(first_uid=5, uids=3, allow=("10.1.0.0/16", "fd01::/64"), deny=("8.8.8.8",))
    lines = ruleset("t", wanted, asked).splitlines()
    assert lines.index("ip daddr 10.1.0.0/16 accept") < lines.index(
        "ip daddr 8.8.8.8/32 reject with icmpx admin-prohibited"
    )
    assert {f"ip daddr {each} reject with icmpx admin-prohibited" for each in INSIDE_4} < set(lines)
    # Nothing is reached by version 6 but what is asked or allowed, whatever a companion is told to speak.
    assert lines.index("ip6 daddr fd01::/64 accept") < lines.index(
        "meta nfproto ipv6 reject with icmpx admin-prohibited"
    )
    assert "meta skuid 5-7 jump machines" in lines
