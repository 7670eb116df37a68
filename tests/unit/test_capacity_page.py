"""What the page on capacity works out is what a node's ledger admits."""

from __future__ import annotations

import re

from forktree.models.quantities import parse_bytes
from forktree_agent.engine.contract import AtCapacity
from forktree_agent.engine.microvm.admission import VMM_OVERHEAD_BYTES, Ledger, machine_bytes
from forktree_dev.checkout import CHECKOUT

PAGE = (CHECKOUT / "docs" / "capacity.md").read_text()
MIB = 1 << 20


def admitted(node: str, machine: str) -> int:
    """Sessions of one template until the node is full."""
    ledger = Ledger(parse_bytes(node))
    ledger.record("baseline", parse_bytes(machine), None)
    count = 0
    try:
        while True:
            ledger.reserve(count, machine_bytes(parse_bytes(machine), egress=False), None)
            count += 1
    except AtCapacity:
        return count


def test_so_many_sessions_fit_as_the_page_says() -> None:
    head, *rows = re.findall(r"^\| `(?:machine|\d).*\|$", PAGE, re.MULTILINE)
    nodes = re.findall(r"(\d+Gi)", head)
    assert len(nodes) == len(rows) - 1 == 3
    for row in rows:
        machine, *numbers = (cell.strip(" `") for cell in row.strip("|").split("|"))
        assert [int(each) for each in numbers] == [admitted(node, machine) for node in nodes], machine


def test_the_worked_example_adds_up() -> None:
    machines, memory, forks, copied, trees, node = 22, 256, 6, 4, 7, "56Gi"
    each = machine_bytes(memory * MIB, egress=False) // MIB
    tree = machines * each + forks * copied
    total, room = trees * tree + memory, parse_bytes(node) // MIB
    for sentence in (
        f"{machines} x ({memory} + {VMM_OVERHEAD_BYTES // MIB}) = {machines * each} MiB",
        f"{forks} x {copied} = {forks * copied} MiB",
        f"{trees} x {tree} + {memory} = {total} MiB",
        f"`node.memory: {node}` ({room} MiB) takes {trees} such trees",
        f"`count/sessions.forktree.dev={trees * machines}`, `count/forks.forktree.dev={trees * forks}`",
    ):
        assert sentence in PAGE.replace("\N{MULTIPLICATION SIGN}", "x")
    assert total <= room < total + tree
