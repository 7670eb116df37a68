"""Who is in charge, what survives whom, and what an agent that lies, floods, sleeps or vanishes cannot do."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import socket
import struct
import sys
from collections.abc import AsyncGenerator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from component.keeper_fixtures import KeeperProcess, keeper_process, next_exit, soon, start_machine
from forktree_agent.keeper_client import (
    Channel,
    ChannelType,
    Code,
    Keeper,
    KeeperError,
    KeeperGone,
    StaleEpoch,
)
from forktree_keeper.protocol import MAX_MESSAGE_BYTES, VERSION, receive_packet, send_packet
from forktree_keeper.server import MAX_CONNECTIONS

CHANNEL = Channel("c", ChannelType.STREAM)
SLEEP = ["/bin/sleep", "1000"]


@pytest.fixture
async def process(tmp_path: Path) -> AsyncGenerator[KeeperProcess]:
    async with keeper_process(tmp_path / "state", f"ft-test-{os.getpid()}") as process:
        yield process


class RawAgent:
    """A connection on which a test may say anything."""

    def __init__(self, path: Path) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.settimeout(20)
        self.sock.connect(str(path))

    def __enter__(self) -> RawAgent:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()

    def say(self, packet: object, files: list[int] | None = None) -> None:
        send_packet(self.sock, json.dumps(packet).encode(), files or [])

    def hear(self) -> dict[str, Any]:
        """The next packet; empty when the keeper has closed."""
        data, files = receive_packet(self.sock)
        for file in files:
            os.close(file)
        heard: dict[str, Any] = json.loads(data) if data else {}
        return heard

    def hello(self) -> int:
        self.say({"id": 0, "op": "hello", "body": {"version": VERSION}})
        epoch: int = self.hear()["result"]["epoch"]
        return epoch

    def list_files(self) -> object:
        self.say({"id": 0, "op": "list_files", "body": {"after": ""}})
        return self.hear()["result"]


async def healthy(process: KeeperProcess) -> int:
    """The keeper serves the next agent as if nothing had been. Tells its descriptors with that connection."""
    async with Keeper.connected(process.socket_path, deadline=soon()) as keeper:
        await start_machine(keeper, "healthy", SLEEP)
        await keeper.kill("healthy", deadline=soon())
        await keeper.forget("healthy", deadline=soon())
        return process.descriptors()  # By now it has seen every earlier connection go.


async def test_the_greeting_tells_epoch_and_boot(process: KeeperProcess) -> None:
    async with Keeper.connected(process.socket_path, deadline=soon()) as first:
        assert first.boot_id == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    async with Keeper.connected(process.socket_path, deadline=soon()) as second:
        assert second.epoch == first.epoch + 1


async def test_nobody_but_its_own_user_may_connect(process: KeeperProcess) -> None:
    assert process.socket_path.stat().st_mode & 0o777 == 0o600
    assert process.state_dir.stat().st_mode & 0o777 == 0o700


async def test_a_newer_agent_takes_charge_and_the_older_one_is_told(process: KeeperProcess) -> None:
    async with Keeper.connected(process.socket_path, deadline=soon()) as older:
        waiting = asyncio.create_task(next_exit(older))
        async with Keeper.connected(process.socket_path, deadline=soon()) as newer:
            with pytest.raises(StaleEpoch):
                await waiting
            with pytest.raises(StaleEpoch):
                await older.listing(deadline=soon())
            assert (await newer.listing(deadline=soon())).machines == ()


async def test_an_older_connection_is_refused_and_closed_even_if_it_says_hello_again(
    process: KeeperProcess,
) -> None:
    with RawAgent(process.socket_path) as older, RawAgent(process.socket_path) as newer:
        older.hello()
        newer.hello()
        assert older.hear()["failure"]["code"] == Code.STALE_EPOCH  # Told at once, unasked.
        older.say({"id": 5, "op": "hello", "body": {"version": VERSION}})
        answer = older.hear()
        assert (answer["id"], answer["failure"]["code"]) == (5, Code.STALE_EPOCH)
        assert older.hear() == {}
        assert newer.list_files() == {"names": [], "more": False}


async def test_exits_go_to_the_agent_in_charge(process: KeeperProcess) -> None:
    async with Keeper.connected(process.socket_path, deadline=soon()) as older:
        started = await start_machine(older, "m", SLEEP)
        async with Keeper.connected(process.socket_path, deadline=soon()) as newer:
            os.kill(started.pid, signal.SIGKILL)
            assert (await next_exit(newer)).machine == "m"


AGENT = """
import asyncio, os, sys
from pathlib import Path
from forktree_agent.keeper_client import Channel, ChannelType, Keeper

