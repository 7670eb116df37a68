"""Forks and prunes of a whole system: real API server, operator, agent and machines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager

from forktree.kube.watching import Changed, Deleted, Listed, watch
from forktree.models import Fork, Session, Uid
from forktree.models.names import ROOT_LABEL
from forktree_bench import guest, host, stand
from forktree_bench.figures import Figure, Params, Series
from forktree_bench.forks_seen import Milestone
from forktree_bench.report import Report
from forktree_bench.stand import NAMESPACE, Stand, fork_object
from forktree_bench.suite import Scope, Suite
from forktree_bench.suites import at_once
from forktree_dev.demo.machines import Ends
from forktree_dev.system import Sizes

FORKED = Figure(
    name="forked", clock="create request of a Fork sent → condition Forked seen by a watcher; client's"
)
READY = Figure(
    name="ready_seen", clock="create request of a Fork sent → condition Ready seen by a watcher; client's"
)
RECORDED = Figure(
    name="recorded",
    clock="create request of a Fork sent → all child objects counted, seen by a watcher; client's",
)
APPLY = Figure(
    name="kubectl_apply_ready", clock="kubectl started → condition Ready seen by a watcher; client's"
)
PAUSE = Figure(name="pause", clock="parent stopped → parent runs again; agent's")
FORK = Figure(name="fork", clock="parent stopped → every child runs; agent's")
ANSWERED = Figure(name="ready", clock="parent stopped → every child answered to its identity; agent's")
AGENT_TOTAL = Figure(name="total", clock="Fork seen by the agent → status written; agent's")
HTTP_TOTAL = Figure(name="http_total", clock="POST …/fork seen → answer written; server's")
HTTP_WALL = Figure(name="http_wall", clock="POST …/fork sent → answer read, on a kept connection; client's")
HTTP_FIRST_EXEC = Figure(
    name="http_first_exec",
    clock="POST …/fork sent → output of each child's first program, one that its parent had run; client's",
)
DEAD = Figure(
    name="machines_dead", clock="DELETED event of the root seen → last machine's process ended; client's"
)
MACHINES = Figure(name="machines", unit="", clock="none: processes in the tree's control group before")
GONE = Figure(
    name="objects_gone", unit="s", clock="DELETED event of the root seen → last object's seen; client's"
)

TEMPLATE = "worker"
FIRST_PROGRAM = ("echo", "hello")
GUEST_MB = 256
FANS = ((1, 20), (8, 8), (64, 2))
HTTP_FANS = ((1, 20), (8, 8))
BUSHINESS = (9, 10)
"""Children of the root, and of each of these: with the root a tree of a hundred."""


async def run(report: Report, scope: Scope) -> None:
    async with stand.running(report, sizes=Sizes(memory_limit_bytes=512 << 30)) as running:
        probe = {"exec": {"command": list(guest.ask("steps"))}, "timeoutSeconds": 30, "failureThreshold": 120}
        await running.template(
            TEMPLATE,
            {
                "image": "builtin:python",
                "machine": {"memory": f"{GUEST_MB}Mi", "overlay": "32Mi"},
                "command": ["python3", "-c", guest.WORKER],
                "readinessProbe": probe,
            },
        )
        await running.root("parent", TEMPLATE)
        await running.api.run("parent", *FIRST_PROGRAM)
        await _objects(running, report, scope)
        await _kubectl(running, report, scope)
        await _http(running, report, scope)
        await at_once.run(running, report, scope)
        await _delete(running, report, scope)


async def _objects(stand: Stand, report: Report, scope: Scope) -> None:
    for children, many in FANS:
        if scope.quick and children > 8:
            continue
        params: Params = {"children": children, "guest_mb": GUEST_MB}
        async with report.part(f"a Fork object of {children}", READY, **params):
            series = Series()
            for _ in range(scope.runs(many)):
                async with _alone(stand):
                    name = await _object(stand, series, children)
                    await stand.kube.delete(Fork, NAMESPACE, name)
            report.add_all(series, **params)


async def _object(stand: Stand, series: Series, children: int) -> str:
    """Create one Fork and note what is seen of it. Its name."""
    began = asyncio.get_running_loop().time()
    name = (await stand.fork("parent", children)).metadata.name
    for figure, milestone in (
        (FORKED, Milestone.FORKED),
        (READY, Milestone.READY),
        (RECORDED, Milestone.RECORDED),
    ):
        at = await stand.forks.when(name, milestone, deadline=stand.soon())
        series.add(figure, (at - began) * 1000)
    status = stand.forks.last(name).status
    for figure, value in (
        (PAUSE, status.pause_ms),
        (FORK, status.fork_ms),
        (ANSWERED, status.ready_ms),
        (AGENT_TOTAL, status.total_ms),
    ):
        series.add(figure, value)
    return name


async def _kubectl(stand: Stand, report: Report, scope: Scope) -> None:
    """As a user types it, with kubectl's own start and its reading of the API's description."""
    params: Params = {"children": 1, "guest_mb": GUEST_MB}
    async with report.part("kubectl apply", APPLY, **params):
        values: list[float] = []
        for turn in range(scope.runs(5)):
            async with _alone(stand):
                fork = fork_object(f"applied-{turn}", "parent", 1)
                began = asyncio.get_running_loop().time()
                await stand.apply(fork.manifest())
                at = await stand.forks.when(fork.metadata.name, Milestone.READY, deadline=stand.soon())
                values.append((at - began) * 1000)
                await stand.kube.delete(Fork, NAMESPACE, fork.metadata.name)
        report.add(APPLY, values, **params)


async def _http(stand: Stand, report: Report, scope: Scope) -> None:
    for children, many in HTTP_FANS:
        params: Params = {"children": children, "guest_mb": GUEST_MB}
        async with report.part(f"POST …/fork of {children}", HTTP_TOTAL, **params):
            series = Series()
            for _ in range(scope.runs(many)):
                async with _alone(stand):
                    began = asyncio.get_running_loop().time()
                    forked = await stand.api.fork("parent", children)
                    answered = asyncio.get_running_loop().time()
                    await stand.api.run_in_all([each.session_id for each in forked.children], *FIRST_PROGRAM)
                    ended = asyncio.get_running_loop().time()
                    series.add(HTTP_TOTAL, forked.total_time_ms)
                    series.add(HTTP_WALL, (answered - began) * 1000)
                    series.add(HTTP_FIRST_EXEC, (ended - began) * 1000)
                    await stand.forks.when(forked.fork_id, Milestone.RECORDED, deadline=stand.soon())
                    for figure, value in (
                        (PAUSE, forked.pause_time_ms),
                        (FORK, forked.fork_time_ms),
                        # The answer did not wait for it; the object has it.
                        (ANSWERED, stand.forks.last(forked.fork_id).status.ready_ms),
                    ):
                        series.add(figure, value)
                    await stand.kube.delete(Fork, NAMESPACE, forked.fork_id)
            report.add_all(series, road="HTTP", **params)


async def _delete(stand: Stand, report: Report, scope: Scope) -> None:
    bushiness = (1, 3) if scope.quick else BUSHINESS
    nodes = 1 + bushiness[0] + bushiness[0] * bushiness[1]
    params: Params = {"sessions": nodes, "guest_mb": GUEST_MB}
    async with report.part(f"delete a tree of {nodes}", DEAD, **params):
        series = Series()
        for turn in range(scope.runs(2, few=1)):
            async with _alone(stand):
                root = await stand.root(f"tree-{turn}", TEMPLATE)
                await _grow(stand, root, bushiness)
                await _prune(stand, series, root)
        report.add_all(series, **params)


async def _grow(stand: Stand, root: Session, bushiness: tuple[int, int]) -> None:
    level = [root.metadata.name]
    for width in bushiness:
        below: list[str] = []
        for parent in level:
            name = (await stand.fork(parent, width)).metadata.name
            await stand.forks.when(name, Milestone.RECORDED, deadline=stand.soon())
            fork = await stand.kube.get(Fork, NAMESPACE, name)
            below += [child.name for child in fork.status.children]
        level = below


async def _prune(stand: Stand, series: Series, root: Session) -> None:
    """Delete the root, and see its machines and its objects go."""
    deadline = stand.soon()
    name, uid = root.metadata.name, root.metadata.uid
    keeper = stand.parts()[f"keeper {stand.system.node}"]
    machines = [pid for pid in host.children(keeper) if host.in_group(pid, f"tree-{uid}")]
    with Ends(machines) as ends:
        async with asyncio.timeout_at(deadline), asyncio.TaskGroup() as tasks:
            watching = [asyncio.Event() for _ in range(3)]
            deleted = tasks.create_task(_deleted(stand, name, watching[0]))
            reaped = tasks.create_task(ends.last(deadline=deadline))
            gone = [
                tasks.create_task(_gone(stand, Session, uid, watching[1])),
                tasks.create_task(_gone(stand, Fork, uid, watching[2])),
            ]
            for each in watching:
                await each.wait()
            await stand.kube.delete(Session, NAMESPACE, name)
    since = deleted.result()
    series.add(DEAD, (reaped.result() - since) * 1000)
    series.add(GONE, max(task.result() for task in gone) - since)
    series.add(MACHINES, len(machines))


async def _deleted(stand: Stand, name: str, watching: asyncio.Event) -> float:
    """When the session's deletion was seen."""
    selector = f"metadata.name={name}"
    async with aclosing(watch(stand.kube, Session, namespace=NAMESPACE, field_selector=selector)) as changes:
        async for change in changes:
            watching.set()
            if isinstance(change, Deleted):
                break
    return asyncio.get_running_loop().time()


async def _gone(stand: Stand, kind: type[Session] | type[Fork], root: Uid, listed: asyncio.Event) -> float:
    """When the last object of this kind below `root` was seen to be deleted."""
    alive: set[Uid] = set()
    async with aclosing(
        watch(stand.kube, kind, namespace=NAMESPACE, label_selector=f"{ROOT_LABEL}={root}")
    ) as changes:
        async for change in changes:
            match change:
                case Listed(objects=objects):
                    alive = {each.metadata.uid for each in objects}
                    listed.set()
                case Changed(obj=obj):
                    alive.add(obj.metadata.uid)
                case Deleted(obj=obj):
                    alive.discard(obj.metadata.uid)
            if not alive:
                break
    return asyncio.get_running_loop().time()


@asynccontextmanager
async def _alone(stand: Stand) -> AsyncGenerator[None]:
    """What came before is over when the block begins: machines ended, objects collected."""
    await stand.forks.none_left(deadline=stand.soon())
    await stand.settled()
    yield


SUITE = Suite(
    name="tree",
    measures="a whole system: Fork objects, HTTP forks, many callers at once, a tree of a hundred deleted",
    run=run,
    seconds=180,
)
