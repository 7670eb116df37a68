"""The same searches by replay and by fork, over the HTTP API, on one real environment: Gymnasium's Taxi.

By replay one environment is reset, and led to a state by its actions, for every branch that is tried from
there: that is what one does who cannot fork. The best case of replay is measured: all actions go in one
command, to a process that was started before. By fork the state's machine is forked into as many as there are
branches, and each takes its action.

Who searches is simple and the same both ways: proposals are drawn by the observation, so that equal states
have equal ones, and a state is worth more the shorter the way that is left. So both must come to equal
states, to the digest of all that was seen and of the random generator, and where they do not, it has failed.
"""

from __future__ import annotations

import asyncio
import heapq
import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pydantic import BaseModel, ConfigDict

from forktree.wire import SessionForked
from forktree_bench import guest, stand
from forktree_bench.figures import Figure, Params, Series
from forktree_bench.plots import Plot
from forktree_bench.report import Report
from forktree_bench.stand import Stand
from forktree_bench.suite import Scope, Suite
from forktree_dev.system import Sizes

OVERHEAD = Figure(
    name="overhead", unit="s", clock="reset or fork sent → next new actions may be sent, summed up; client's"
)
LEVEL = Figure(name="overhead_of_level", unit="s", clock="the same for one depth of the search; client's")
WALL = Figure(name="wall", unit="s", clock="search begun → its last state known; client's")
STEPS = Figure(name="env_steps", unit="", clock="none: steps that environments took")
RESETS = Figure(name="resets", unit="", clock="none: times an environment began anew")
FORKS = Figure(name="forks", unit="", clock="none: calls of POST …/fork")
LESS = Figure(name="overhead by replay/by fork", unit="x", clock="the two overheads of one search; client's")

TEMPLATE = "taxi"
GUEST_MB = 256
ACTIONS = 6
PACES = (0.1, 0.3)
"""Seconds that a step of the environment takes."""
STOPS = ((0, 0), (0, 4), (4, 0), (4, 3))
"""Where passengers wait and want to go, row and column."""
ON_BOARD = 4


class Different(Exception):
    """The two ways did not come to the same state."""


class State(BaseModel):
    """What an environment says of itself."""

    model_config = ConfigDict(frozen=True)

    observation: int
    steps: int
    total: float
    ended: bool
    history: str
    random: str

    @property
    def value(self) -> float:
        """The shorter the way that is left, the more it is worth."""
        return -float(way_left(self.observation)) if not self.ended else 1.0


def way_left(observation: int) -> int:
    """Steps to the passenger and on to where they want to go, as if there were no walls."""
    rest, goal = divmod(observation, 4)
    rest, passenger = divmod(rest, 5)
    taxi = divmod(rest, 5)
    if passenger == ON_BOARD:
        return _apart(taxi, STOPS[goal])
    return _apart(taxi, STOPS[passenger]) + 1 + _apart(STOPS[passenger], STOPS[goal])


def _apart(one: tuple[int, int], other: tuple[int, int]) -> int:
    return abs(one[0] - other[0]) + abs(one[1] - other[1])


def proposals(state: State, count: int) -> tuple[int, ...]:
    """The same for equal observations, as a model at temperature 0 would have it."""
    return tuple(random.Random(state.observation).sample(range(ACTIONS), count))


@dataclass(frozen=True, slots=True)
class Node:
    """A state of the search and how it is come to again."""

    actions: tuple[int, ...]
    state: State
    session: str
    """Where it lives, when found by fork; by replay, where it is led to."""


class Sessions(Protocol):
    """As much of the HTTP API as a search needs."""

    async def run(self, session: str, *argv: str) -> str: ...
    async def fork(self, session: str, replicas: int) -> SessionForked: ...
    async def delete(self, session: str) -> None: ...


