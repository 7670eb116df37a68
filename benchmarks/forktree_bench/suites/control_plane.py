"""What everything but machines costs: real API server, operator and agents, and an engine without machines.

The nodes are simulated: each is the real agent, and the real keeper beside it, with the engine `null`, which
writes down what it is told to make and makes nothing. So a fork here is all the work there is for a fork,
less the fork. All of it, and the benchmark itself, share the cores of one machine.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from forktree.models import Session, SessionTemplate
from forktree.models.reasons import BakePhase
from forktree_bench import host, stand
from forktree_bench.figures import Figure, Params, Series
from forktree_bench.forks_seen import Milestone
from forktree_bench.plots import Plot
from forktree_bench.report import Report
from forktree_bench.requests_seen import requests_so_far
from forktree_bench.stand import NAMESPACE, Stand
from forktree_bench.suite import Scope, Suite
from forktree_dev.processes import Service
from forktree_dev.system import Sizes

RATE = Figure(
    name="recorded_forks", unit="1/s", clock="first request sent → last fork of the window recorded; client's"
)
LATENCY = Figure(
    name="recorded", clock="fork asked for → its child's object counted, seen by a watcher; client's"
)
ANSWER = Figure(name="http_total", clock="POST …/fork seen → answer written; server's")
CPU = Figure(name="cpu_per_fork", clock="none: processor time of a part in the window, by forks recorded")
REQUESTS = Figure(name="requests_per_fork", unit="", clock="none: by the API server's own count")
SESSIONS = Figure(name="sessions", unit="", clock="none: live ones, all objects written")
FILLED = Figure(
    name="recorded_sessions", unit="1/s", clock="first request sent → last object counted; client's"
)
MEMORY = Figure(name="rss", unit="MiB", clock="none: resident memory of each process")
IDLE = Figure(name="idle_cpu", unit="%", clock="none: of one core, while nobody asks for anything")
IDLE_REQUESTS = Figure(
    name="idle_requests", unit="1/s", clock="none: all requests to the API server meanwhile"
)
OPERATOR = Figure(
    name="operator_restart",
    unit="s",
    clock="operator started → a Fork created then is ready, seen by a watcher; client's",
)
AGENT = Figure(
    name="agent_restart",
    unit="s",
    clock="agent started → a Fork created then is ready, seen by a watcher; client's",
)

TEMPLATE = "nothing"
NODES = 8
ROOTS_PER_NODE = 2
IN_FLIGHT = (1, 4, 16, 64)
HTTP_IN_FLIGHT = (4, 16)
WINDOW_SECONDS = 7.0
FILL_REPLICAS = 50
FILL_IN_FLIGHT = 16
LIVE = 10_000
SECONDS = 300.0
AFTER_FILL_SECONDS = 90.0
"""Of these, for what is measured once all sessions are there: at rest, and four restarts. Filling has what is
left: a slow machine then has fewer sessions, and still says how long its restarts take."""
IDLE_SECONDS = 10.0
SHOWN_REQUESTS = 12
"""The most frequent ones."""


@dataclass(slots=True)
class Window:
    """What happened between two looks at all parts."""

    cpu_ms: Mapping[str, float]
    requests: Counter[str]
    seconds: float
    latencies: list[float] = field(default_factory=list[float])
    answers: list[float] = field(default_factory=list[float])

    @property
    def rate(self) -> float:
        return len(self.latencies) / self.seconds


@dataclass(frozen=True, slots=True)
class Looked:
    """How much all parts had done at one moment."""

    cpu_ms: dict[str, float]
    requests: Counter[str]
    at: float

    @classmethod
    async def now(cls, stand: Stand) -> Looked:
        parts: dict[str, float] = {}
        for name, pid in {**stand.parts(), "benchmark": os.getpid()}.items():
            kind = name.partition(" ")[0]  # All agents as one, and all keepers.
            parts[kind] = parts.get(kind, 0.0) + host.cpu_ms([pid])
        return cls(parts, await requests_so_far(stand.kube), asyncio.get_running_loop().time())

    def until(self, later: Looked) -> Window:
        spent = {name: later.cpu_ms[name] - self.cpu_ms.get(name, 0.0) for name in later.cpu_ms}
        return Window(spent, later.requests - self.requests, later.at - self.at)


Forking = Callable[[Session], Awaitable[tuple[str, float | None]]]
"""Asks for a fork; its name, and the server's clock where there is one."""


