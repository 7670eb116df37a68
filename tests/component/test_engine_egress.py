"""Machines that reach the outside: whom they reach, whom they never reach, and what a fork makes of it."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import select
import signal
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from component.keeper_fixtures import KeeperProcess
from component.node import SECONDS, TINY, Node, engine_on, held, settings, soon
from component.outside import ALLOWED, ALLOWED_NETWORK, INSIDE, METADATA, PORT, RESOLVER, keeper_outside
from forktree_agent.engine.contract import BakeFailed, EgressForbidden, Machine, NetworkLost
from forktree_agent.engine.microvm import egress
from forktree_agent.engine.microvm.settings import Egress, EngineSettings
from forktree_agent.engine.microvm.vmms import Vmms
from forktree_agent.keeper_client import Keeper, Started

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]

OPEN = dataclasses.replace(TINY, egress=True)
HELLO = "{{ printf 'GET / HTTP/1.0\\r\\n\\r\\n'; sleep 2; }} | nc -w {seconds} {address} {port} | tail -n 1"
"""Prints what the server says, and nothing where there is none to be reached. The sleep is for Debian 12's
passt, which at times forgets a connection that is closed in one direction while the answer is on its way."""
WALLED_SECONDS = 5
"""Debian 12's passt does not tell a guest that it was refused, which therefore waits as long as it likes."""