@dataclass(slots=True)
class Way(ABC):
    """How a state is come to again, and what that has cost so far."""

    api: Sessions
    sessions: tuple[str, ...]
    """At the start of the environment."""
    overhead: dict[int, float] = field(default_factory=dict[int, float])
    """Seconds by the depth of the states that were expanded."""
    steps: int = 0
    resets: int = 0
    forks: int = 0

    async def start(self) -> Node:
        return Node((), await self.ask(self.sessions[0], "state"), self.sessions[0])

    @abstractmethod
    async def expand(self, node: Node, actions: Sequence[int]) -> list[Node]:
        """The states that these actions lead to from `node`, in order."""

    @abstractmethod
    async def forget(self, nodes: Sequence[Node]) -> None:
        """These will not be expanded any more."""

    async def ask(self, session: str, *words: str) -> State:
        return State.model_validate_json(await self.api.run(session, *guest.ask(*words)))

    async def act(self, node: Node, session: str, action: int) -> Node:
        self.steps += 1
        state = await self.ask(session, "step", str(action))
        return Node((*node.actions, action), state, session)

    def spent(self, node: Node, since: float) -> None:
        depth = len(node.actions) + 1
        now = asyncio.get_running_loop().time()
        self.overhead[depth] = self.overhead.get(depth, 0.0) + now - since


class ByReplay(Way):
    """With one session one branch after the other; with more, as many at once."""

    async def expand(self, node: Node, actions: Sequence[int]) -> list[Node]:
        found: list[Node] = []
        at_once = len(self.sessions)
        for first in range(0, len(actions), at_once):
            now = actions[first : first + at_once]
            began = asyncio.get_running_loop().time()
            async with asyncio.TaskGroup() as tasks:
                for session, _ in zip(self.sessions, now, strict=False):
                    tasks.create_task(self._lead(session, node))
            self.spent(node, began)
            async with asyncio.TaskGroup() as tasks:
                acting = [
                    tasks.create_task(self.act(node, session, action))
                    for session, action in zip(self.sessions, now, strict=False)
                ]
            found += [task.result() for task in acting]
        return found

    async def _lead(self, session: str, node: Node) -> None:
        self.resets += 1
        self.steps += len(node.actions)
        there = await self.ask(session, "replay", *map(str, node.actions))
        if there != node.state:
            raise Different(f"replaying {node.actions} came to {there} and not to {node.state}")

    async def forget(self, nodes: Sequence[Node]) -> None:
        """Nothing is kept of them."""


class ByFork(Way):
    async def expand(self, node: Node, actions: Sequence[int]) -> list[Node]:
        began = asyncio.get_running_loop().time()
        forked = await self.api.fork(node.session, len(actions))
        self.spent(node, began)
        self.forks += 1
        async with asyncio.TaskGroup() as tasks:
            acting = [
                tasks.create_task(self.act(node, child.session_id, action))
                for child, action in zip(forked.children, actions, strict=True)
            ]
        return [task.result() for task in acting]

    async def forget(self, nodes: Sequence[Node]) -> None:
        async with asyncio.TaskGroup() as tasks:
            for node in nodes:
                tasks.create_task(self.api.delete(node.session))


async def beam(way: Way, *, depth: int, branching: int) -> Node:
    """At each depth the best branch is kept. Returns the last."""
    best = await way.start()
    for _ in range(depth):
        found = await way.expand(best, proposals(best.state, branching))
        best = max(found, key=lambda node: node.state.value)
        await way.forget([node for node in found if node is not best])
    return best


async def best_first(way: Way, *, depth: int, branching: int, budget: int) -> Node:
    """The loop of "Tree Search for Language Model Agents" (Koh and others, 2024). Returns the best seen.

    The start is expanded, and then `budget` times the best state that is left, each into `branching` further
    ones; none is deeper than `depth`.
    """
    best = node = await way.start()
    frontier: list[tuple[float, int, Node]] = []
    count = 0
    for _ in range(1 + budget):
        found = await way.expand(node, proposals(node.state, branching))
        best = max(best, *found, key=lambda each: each.state.value)
        for each in found:
            count += 1
            if len(each.actions) < depth and not each.state.ended:
                heapq.heappush(frontier, (-each.state.value, count, each))
        if not frontier:
            break
        node = heapq.heappop(frontier)[2]
    return best


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """One search, and under which circumstances."""

    depth: int
    branching: int
    budget: int | None = None
    """None: beam search."""

    @property
    def params(self) -> dict[str, int | float | str]:
        kind = "beam" if self.budget is None else f"best-first, budget {self.budget}"
        return {"search": kind, "depth": self.depth, "branching": self.branching}

    async def run(self, way: Way) -> Node:
        if self.budget is None:
            return await beam(way, depth=self.depth, branching=self.branching)
        return await best_first(way, depth=self.depth, branching=self.branching, budget=self.budget)