async def main():
    deadline = asyncio.get_running_loop().time() + 20
    async with Keeper.connected(Path(sys.argv[1]), deadline=deadline) as keeper:
        started = await keeper.start(
            "m", ["/bin/sh", "-c", "cat <&3 >&3"], env={"PATH": "/usr/bin:/bin"}, uid=64201, gid=64201,
            cgroup="tree", network_namespace=True, channels=[Channel("c", ChannelType.STREAM)],
            deadline=deadline)
        layer = os.memfd_create("layer")
        os.write(layer, b"pages")
        await keeper.hold("layer", layer, deadline=deadline)
        print(started.pid, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_a_killed_agent_takes_nothing_with_it(process: KeeperProcess) -> None:
    agent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", AGENT, str(process.socket_path), stdout=asyncio.subprocess.PIPE
    )
    assert agent.stdout is not None
    pid = int(await agent.stdout.readline())
    agent.kill()
    await agent.wait()
    async with Keeper.connected(process.socket_path, deadline=soon()) as keeper:
        listing = await keeper.listing(deadline=soon())
        (entry,) = listing.machines
        assert (entry.machine, entry.pid, entry.cgroup, entry.exit) == ("m", pid, "tree", None)
        assert listing.files == ("layer",)
        lent = (await keeper.lend("m", deadline=soon()))["c"]
        lent.setblocking(False)
        lent.send(b"still there")
        assert await asyncio.get_running_loop().sock_recv(lent, 100) == b"still there"
        lent.close()
        layer = await keeper.lend_file("layer", deadline=soon())
        assert os.pread(layer, 100, 0) == b"pages"
        os.close(layer)


async def test_lent_channels_are_duplicates_that_can_be_closed_and_lent_again(process: KeeperProcess) -> None:
    async with Keeper.connected(process.socket_path, deadline=soon()) as keeper:
        started = await start_machine(keeper, "m", ["/bin/sh", "-c", "cat <&3 >&3"], channels=[CHANNEL])
        started.channels["c"].close()
        for _ in range(3):
            lent = (await keeper.lend("m", deadline=soon()))["c"]
            lent.setblocking(False)
            lent.send(b"again")
            assert await asyncio.get_running_loop().sock_recv(lent, 100) == b"again"
            lent.close()
        with pytest.raises(KeeperError) as raised:
            await keeper.lend("other", deadline=soon())
        assert raised.value.code is Code.NO_SUCH_MACHINE


async def test_an_exit_while_nobody_is_in_charge_is_found_in_the_listing(process: KeeperProcess) -> None:
    async with Keeper.connected(process.socket_path, deadline=soon()) as keeper:
        started = await start_machine(keeper, "m", SLEEP)
    pidfd = os.pidfd_open(started.pid)
    os.kill(started.pid, signal.SIGTERM)
    assert select.select([pidfd], [], [], 20)[0]
    os.close(pidfd)
    async with Keeper.connected(process.socket_path, deadline=soon()) as keeper:
        # It may be reaped after this hello only: then it is an event as well.
        (entry,) = (await keeper.listing(deadline=soon())).machines
        ended = entry.exit or await next_exit(keeper)
        assert ended.text == "killed by signal 15 (SIGTERM)"


async def test_a_killed_keeper_ends_every_machine_and_its_client_knows(process: KeeperProcess) -> None:
    async with Keeper.connected(process.socket_path, deadline=soon()) as keeper:
        argv = ["/bin/sh", "-c", "trap '' TERM INT HUP; while :; do sleep 1000; done"]
        pids = [(await start_machine(keeper, name, argv, cgroup="tree")).pid for name in ("a", "b", "c")]
        pidfds = [os.pidfd_open(pid) for pid in pids]
        await process.kill()
        with pytest.raises(KeeperGone):
            await next_exit(keeper)
        with pytest.raises(KeeperGone):
            await keeper.listing(deadline=soon())
        for pidfd in pidfds:
            assert select.select([pidfd], [], [], 20)[0]
            os.close(pidfd)
        # The shells' own children are nobody's any more: the next keeper ends what it finds in its groups.
    async with (
        keeper_process(process.state_dir, process.cgroup_root) as successor,
        Keeper.connected(successor.socket_path, deadline=soon()) as keeper,
    ):
        assert (await keeper.listing(deadline=soon())).machines == ()


async def test_an_ended_keeper_ends_every_machine_and_leaves_no_socket(process: KeeperProcess) -> None:
    async with Keeper.connected(process.socket_path, deadline=soon()) as keeper:
        started = await start_machine(
            keeper, "m", ["/bin/sh", "-c", "trap '' TERM; sleep 1000"], cgroup="tree"
        )
        process.process.terminate()
        assert await process.process.wait() == 0
        assert not Path(f"/proc/{started.pid}").exists()
        with pytest.raises(KeeperGone):
            await keeper.kill("m", deadline=soon())
    assert not process.socket_path.exists()
    with pytest.raises(KeeperGone):
        async with Keeper.connected(process.socket_path, deadline=soon()):
            pass


