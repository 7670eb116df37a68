"""Connections over a fork: what goes on in a child, and what ends there because it is the parent's alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from component.node import Node
from forktree_agent.engine.contract import Machine, Probe, Shape

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]

PROGRAM = (Path(__file__).parent / "linked.py").read_text()
SHAPE = Shape(
    image="builtin:python",
    vcpus=1,
    memory_bytes=192 << 20,
    overlay_bytes=64 << 20,
    command=("python3", "-c", PROGRAM, "serve"),
    probe=Probe(ask=("python3", "-c", PROGRAM, "ask", "talk"), timeout_seconds=60),
)
MANY = 300
"""Pairs of TCP sockets: more than the guest's init takes in at once."""

GOES_ON, ENDED, RESET = "goes on", "ECONNABORTED", "ECONNRESET"


async def ask(node: Node, machine: Machine, *order: str) -> dict[str, str]:
    """What each of the program's connections has come to, by name, once it has done what it is told."""
    result = await node.run(machine, "python3", "-c", PROGRAM, "ask", *order)
    assert result.exit_code == 0, result.stderr.decode()
    answer: dict[str, str] = json.loads(result.stdout)
    return answer


async def test_a_childs_outside_connections_end_and_all_else_goes_on_as_everything_does_in_the_parent(
    node: Node,
) -> None:
    parent = await node.root(SHAPE)
    opened = await ask(node, parent, "open")
    assert len(opened) > 20
    assert {state for name, state in opened.items() if "baked" not in name} == {GOES_ON}
    await ask(node, parent, "hide")  # Nobody at the far end resets what ends here.
    (child,) = (await node.fork(parent)).children
    for machine in (child, parent):
        after = await ask(node, machine, "show")
        expected = {name: ENDED if machine is child and "outside" in name else GOES_ON for name in opened}
        assert after == expected | {name: after[name] for name in opened if "baked" in name}
        welcomed = await ask(node, machine, "accept")
        assert welcomed == dict.fromkeys(("10.9.9.1", "fd09::1", "127.0.0.1", "::1"), "welcome")


async def test_what_a_template_connected_before_it_was_frozen_ends_in_its_roots(node: Node) -> None:
    root = await node.root(SHAPE)
    seen = set((await ask(node, root, "talk")).values())
    # Each end is an outside connection of its own; the first one that is ended may reset the other in time.
    assert {ENDED} <= seen <= {ENDED, RESET}


async def test_two_sockets_of_one_address_both_end(node: Node) -> None:
    parent = await node.root(SHAPE)
    await ask(node, parent, "open-twins")
    (child,) = (await node.fork(parent)).children
    seen = await ask(node, child, "talk")
    assert [seen[f"twin {number} outside"] for number in range(2)] == [ENDED, ENDED]


async def test_a_program_that_waits_to_connect_or_to_send_is_told_too(node: Node) -> None:
    parent = await node.root(SHAPE)
    await ask(node, parent, "open-busy")
    waiting = (
        "grep -q ' 0109090A:.... 02 ' /proc/net/tcp && grep -Eq ' 01 0*[1-9A-F][0-9A-F]*:' /proc/net/tcp"
    )
    await node.sh(parent, f"until {waiting}; do sleep 0.1; done")  # One in SYN_SENT, one with bytes unsent.
    (child,) = (await node.fork(parent)).children
    seen = await ask(node, child, "talk")
    assert seen["connect outside"] == ENDED
    assert seen["send outside"] in {ENDED, RESET}


async def test_however_many_there_are_they_all_end(node: Node) -> None:
    parent = await node.root(SHAPE)
    await ask(node, parent, "open-many", str(MANY))
    (child,) = (await node.fork(parent)).children
    seen = await ask(node, child, "talk")
    assert {seen[f"{number} outside"] for number in range(MANY)} <= {ENDED, RESET}
    table = "grep -c ' 0109090A:.... 01 ' /proc/net/tcp || :"  # Established connections to 10.9.9.1.
    assert await node.sh(child, table) == "0\n"
    assert int(await node.sh(parent, table)) == 2 * MANY


async def test_there_is_no_multipath_tcp_since_a_connection_of_its_would_not_end(node: Node) -> None:
    root = await node.root(SHAPE)
    ask_for_it = "import socket; socket.socket(socket.AF_INET, socket.SOCK_STREAM, 262)"  # IPPROTO_MPTCP
    result = await node.run(root, "python3", "-c", ask_for_it)
    assert result.exit_code == 1
    assert b"Protocol not available" in result.stderr
