"""Eight generations of three children under a busy program, each compared with its parent's instant."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from component.node import Node, all_sh
from forktree_agent.engine.contract import Machine, Probe, Shape

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(1200)]  # 49 looks, 2 s each.

GENERATIONS = 8
CHILDREN = 3
PROGRAM = (Path(__file__).parent / "busy.py").read_text()
SHAPE = Shape(
    image="builtin:python",
    vcpus=1,
    memory_bytes=192 << 20,
    overlay_bytes=64 << 20,
    command=("python3", "-c", PROGRAM, "serve"),
    probe=Probe(ask=("python3", "-c", PROGRAM, "check"), timeout_seconds=60),
)
STEPS_BEFORE_FREEZE = 2
"""What a child may still do before its identity is taken in: the step under way, and one more."""


@dataclass(frozen=True, slots=True)
class Seen:
    step: int
    adder: int
    first_step_of: dict[str, int]


async def look(node: Node, machine: Machine) -> Seen:
    """The program's state, checked inside the guest against what its steps must have made of it."""
    result = await node.run(machine, "python3", "-c", PROGRAM, "check")
    assert result.exit_code == 0, result.stderr.decode()
    return Seen(**json.loads(result.stdout))


async def test_every_child_goes_on_from_its_parents_instant_and_no_parent_notices(node: Node) -> None:
    grandparent: Machine | None = None
    parent = await node.root(SHAPE)
    for depth in range(GENERATIONS):
        before = await look(node, parent)
        assert len(before.first_step_of) >= depth + 1, "a generation of its lineage left no trace"
        children = (await node.fork(parent, CHILDREN, prefix=f"d{depth}")).children
        after, *seen = await asyncio.gather(*(look(node, each) for each in (parent, *children)))

        instants = [each.first_step_of[child.generation] for child, each in zip(children, seen, strict=True)]
        assert max(instants) - min(instants) <= STEPS_BEFORE_FREEZE, instants
        assert all(before.step < instant for instant in instants), (before, instants)
        assert all(each.step > before.step for each in seen), "a child does not go on"
        assert {each.adder for each in seen} == {before.adder}, "another process"
        assert after.step > before.step, "the parent does not go on"
        assert children[0].generation not in after.first_step_of, "the parent took a child's identity"

        for script in ("head -c 16 /dev/urandom | od -An -tx1", "hostname", "cat /run/forktree/identity"):
            said = await all_sh(node, [parent, *children], script)
            assert len(set(said)) == CHILDREN + 1, (script, said)
        if grandparent is not None:  # Its grandchildren were born meanwhile.
            await look(node, grandparent)
            await node.engine.release(grandparent.id)
        for other in children[1:]:
            await node.engine.release(other.id)
        grandparent, parent = parent, children[0]
