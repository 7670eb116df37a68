"""Second half of the demo: the tree is shown, grown to twenty sessions, and deleted by its root."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing

from rich.table import Table
from rich.tree import Tree

from forktree.kube.watching import Changed, Deleted, Listed, watch
from forktree.models import Fork, Session
from forktree_dev.demo import manifests
from forktree_dev.demo.growing import ROOT
from forktree_dev.demo.machines import Ends, machine_pids
from forktree_dev.demo.report import ForkClocks
from forktree_dev.demo.stage import WAIT_SECONDS, DemoFailed, Stage

SESSIONS = 20

STEPS = 3
"""How many steps `prune` tells about."""


async def prune(stage: Stage) -> None:
    """Shows the tree, adds to it, deletes its root, and waits until machines and objects are gone."""
    await show(stage)
    await _widen(stage)
    await _delete_root(stage)
    with stage.narrator.step("kubectl delete: template and namespace"):
        await stage.system.kubectl.run(
            "delete", "sessiontemplate", manifests.TEMPLATE, f"--namespace={manifests.NAMESPACE}"
        )
        await stage.system.kubectl.run(
            "delete", "namespace", manifests.NAMESPACE, timeout_seconds=WAIT_SECONDS
        )


async def show(stage: Stage) -> None:
    """The tree as the API has it, and what each fork took."""
    sessions, _ = await stage.cluster.list(Session, manifests.NAMESPACE)
    forks, _ = await stage.cluster.list(Fork, manifests.NAMESPACE)
    stage.narrator.show(_tree(sessions, forks))
    stage.narrator.show(_clocks(stage.report.forks))


async def _widen(stage: Stage) -> None:
    sessions, _ = await stage.cluster.list(Session, manifests.NAMESPACE)
    more = max(0, SESSIONS - len(sessions))
    with stage.narrator.step(f"kubectl apply: fork {ROOT} into {more} more", total=more) as step:
        await stage.apply(manifests.fork("crowd", ROOT, more))

        def usable(fork: Fork) -> bool:
            step.reached(fork.status.ready_replicas or 0)
            return fork.status.ready and (fork.status.recorded or 0) >= more

        fork = await stage.until(Fork, "crowd", usable)
    stage.report.forks.append(ForkClocks.of(fork))
    stage.narrator.show(_clocks(stage.report.forks[-1:]))


async def _delete_root(stage: Stage) -> None:
    keeper_pid = stage.system.keeper.pid
    if keeper_pid is None:
        raise DemoFailed("the keeper does not run")
    sessions, _ = await stage.cluster.list(Session, manifests.NAMESPACE)
    pids = machine_pids(keeper_pid)
    if len(sessions) < SESSIONS or len(pids) < len(sessions):
        raise DemoFailed(
            f"there are {len(sessions)} sessions and {len(pids)} machines, not {SESSIONS} of each"
        )
    loop = asyncio.get_running_loop()
    deadline = loop.time() + WAIT_SECONDS
    title = f"kubectl delete session {ROOT}: {len(sessions)} sessions, {len(pids)} processes"
    with stage.narrator.step(title, total=len(sessions)) as step, Ends(pids) as ends:
        async with asyncio.timeout_at(deadline), asyncio.TaskGroup() as tasks:
            watching = asyncio.Event()
            deleted = tasks.create_task(_root_deleted(stage, watching), name="root-deleted")
            reaped = tasks.create_task(ends.last(deadline=deadline), name="machines-reaped")
            await watching.wait()
            await stage.system.kubectl.run(
                "delete", "session", ROOT, f"--namespace={manifests.NAMESPACE}", "--wait=false"
            )
            gone = tasks.create_task(_objects_gone(stage, step.reached, len(sessions)), name="objects-gone")
    since = deleted.result()
    stage.narrator.say(f"delete event → last machine reaped: {(reaped.result() - since) * 1000:.0f} ms")
    stage.narrator.say(f"delete event → last object collected: {gone.result() - since:.1f} s")
    if still := machine_pids(keeper_pid):
        raise DemoFailed(f"{len(still)} machines still run: {still}")


async def _root_deleted(stage: Stage, watching: asyncio.Event) -> float:
    """When the API server told that the root is deleted, in loop time."""
    changes = watch(
        stage.cluster, Session, namespace=manifests.NAMESPACE, field_selector=f"metadata.name={ROOT}"
    )
    async with aclosing(changes):
        async for change in changes:
            watching.set()
            if isinstance(change, Deleted):
                break
    return asyncio.get_running_loop().time()


async def _objects_gone(stage: Stage, tell: Callable[[int], None], total: int) -> float:
    """When the garbage collector had taken the last object of the tree, in loop time."""
    for kind in (Session, Fork):
        alive: set[str] = set()
        changes = watch(stage.cluster, kind, namespace=manifests.NAMESPACE)
        async with aclosing(changes):
            async for change in changes:
                match change:
                    case Listed(objects=objects):
                        alive = {each.metadata.uid for each in objects}
                    case Changed(obj=obj):
                        alive.add(obj.metadata.uid)
                    case Deleted(obj=obj):
                        alive.discard(obj.metadata.uid)
                if kind is Session:
                    tell(total - len(alive))
                if not alive:
                    break
    return asyncio.get_running_loop().time()


def _tree(sessions: tuple[Session, ...], forks: tuple[Fork, ...]) -> Tree:
    below: dict[str, list[Session | Fork]] = {}
    objects: list[Session | Fork] = [*forks, *sessions]
    for each in objects:
        owner = each.metadata.controller
        below.setdefault(owner.uid if owner else "", []).append(each)

    def draw(each: Session | Fork, on: Tree) -> None:
        status = each.status
        branch = on.add(
            f"{each.resource.kind.lower()} [bold]{each.metadata.name}[/bold] {status.phase}"
            + (f" depth {status.depth}" if isinstance(each, Session) else "")
        )
        for child in sorted(below.get(each.metadata.uid, []), key=lambda child: child.metadata.name):
            draw(child, branch)

    top = Tree(f"namespace {manifests.NAMESPACE}")
    for root in below.get("", []):
        draw(root, top)
    return top


def _clocks(forks: list[ForkClocks]) -> Table:
    table = Table(
        "fork", "depth", "children", "mode", title="milliseconds, agent's clock", title_justify="left"
    )
    for heading in ("pause", "fork", "ready", "total"):
        table.add_column(heading, justify="right")
    for fork in forks:
        clocks = (fork.pauseMs, fork.forkMs, fork.readyMs, fork.totalMs)
        shown = ["-" if clock is None else f"{clock:.1f}" for clock in clocks]
        table.add_row(fork.name, str(fork.depth), str(fork.children), fork.mode or "-", *shown)
    return table