def config() -> EngineSettings:
    return settings(images=("tiny",), egress=Egress(allow=(ALLOWED_NETWORK,)))


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def keeper(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[KeeperProcess]:
    folder = tmp_path_factory.mktemp("outside") / "state"
    async with held(keeper_outside(folder, f"forktree-egress-{os.getpid()}")) as process:
        yield process


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def node(keeper: KeeperProcess) -> AsyncGenerator[Node]:
    async with held(engine_on(keeper.socket_path, keeper.state_dir / "journal", config())) as node:
        yield node


async def reaches(node: Node, machine: Machine, address: str, *, seconds: int = 60) -> bool:
    script = HELLO.format(seconds=seconds, address=address, port=PORT)
    result = await node.run(machine, "/bin/sh", "-c", script, timeout_seconds=seconds + 60)
    assert result.stdout in {b"", b"hello\n"}
    return result.stdout == b"hello\n"


def companion_of(uid: int) -> int:
    """The one passt of a user id."""
    (pid,) = [
        int(entry.name)
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit() and _is_passt_of(entry, uid)
    ]
    return pid


def _is_passt_of(process: Path, uid: int) -> bool:
    try:
        command = (process / "cmdline").read_bytes()
        return command.startswith(egress.BINARY.encode()) and process.stat().st_uid == uid
    except OSError:
        return False


async def uid_of(node: Node, machine: Machine) -> int:
    listing = await node.keeper.listing(deadline=soon())
    return next(entry.uid for entry in listing.machines if entry.machine == machine.id)


async def test_a_machine_reaches_what_is_allowed_and_names_and_nothing_of_the_inside(node: Node) -> None:
    root = await node.root(OPEN)
    assert await reaches(node, root, ALLOWED)
    told = await node.sh(root, "nslookup -type=a server.example.org")
    assert ALLOWED in told
    # A server listens on all of these: it is the wall that keeps it from being reached.
    for address in (INSIDE, METADATA, RESOLVER, egress.GATEWAY):
        assert not await reaches(node, root, address, seconds=WALLED_SECONDS), address
    await node.engine.release(root.id)


async def test_a_machine_without_egress_has_no_network_device(node: Node) -> None:
    root = await node.root(TINY)
    assert await node.sh(root, "ls /sys/class/net") == "lo\n"
    await node.engine.release(root.id)


async def test_a_parents_connection_goes_on_and_each_child_makes_its_own(node: Node) -> None:
    parent = await node.root(OPEN)
    await node.sh(
        parent,
        f"mkfifo /tmp/said; sleep 10000 > /tmp/said & (nc {ALLOWED} {PORT} < /tmp/said > /tmp/heard;"
        " echo ended >> /tmp/heard) > /dev/null 2>&1 & echo one > /tmp/said;"
        " until grep -q one /tmp/heard; do sleep 0.1; done",
    )
    children = (await node.fork(parent, 2)).children
    for child in children:
        await node.sh(child, "until grep -q ended /tmp/heard; do sleep 0.1; done")
        assert await reaches(node, child, ALLOWED)
    after = await node.sh(
        parent, "echo two > /tmp/said; until grep -q two /tmp/heard; do sleep 0.1; done; cat /tmp/heard"
    )
    assert after == "hello\none\ntwo\n"
    # What one of them sends to all of its network comes to nobody: each wire has one end.
    received, sent = (f"cat /sys/class/net/eth0/statistics/{way}_packets" for way in ("rx", "tx"))
    before = await node.sh(children[1], received)
    tell_all = "for host in 4 5 6 7; do arping -c 1 -w 1 -I eth0 198.18.0.$host > /dev/null; done"
    counts = await node.sh(children[0], f"{sent}; {tell_all}; {sent}")
    first, last = map(int, counts.split())
    assert last - first >= 4
    assert await reaches(node, children[0], ALLOWED)
    assert await node.sh(children[1], received) == before
    for machine in (parent, *children):
        await node.engine.release(machine.id)


async def test_a_lost_passt_is_told_and_the_machine_runs_on(node: Node) -> None:
    root = await node.root(OPEN)
    os.kill(companion_of(await uid_of(node, root)), signal.SIGKILL)
    async with asyncio.timeout(SECONDS):
        lost = await anext(aiter(node.engine.exits()))
    assert lost == NetworkLost(machine=root.id, owner=root.owner, text="killed by signal 9 (SIGKILL)")
    assert await node.sh(root, "echo here") == "here\n"
    assert not await reaches(node, root, ALLOWED, seconds=WALLED_SECONDS)
    (child,) = (await node.fork(root)).children  # With a passt of its own.
    assert await reaches(node, child, ALLOWED)
    for machine in (root, child):
        await node.engine.release(machine.id)


@pytest.mark.parametrize("early", [False, True], ids=["told-after", "told-before"])
async def test_nothing_is_baked_with_a_passt_that_ends_at_once(
    node: Node, monkeypatch: pytest.MonkeyPatch, *, early: bool
) -> None:
    """Early: its end is known before the machine that was started is."""
    start, lose, lost = Keeper.start, Vmms.lose_network, asyncio.Event()

    def lose_network(vmms: Vmms, name: str, text: str) -> None:
        lose(vmms, name, text)
        lost.set()

    async def start_late(*arguments: Any, **options: Any) -> Started:
        started = await start(*arguments, **options)
        async with asyncio.timeout(SECONDS):
            await lost.wait()
        return started

    monkeypatch.setattr(egress, "BINARY", "/bin/false")
    monkeypatch.setattr(Vmms, "lose_network", lose_network)
    if early:
        monkeypatch.setattr(Keeper, "start", start_late)
    shape = dataclasses.replace(OPEN, env=(("EARLY", str(early)),))
    with pytest.raises(BakeFailed, match="lost its way to the outside: exited with code 1"):
        await node.engine.bake(shape, deadline=soon())
    assert lost.is_set()


async def test_none_is_kept_ready_whose_passt_ended_while_it_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lose, lost = Vmms.lose_network, asyncio.Event()

    def lose_network(vmms: Vmms, name: str, text: str) -> None:
        lose(vmms, name, text)
        lost.set()

    ahead = settings(images=("tiny",), egress=Egress(), ahead=True)
    async with (
        keeper_outside(tmp_path / "state", f"forktree-ahead-{os.getpid()}") as keeper,
        engine_on(keeper.socket_path, keeper.state_dir / "journal", ahead) as node,
    ):
        baseline = await node.baseline(OPEN)
        monkeypatch.setattr(egress, "BINARY", "/bin/false")
        monkeypatch.setattr(Vmms, "lose_network", lose_network)
        node.engine.keep_ready(baseline.id, 1)
        async with asyncio.timeout(SECONDS):
            await lost.wait()
            while (await node.keeper.listing(deadline=soon())).machines:
                assert not node.engine.in_wait()


async def test_an_agent_that_takes_over_finds_networks_as_they_are_and_keeps_to_its_own_orders(
    tmp_path: Path,
) -> None:
    async with keeper_outside(tmp_path / "state", f"forktree-crash-{os.getpid()}") as keeper:
        journal = keeper.state_dir / "journal"
        async with engine_on(keeper.socket_path, journal, config()) as node:
            root = await node.root(OPEN)
            (child,) = (await node.fork(root)).children
            childs_passt = companion_of(await uid_of(node, child))
        ended = os.pidfd_open(childs_passt)
        signal.pidfd_send_signal(ended, signal.SIGKILL)  # While there is no agent.
        await asyncio.to_thread(select.select, [ended], [], [], SECONDS)
        os.close(ended)
        async with engine_on(keeper.socket_path, journal, config()) as node:
            async with asyncio.timeout(SECONDS):
                told = await anext(aiter(node.engine.exits()))
            assert told == NetworkLost(
                machine=child.id, owner=child.owner, text="killed by signal 9 (SIGKILL)"
            )
            assert await reaches(node, root, ALLOWED)
        # One that lets nobody out neither bakes nor forks what would get out.
        off = dataclasses.replace(config(), egress=None)
        async with engine_on(keeper.socket_path, journal, off) as node:
            with pytest.raises(EgressForbidden, match="start its agent with --egress"):
                await node.engine.bake(dataclasses.replace(OPEN, env=(("A", "1"),)), deadline=soon())
            with pytest.raises(EgressForbidden):
                await node.fork(root)
            assert await node.sh(root, "echo here") == "here\n"
        everybody = processes_of(keeper.pid)
        await keeper.kill()
        await asyncio.to_thread(gone, everybody)


def processes_of(keeper: int) -> list[int]:
    """The keeper's machines and companions, as descriptors that become readable when they end."""
    pids = Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split()
    assert len(pids) == 3  # Two machines, and one passt of two.
    return [os.pidfd_open(int(pid)) for pid in pids]


def gone(pidfds: list[int]) -> None:
    left = set(pidfds)
    while left:
        readable, _, _ = select.select(list(left), [], [], SECONDS)
        assert readable
        left -= set(readable)
    for pidfd in pidfds:
        os.close(pidfd)