async def run(report: Report, scope: Scope) -> None:
    loop = asyncio.get_running_loop()
    filled_by = loop.time() + SECONDS + scope.more_seconds - AFTER_FILL_SECONDS
    nodes = 2 if scope.quick else NODES
    sizes = Sizes(memory_limit_bytes=64 << 40, engine="null")
    names = tuple(f"node-{index + 1}" for index in range(nodes))
    async with stand.running(report, sizes=sizes, nodes=names) as running:
        # Each node has it ready, so that sessions spread; those of a template that is not go where it is.
        machine = {"memory": "128Mi", "overlay": "16Mi"}
        await running.template(TEMPLATE, {"image": "builtin:tiny", "machine": machine, "standby": 1})
        await _ready_everywhere(running, nodes)
        roots = [await running.root(f"root-{index}", TEMPLATE) for index in range(nodes * ROOTS_PER_NODE)]
        bench = Bench(running, report, roots, nodes, WINDOW_SECONDS if not scope.quick else 2.0)
        await bench.resources("at rest, few")
        await bench.idle("few", 2.0 if scope.quick else IDLE_SECONDS)
        await bench.rates(IN_FLIGHT[:2] if scope.quick else IN_FLIGHT, "objects", bench.by_object)
        await bench.rates(HTTP_IN_FLIGHT[:1] if scope.quick else HTTP_IN_FLIGHT, "HTTP", bench.by_http)
        left = max(0.0, filled_by - loop.time())
        live = await bench.fill(200 if scope.quick else LIVE, 20.0 if scope.quick else left)
        await running.settled()
        await bench.resources(f"at rest, {live}")
        await bench.idle(str(live), 2.0 if scope.quick else IDLE_SECONDS)
        await bench.restarts(live)


async def _ready_everywhere(stand: Stand, nodes: int) -> None:
    async with asyncio.timeout_at(stand.soon()):
        while True:
            template = await stand.kube.get(SessionTemplate, NAMESPACE, TEMPLATE)
            if sum(each.phase is BakePhase.READY for each in template.status.nodes) == nodes:
                return
            await asyncio.sleep(0.2)