@dataclass(frozen=True, slots=True)
class Outcome:
    node: Node
    way: Way
    wall: float

    @property
    def overhead(self) -> float:
        return sum(self.way.overhead.values())


async def run(report: Report, scope: Scope) -> None:
    wide = Search(depth=3, branching=3) if scope.quick else Search(depth=10, branching=3)
    tree = Search(depth=5, branching=5, budget=2 if scope.quick else 20)
    async with stand.running(report, sizes=Sizes(memory_limit_bytes=512 << 30)) as running:
        probe = {"exec": {"command": list(guest.ask("state"))}, "timeoutSeconds": 30, "failureThreshold": 120}
        await running.template(
            TEMPLATE,
            {
                "image": "builtin:gym",
                "machine": {"memory": f"{GUEST_MB}Mi", "overlay": "32Mi"},
                "command": ["python3", "-c", guest.GAME],
                "readinessProbe": probe,
            },
        )
        for pace in PACES:
            await _compare(running, report, wide, pace, forks=scope.runs(2, few=1))
        await _compare(running, report, tree, PACES[0], forks=1)


async def _compare(stand: Stand, report: Report, search: Search, pace: float, *, forks: int) -> None:
    """One search by every way. Adds rows for each, and how much less overhead forks are."""
    fixed: Params = {**search.params, "step_seconds": pace, "guest_mb": GUEST_MB}
    found: dict[str, list[Outcome]] = {}
    async with report.part(f"{fixed['search']}, steps of {pace:g} s", OVERHEAD, **fixed):
        try:
            for name, kind, sessions, runs in (
                ("replay", ByReplay, 1, 1),
                ("replay, in parallel", ByReplay, search.branching, 1),
                ("fork", ByFork, 1, forks),
            ):
                for turn in range(runs):
                    outcome = await _search(stand, search, pace, kind, sessions=sessions, turn=turn)
                    found.setdefault(name, []).append(outcome)
        finally:
            _add(report, found, fixed)
        one = found["replay"][0]
        for other in (each for outcomes in found.values() for each in outcomes):
            if other.node.state != one.node.state:
                raise Different(f"one way came to {other.node.state}, another to {one.node.state}")
        for name in ("replay", "replay, in parallel"):
            values = [found[name][0].overhead / each.overhead for each in found["fork"]]
            report.add(LESS, values, **fixed, replay=name)


async def _search(
    stand: Stand, search: Search, pace: float, kind: type[Way], *, sessions: int, turn: int
) -> Outcome:
    """In fresh sessions, which are deleted afterwards with all that the search has left."""
    stem = f"{kind.__name__.lower()}-{int(pace * 1000)}-{search.budget or 0}-{turn}"
    names = tuple(f"{stem}-{index}-of-{sessions}" for index in range(sessions))
    for name in names:
        await stand.root(name, TEMPLATE)
        await stand.api.run(name, *guest.ask("pace", str(pace)))
    await stand.settled()
    way = kind(stand.api, names)
    began = asyncio.get_running_loop().time()
    node = await search.run(way)
    wall = asyncio.get_running_loop().time() - began
    for name in names:
        await stand.api.delete(name)
    await stand.forks.none_left(deadline=stand.soon())
    return Outcome(node, way, wall)


def _add(report: Report, found: Mapping[str, Sequence[Outcome]], fixed: Params) -> None:
    for name, outcomes in found.items():
        series = Series()
        for outcome in outcomes:
            way = outcome.way
            series.add(OVERHEAD, outcome.overhead)
            series.add(WALL, outcome.wall)
            series.add(STEPS, way.steps)
            series.add(RESETS, way.resets)
            series.add(FORKS, way.forks)
        report.add_all(series, **fixed, way=name)
    for name, outcomes in found.items():
        for depth in sorted(outcomes[0].way.overhead):
            report.add(LEVEL, [each.way.overhead[depth] for each in outcomes], **fixed, level=depth, way=name)


SUITE = Suite(
    name="search",
    measures="the same searches by replay and by fork",
    run=run,
    seconds=420,
    plots=tuple(
        Plot(
            name=f"search-{int(pace * 1000)}",
            title=f"Overhead of one level of a beam search, branching 3, steps of {pace:g} s",
            figures=(LEVEL.name,),
            x="level",
            y_label="s",
            where={"search": "beam", "step_seconds": pace},
            by=("way",),
        )
        for pace in PACES
    ),
)
