"""A live game, forked in mid-play, against the emulator's own clone and restore of its state."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from component.node import Node, soon
from forktree_agent.engine.contract import Command, Machine, Probe, Shape
from forktree_bench.guest import ask

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

SEED = 20260
DEPTH = 10
CHILDREN = ("heir", "other")
"""The heir is forked again, so that the last generation is a fork of a fork, ten deep."""
PROGRAM = (Path(__file__).parent / "atari.py").read_text()
SHAPE = Shape(
    image="builtin:atari",
    vcpus=1,
    memory_bytes=192 << 20,
    overlay_bytes=32 << 20,
    command=("python3", "-c", PROGRAM, "serve"),
    probe=Probe(ask=ask("play"), timeout_seconds=60),
)

State = dict[str, object]


@dataclass(frozen=True, slots=True)
class Generation:
    """What is played: by a machine until it is forked, and from there on by its children and by itself."""

    before: tuple[int, ...]
    heir: tuple[int, ...]
    other: tuple[int, ...]
    parent: tuple[int, ...]


def lineages(count: int) -> list[list[Generation]]:
    """Always the same for the same count."""
    chance = random.Random(SEED)

    def actions() -> tuple[int, ...]:
        return tuple(chance.randrange(6) for _ in range(chance.randint(3, 15)))

    return [
        [Generation(actions(), actions(), actions(), actions()) for _ in range(DEPTH)] for _ in range(count)
    ]


async def expected(node: Node, plan: Sequence[Sequence[Generation]]) -> list[list[dict[str, State]]]:
    """What the emulator itself makes of the plan, in a process that no fork ever touched."""
    machine = await node.root(SHAPE, name="reference")
    command = Command(
        argv=("python3", "-c", PROGRAM, "reference"),
        stdin=json.dumps([[dataclasses.asdict(each) for each in lineage] for lineage in plan]).encode(),
        timeout_seconds=300,
    )
    result = await node.engine.exec(machine.id, command, deadline=soon() + 300)
    assert result.exit_code == 0, result.told()
    await node.engine.release(machine.id)
    told: list[list[dict[str, State]]] = json.loads(result.stdout)
    return told


async def play(node: Node, machine: Machine, verb: str, actions: Sequence[int]) -> str:
    result = await node.run(machine, *ask(verb, *map(str, actions)))
    assert result.exit_code == 0, result.told()
    return result.stdout.decode()


async def seen(node: Node, lineage: Sequence[Generation]) -> list[dict[str, State]]:
    """What the machines of one lineage come to."""
    told: list[dict[str, State]] = []
    parent = await node.root(SHAPE)
    for generation in lineage:
        # Answered before they are played: the fork falls into the emulator's work, wherever that is.
        await play(node, parent, "begin", generation.before)
        heir, other = (await node.fork(parent, len(CHILDREN))).children
        who = {"heir": heir, "other": other, "parent": parent}
        states = await asyncio.gather(
            *(play(node, machine, "play", getattr(generation, name)) for name, machine in who.items())
        )
        told.append({name: json.loads(state) for name, state in zip(who, states, strict=True)})
        await asyncio.gather(*(node.engine.release(each.id) for each in (parent, other)))
        parent = heir
    await node.engine.release(parent.id)
    return told


async def compare(node: Node, count: int) -> None:
    plan = lineages(count)
    async with asyncio.TaskGroup() as tasks:
        reference = tasks.create_task(expected(node, plan))
        played = [tasks.create_task(seen(node, lineage)) for lineage in plan]
    equal, wrong = 0, list[str]()
    for number, (wanted, task) in enumerate(zip(reference.result(), played, strict=True)):
        for depth, (right, told) in enumerate(zip(wanted, task.result(), strict=True), start=1):
            # Else equal would mean nothing: what became of the two children of an instant does differ.
            assert right["heir"]["ram"] != right["other"]["ram"]
            for who in right:
                differing = [name for name in right[who] if right[who][name] != told[who][name]]
                equal += who in CHILDREN and not differing
                wrong += [f"lineage {number}, depth {depth}, {who}: {differing}"] if differing else []
    assert not wrong
    assert equal == count * DEPTH * len(CHILDREN)
    heirs = [generation["heir"] for lineage in reference.result() for generation in lineage]
    assert max(int(str(each["score"])) for each in heirs) > 0
    assert max(int(str(each["episodes"])) for each in heirs) > 1


async def test_twenty_children_ten_forks_deep_are_what_the_emulators_own_restore_makes(node: Node) -> None:
    await compare(node, 1)


@pytest.mark.slow
async def test_a_hundred_children_are_what_the_emulators_own_restore_makes(node: Node) -> None:
    await compare(node, 5)
