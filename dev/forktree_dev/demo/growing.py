"""First half of the demo: a root, and forks of it that are looked into one by one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from forktree.models import Fork, Session
from forktree_dev.demo import manifests, searching
from forktree_dev.demo.history import State, check_apart, check_consistent, check_continued, check_unmoved
from forktree_dev.demo.report import ForkClocks
from forktree_dev.demo.stage import DemoFailed, Stage

ROOT = "root"

STEPS = 6
"""How many steps `grow` tells about."""


async def grow(stage: Stage) -> None:
    """A root, three children with a task each, and two generations below the first of them.

    Raises `DemoFailed` or `Contradiction` at the first thing that is not as it must be.
    """
    await _start_root(stage)
    first = await _fork(stage, "first", ROOT, 3, notes=["left", "middle", "right"])
    second = await _fork(stage, "second", first[0], 2, notes=["deeper", "elsewhere"])
    await _fork(stage, "third", second[0], 1, notes=["deepest"])


async def _start_root(stage: Stage) -> None:
    with stage.narrator.step("kubectl apply: a template on builtin:python, and one on builtin:gym for later"):
        await stage.apply(manifests.template())
        await searching.begin(stage)
    with stage.narrator.step("kubectl apply: a session of each (the node boots each template first, once)"):
        await stage.apply(manifests.session(ROOT))
        root = await stage.until(Session, ROOT, lambda session: session.status.ready)
        # Two boots at once take one core each; later this one would disturb what is measured.
        await stage.until(Session, searching.ROOT, lambda session: session.status.ready)
    template = await stage.system.kubectl.json(
        "get", "sessiontemplate", manifests.TEMPLATE, f"--namespace={manifests.NAMESPACE}"
    )
    boot_ms = template["status"]["nodes"][0]["bootMs"]
    stage.narrator.say(
        f"booted, checked and frozen in {boot_ms / 1000:.1f} s; "
        f"the session itself then took {root.status.fork_ms:.1f} ms"
    )
    with stage.narrator.step("exec over HTTP: what does the program in it say?"):
        name = (await stage.commands.run(ROOT, "hostname")).strip()
        state = await stage.ask(ROOT, "hello")
        check_consistent(state)
    stage.narrator.say(
        f"{name}: step {state.step}, counter {state.total}, memory {state.memory_sha256[:8]}, "
        f"processes {state.pids[0]} and {state.pids[1]}"
    )


async def _fork(stage: Stage, name: str, parent: str, replicas: int, *, notes: list[str]) -> list[str]:
    """The names of the children, each of them looked into and told its own note."""
    with stage.narrator.step(
        f"kubectl apply: fork {parent} into {replicas} while it works", total=replicas
    ) as step:
        before = await stage.ask(parent)
        await stage.apply(manifests.fork(name, parent, replicas))
        fork = await stage.until(Fork, name, lambda fork: _usable(fork, step.reached))
        children = [child.name for child in fork.status.children]
        if len(children) != replicas:
            raise DemoFailed(f"fork {name} has {len(children)} children and not {replicas}")
        after, *states = await asyncio.gather(
            stage.ask(parent), *(stage.ask(child, note) for child, note in zip(children, notes, strict=True))
        )
    stage.report.forks.append(ForkClocks.of(fork))
    _compare(stage, before, after, states, notes)
    return children


def _usable(fork: Fork, tell: Callable[[int], None]) -> bool:
    tell(fork.status.ready_replicas or 0)
    return fork.status.ready and (fork.status.recorded or 0) >= fork.spec.replicas


def _compare(stage: Stage, before: State, after: State, children: list[State], notes: list[str]) -> None:
    for state in (after, *children):
        check_consistent(state)
    continued = [check_continued(child, before, after) for child in children]
    check_unmoved(before, after)
    check_apart(children, notes)
    for child, note in zip(continued, notes, strict=True):
        stage.narrator.say(
            f"{child.name} went on from {before.name}'s step {child.at_step} and wrote {note!r}"
        )
    stage.narrator.say(
        f"{before.name} went on undisturbed: step {before.step} → {after.step}, "
        f"slowest step {after.slowest_step_ms:.0f} ms (before: {before.slowest_step_ms:.0f} ms)"
    )