async def test_a_second_keeper_does_not_begin(process: KeeperProcess, tmp_path: Path) -> None:
    for state_dir, cgroup_root in (
        (process.state_dir, "ft-test-other"),
        (tmp_path / "b", process.cgroup_root),
    ):
        with pytest.raises(ExceptionGroup) as raised:
            async with keeper_process(state_dir, cgroup_root):
                pass
        assert raised.group_contains(AssertionError, match="another keeper owns")
    await healthy(process)


@pytest.mark.parametrize(
    "garbage",
    [
        b"\xff\x00",
        b"[" * 60_000,
        b"[]",
        b"7",
        b'{"op": "list_files"}',
        b'{"id": "x", "op": "list_files", "body": {}}',
        b'{"id": true, "op": "list_files", "body": {"after": ""}}',
        b'{"id": ' + b"9" * 5000 + b"}",
        b"x" * (MAX_MESSAGE_BYTES + 1),
        b"x" * (MAX_MESSAGE_BYTES + 100_000),
    ],
)
async def test_what_is_no_request_closes_the_connection(process: KeeperProcess, garbage: bytes) -> None:
    before = await healthy(process)
    with RawAgent(process.socket_path) as agent:
        agent.hello()
        agent.sock.sendmsg(
            [garbage], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", agent.sock.fileno()))]
        )
        answer = agent.hear()
        assert (answer["id"], answer["failure"]["code"]) == (None, Code.BAD_MESSAGE)
        assert agent.hear() == {}
    assert await healthy(process) == before


BAD_REQUESTS: list[tuple[str, object]] = [
    ("reboot", {}),
    ("hello", {"version": "1"}),
    ("lend", {}),
    ("lend", {"machine": 7}),
    ("lend", {"machine": "m", "also": 1}),
    ("lend", []),
    ("drop", {"names": "abc"}),
    ("limit_cgroup", {"cgroup": "../../x", "memory_bytes": 1}),
    ("limit_cgroup", {"cgroup": "x", "memory_bytes": -1}),
    ("limit_cgroup", {"cgroup": "x", "memory_bytes": 1.5}),
    ("drop_cgroup", {"cgroup": ""}),
    ("drop_cgroup", {"cgroup": "."}),
]

GOOD_START: dict[str, object] = {
    "machine": "m",
    "argv": ["/bin/true"],
    "env": {},
    "uid": 1,
    "gid": 1,
    "cgroup": None,
    "network_namespace": False,
    "nice": None,
    "channels": [],
    "companion": None,
}

BAD_STARTS: list[dict[str, object]] = [
    {"companion": {"argv": ["passt"], "env": {}}},
    {"companion": {"argv": ["/usr/bin/passt"]}},
    {"companion": "/usr/bin/passt"},
    {"machine": "../m"},
    {"machine": ""},
    {"machine": "x" * 129},
    {"argv": []},
    {"argv": ["true"]},
    {"argv": ["/bin/true", "a\0b"]},
    {"argv": ["/bin/true", "\ud800"]},
    {"env": {"": "x"}},
    {"env": {"A=B": "x"}},
    {"env": {"A": "\0"}},
    {"uid": -1},
    {"uid": 2**32 - 1},
    {"gid": 2**64},
    {"nice": 99},
    {"network_namespace": 1},
    {"channels": [{"name": "c", "type": "datagram"}]},
    {"channels": [{"name": "c", "type": "stream"}] * 2},
    {"channels": [{"name": f"c{i}", "type": "stream"} for i in range(17)]},
]


async def test_a_request_that_makes_no_sense_is_refused_and_the_connection_lives(
    process: KeeperProcess,
) -> None:
    requests = BAD_REQUESTS + [("start", GOOD_START | wrong) for wrong in BAD_STARTS]
    with RawAgent(process.socket_path) as agent:
        agent.hello()
        before = process.descriptors()
        for number, (operation, body) in enumerate(requests, start=1):
            agent.say({"id": number, "op": operation, "body": body}, [agent.sock.fileno()])
            answer = agent.hear()
            assert (answer["id"], answer["failure"]["code"]) == (number, Code.BAD_REQUEST), (operation, body)
        agent.list_files()  # The descriptors of a packet are closed after it was answered, before the next.
        assert process.descriptors() == before