class Bench:
    """The system under measurement and where its sessions are."""

    def __init__(
        self, stand: Stand, report: Report, roots: Sequence[Session], nodes: int, window_seconds: float
    ) -> None:
        self.stand = stand
        self.report = report
        self.roots = roots
        self.nodes = nodes
        self.window_seconds = window_seconds
        self._turns = itertools.cycle(roots)
        self._api = {node.name: api for node, api in zip(stand.system.nodes, stand.apis, strict=True)}

    # Rates ------------------------------------------------------------------------------------------------

    async def by_object(self, root: Session) -> tuple[str, float | None]:
        return (await self.stand.fork(root.metadata.name, 1)).metadata.name, None

    async def by_http(self, root: Session) -> tuple[str, float | None]:
        """At the agent of the root's own node, so that none has to hand it on."""
        api = self._api[root.spec.node_name or self.stand.system.node]
        forked = await api.fork(root.metadata.name, 1)
        return forked.fork_id, forked.total_time_ms

    async def rates(self, in_flight: Sequence[int], road: str, forking: Forking) -> None:
        """More and more forks at once, until more at once are no more a second."""
        best: Window | None = None
        best_params: Params = {}
        for count in in_flight:
            params: Params = {"road": road, "in_flight": count, "nodes": self.nodes}
            async with self.report.part(f"forks by {road}, {count} in flight", RATE, **params):
                window = await self._window(count, forking)
                self.report.add(RATE, [window.rate], **params)
                self.report.add(LATENCY, window.latencies, **params)
                if window.answers:
                    self.report.add(ANSWER, window.answers, **params)
                if best is None or window.rate > best.rate:
                    best = window
                    best_params = params
        if best is not None:
            forks = len(best.latencies)
            for part, spent in sorted(best.cpu_ms.items(), key=lambda each: -each[1]):
                self.report.add(CPU, [spent / forks], part=part, **best_params)
            for request, count in best.requests.most_common(SHOWN_REQUESTS):
                self.report.add(REQUESTS, [count / forks], request=request, **best_params)

    async def _window(self, in_flight: int, forking: Forking) -> Window:
        """So many clients, each asking for its next fork when its last one is recorded."""
        latencies: list[float] = []
        answers: list[float] = []
        loop = asyncio.get_running_loop()
        await self.stand.settled()
        before = await Looked.now(self.stand)
        until = loop.time() + self.window_seconds

        async def client() -> None:
            while loop.time() < until:
                began = loop.time()
                name, answered_ms = await forking(next(self._turns))
                at = await self.stand.forks.when(name, Milestone.RECORDED, deadline=self.stand.soon())
                latencies.append((at - began) * 1000)
                if answered_ms is not None:
                    answers.append(answered_ms)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(in_flight):
                tasks.create_task(client())
        window = before.until(await Looked.now(self.stand))
        window.latencies, window.answers = latencies, answers
        return window

    # Many sessions ----------------------------------------------------------------------------------------

    async def fill(self, wanted: int, seconds: float) -> int:
        """Fork until so many sessions are recorded, or the time for it is over; how many there are."""
        params: Params = {"nodes": self.nodes, "children": FILL_REPLICAS, "in_flight": FILL_IN_FLIGHT}
        forks = self.stand.forks
        async with self.report.part(f"up to {wanted} live sessions", SESSIONS, **params):
            loop = asyncio.get_running_loop()
            began, before = loop.time(), forks.recorded_children
            asked = before + len(self.roots)

            async def client() -> None:
                nonlocal asked
                while asked < wanted and loop.time() < began + seconds:
                    replicas = min(FILL_REPLICAS, wanted - asked)
                    asked += replicas
                    root = next(self._turns)
                    name = (await self.stand.fork(root.metadata.name, replicas)).metadata.name
                    await forks.when(name, Milestone.RECORDED, deadline=self.stand.soon())

            async with asyncio.TaskGroup() as tasks:
                for _ in range(FILL_IN_FLIGHT):
                    tasks.create_task(client())
            live = forks.recorded_children + len(self.roots)
            self.report.add(SESSIONS, [live], **params)
            self.report.add(FILLED, [(forks.recorded_children - before) / (loop.time() - began)], **params)
            if live < wanted:
                self.report.notes.append(f"{live} of {wanted} sessions were recorded in the time for it.")
        return forks.recorded_children + len(self.roots)

    async def resources(self, when: str) -> None:
        async with self.report.part(f"memory {when}", MEMORY, when=when):
            series: dict[str, list[float]] = {}
            for name, pid in self.stand.parts().items():
                series.setdefault(name.partition(" ")[0], []).append(host.memory(pid).rss)
            for part, values in series.items():
                self.report.add(MEMORY, values, when=when, part=part, nodes=self.nodes)

    async def idle(self, live: str, seconds: float) -> None:
        async with self.report.part(f"at rest with {live} sessions", IDLE, live=live):
            await self.stand.settled()
            before = await Looked.now(self.stand)
            await asyncio.sleep(seconds)
            window = before.until(await Looked.now(self.stand))
            for part, spent in window.cpu_ms.items():
                share = spent / window.seconds / 10
                self.report.add(IDLE, [share], live=live, part=part, nodes=self.nodes)
            rate = sum(window.requests.values()) / window.seconds
            self.report.add(IDLE_REQUESTS, [rate], live=live, part="all", nodes=self.nodes)

    # Restarts ---------------------------------------------------------------------------------------------

    async def restarts(self, live: int) -> None:
        operator = self.stand.system.operator
        for how, end in (("told to stop", operator.stop), ("killed", operator.kill)):
            await self._restart(OPERATOR, operator, end, self.roots[0], how=how, live=live)
        await self.resources("operator restarted")
        node = self.stand.system.nodes[0]
        root = next(each for each in self.roots if each.spec.node_name == node.name)
        for how, end in (("told to stop", node.agent.stop), ("killed", node.agent.kill)):
            await self._restart(AGENT, node.agent, end, root, how=how, live=live)
        await self.resources("agent restarted")

    async def _restart(
        self,
        figure: Figure,
        service: Service,
        end: Callable[[], Awaitable[None]],
        root: Session,
        *,
        how: str,
        live: int,
    ) -> None:
        params: Params = {"how": how, "live": live, "nodes": self.nodes}
        async with self.report.part(f"{service.name} {how} and started again", figure, **params):
            await self.stand.settled()
            await end()
            began = asyncio.get_running_loop().time()
            service.start()
            name = (await self.stand.fork(root.metadata.name, 1)).metadata.name
            at = await self.stand.forks.when(name, Milestone.READY, deadline=self.stand.soon())
            series = Series()
            series.add(figure, at - began)
            self.report.add_all(series, **params)


SUITE = Suite(
    name="control-plane",
    measures="recorded forks a second, and ten thousand sessions, on simulated nodes without machines",
    run=run,
    seconds=SECONDS,
    plots=(
        Plot(
            name="control-plane-rate",
            title="Recorded forks a second (simulated nodes, engine null, all on one machine)",
            figures=(RATE.name,),
            x="in_flight",
            y_label="1/s",
            by=("road",),
        ),
    ),
)