async def test_wrong_descriptors_are_refused_and_closed(process: KeeperProcess) -> None:
    with RawAgent(process.socket_path) as agent:
        agent.hello()
        before = process.descriptors()
        own = agent.sock.fileno()
        for operation, body, files in [
            ("hold", {"name": "f"}, []),
            ("hold", {"name": "f"}, [own] * 2),
            ("hold", {"name": "f"}, [own] * 253),
            ("list_files", {"after": ""}, [own]),
            ("kill", {"machine": "m"}, [own] * 253),
        ]:
            agent.say({"id": 1, "op": operation, "body": body}, files)
            assert agent.hear()["failure"]["code"] == Code.BAD_REQUEST
        agent.list_files()
        assert process.descriptors() == before


async def test_nothing_is_done_before_hello_nor_in_another_version(process: KeeperProcess) -> None:
    with RawAgent(process.socket_path) as agent:
        agent.say({"id": 1, "op": "list_files", "body": {"after": ""}})
        assert agent.hear()["failure"]["code"] == Code.NOT_IN_CHARGE
        assert agent.hear() == {}
    with RawAgent(process.socket_path) as agent:
        agent.say({"id": 1, "op": "hello", "body": {"version": VERSION + 1}})
        assert agent.hear()["failure"]["code"] == Code.VERSION_MISMATCH
        assert agent.hello() == 1  # The other one did not count.


async def test_an_agent_that_vanishes_at_any_moment_leaves_no_descriptor(process: KeeperProcess) -> None:
    before = await healthy(process)
    for number in range(30):
        with RawAgent(process.socket_path) as agent:
            agent.hello()
            body = GOOD_START | {
                "machine": f"m{number}",
                "argv": SLEEP if number % 2 else ["/nonexistent"],
                "channels": [{"name": "c", "type": "stream"}],
            }
            agent.say({"id": 1, "op": "start", "body": body}, [agent.sock.fileno()] * 100)
            agent.say({"id": 2, "op": "kill", "body": {"machine": f"m{number}"}})
    async with Keeper.connected(process.socket_path, deadline=soon()) as keeper:
        for entry in (await keeper.listing(deadline=soon())).machines:
            await keeper.kill(entry.machine, deadline=soon())
            await keeper.forget(entry.machine, deadline=soon())
    assert await healthy(process) == before


async def test_a_failed_start_whose_agent_has_gone_is_told_to_the_next(process: KeeperProcess) -> None:
    with RawAgent(process.socket_path) as agent:
        agent.hello()
        agent.say({"id": 1, "op": "start", "body": GOOD_START | {"argv": ["/nonexistent"]}})
    async with Keeper.connected(process.socket_path, deadline=soon()) as keeper:
        (entry,) = (await keeper.listing(deadline=soon())).machines
        ended = entry.exit or await next_exit(keeper)
        assert ended.text == "cannot execute /nonexistent: No such file or directory"


async def test_who_does_not_read_loses_the_connection_and_can_list_again(process: KeeperProcess) -> None:
    with RawAgent(process.socket_path) as agent:
        agent.hello()
        agent.sock.setblocking(False)
        # Requests alone cannot do it: who does not read is not read from.
        with pytest.raises(BlockingIOError):
            while True:
                agent.say({"id": 1, "op": "list_files", "body": {"after": ""}})
        agent.sock.settimeout(20)
        while agent.hear():
            if not select.select([agent.sock], [], [], 0.5)[0]:
                break
    await healthy(process)


async def test_idle_connections_cannot_lock_a_new_agent_out(process: KeeperProcess) -> None:
    before = await healthy(process)
    agents = [RawAgent(process.socket_path) for _ in range(MAX_CONNECTIONS * 2)]
    assert await healthy(process) < before + MAX_CONNECTIONS
    for agent in agents:
        agent.sock.close()
    await healthy(process)


async def test_a_deadline_or_a_cancellation_leaves_the_client_usable(process: KeeperProcess) -> None:
    async with Keeper.connected(process.socket_path, deadline=soon()) as keeper:
        started = await start_machine(keeper, "m", SLEEP, channels=[CHANNEL])
        own = len(list(Path("/proc/self/fd").iterdir()))
        with pytest.raises(TimeoutError):
            await keeper.lend("m", deadline=0.0)
        for turns in range(5):
            lending = asyncio.create_task(keeper.lend("m", deadline=soon()))
            for _ in range(turns):
                await asyncio.sleep(0)
            lending.cancel()
            with suppress(asyncio.CancelledError):
                (await lending)["c"].close()  # It may have been faster.
        await keeper.listing(deadline=soon())  # Whatever was late has come before this answer.
        assert len(list(Path("/proc/self/fd").iterdir())) == own
        started.channels["c"].close()
