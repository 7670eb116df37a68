"""A thousand forks and prunes in random order and nesting, against a model of the tree.

API server, garbage collector, watches and control are real; only the machines are not. After each round all
is compared: the same objects, the same machines and instants, the same lineage. In the end nothing is left.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest

from e2e.control_rig import ControlRig
from e2e.tree_model import ForkNode, Model, Node, SessionNode, subtree
from forktree.kube.client import Propagation
from forktree.kube.errors import NotFound
from forktree.models import Fork, ForkPhase, ForkSpec, ObjectMeta, Session, Uid
from forktree.models.fork import ForkSource, KeepPoint, SourceRef
from forktree.models.names import ROOT_LABEL
from forktree.models.session_template import TreeLimits
from forktree_agent.engine.contract import Owner
from forktree_dev.control_plane import ControlPlane

STEPS = 1000
TREES = 8
SIZE = 120
"""Objects above which a round prunes more than it forks."""
SETTLE_SECONDS = 180.0
"""The collector takes its time on a busy machine. Until it has been by, nobody may end what it orphans."""
Listed = TypeVar("Listed", Session, Fork)
PROPAGATIONS: tuple[Propagation, ...] = ("Background", "Background", "Foreground", "Orphan")


@pytest.fixture
async def rig(operator_plane: ControlPlane, tmp_path: Path) -> AsyncIterator[ControlRig]:
    """Where no operator runs: one would place these roots on a real node."""
    namespace = f"model-{secrets.token_hex(4)}"
    await operator_plane.kubectl.run("create", "namespace", namespace)
    async with ControlRig.running(operator_plane, namespace, tmp_path) as rig:
        await rig.stop()
        rig.settings = replace(rig.settings, sweep_seconds=5.0)
        rig.engine.capacity = 100_000
        await rig.template("wide", limits=TreeLimits(depth=1024))
        await rig.start()
        yield rig


class Walk:
    """One random walk: what is done to the cluster is done to the model."""

    def __init__(self, rig: ControlRig, seed: int) -> None:
        self.rig = rig
        self.model = Model()
        self.random = random.Random(seed)
        self.number = 0
        self.steps = 0
        self.history: list[str] = []

    # Steps ------------------------------------------------------------------------------------------------

    def name(self, kind: str) -> str:
        self.number += 1
        return f"{kind}{self.number}"

    async def grow(self) -> None:
        """Another root."""
        name = self.name("r")
        root = await self.rig.running_session(name, "wide")
        self.model.root(name, root.metadata.uid)
        self.history.append(f"root {name}")

    async def fork(self, source: Node) -> None:
        """Fork a session, or an earlier instant again."""
        self.steps += 1
        name, replicas = self.name("f"), self.random.choice([0, 1, 1, 2, 2, 3])
        always = self.random.random() < 0.5
        self.history.append(f"fork {name} from {source.name} x{replicas} always={always}")
        made = await self.create(source, name, replicas, always=always)
        await self.rig.route(made)
        self.model.fork(source, name, made.metadata.uid, replicas, always=always)

    async def create(self, source: Node, name: str, replicas: int, *, always: bool) -> Fork:
        reference = SourceRef(name=source.name)
        by_session = isinstance(source, SessionNode)
        return await self.rig.user.create(
            Fork(
                metadata=ObjectMeta(name=name, namespace=self.rig.namespace),
                spec=ForkSpec(
                    source=ForkSource(session=reference) if by_session else ForkSource(fork=reference),
                    replicas=replicas,
                    keep_point=KeepPoint.ALWAYS if always else KeepPoint.WHILE_CHILDREN,
                ),
            )
        )

    async def prune(self, node: Node) -> None:
        self.steps += 1
        how = self.random.choice(PROPAGATIONS)
        self.history.append(f"prune {node.name} {how}")
        kind = Session if isinstance(node, SessionNode) else Fork
        self.model.prune(node, orphan=how == "Orphan")
        await self.rig.user.delete(kind, self.rig.namespace, node.name, uid=node.uid, propagation=how)

    async def race(self, node: SessionNode) -> None:
        """Fork a session and delete it in the same moment: the fork is whole, or it is not."""
        self.steps += 2
        name, replicas = self.name("x"), self.random.choice([0, 2])
        how = self.random.choice(PROPAGATIONS)
        self.history.append(f"race {name} from {node.name} x{replicas} against {how}")
        source = SourceRef(name=node.name)
        self.model.prune(node, orphan=how == "Orphan")
        late = self.random.random() * 0.03

        async def forking() -> Fork | None:
            created = await self.create(node, name, replicas, always=True)
            try:
                return await self.rig.route(created)
            except NotFound:
                return None

        async def pruning() -> None:
            await asyncio.sleep(late)
            await self.rig.user.delete(
                Session, self.rig.namespace, source.name, uid=node.uid, propagation=how
            )

        fork, _ = await asyncio.gather(forking(), pruning())
        if fork is not None and await self.outcome(name) is not None:
            # It was whole before its source went, and lives on by itself as all that hung there did.
            assert how == "Orphan", f"{name} runs although its source was deleted"
            made = self.model.fork(node, name, fork.metadata.uid, replicas, always=True)
            node.forks.remove(made)
            made.above = None
            self.model.tops.append(made)

    async def outcome(self, name: str) -> Fork | None:
        """The fork if it came to be. One that failed is deleted: nobody else would."""
        deadline = asyncio.get_running_loop().time() + SETTLE_SECONDS
        while True:
            try:
                fork = await self.rig.get(Fork, name)
            except NotFound:
                return None
            if fork.status.phase is ForkPhase.FAILED:
                with suppress(NotFound):  # It may have been adopted by then, and collected.
                    await self.rig.delete(Fork, name)
                return None
            if fork.status.ready and not fork.metadata.deleting and not fork.metadata.owner_references:
                return fork
            assert asyncio.get_running_loop().time() < deadline, f"{name} stands at {fork.status}"
            await asyncio.sleep(0.05)

    # Rounds -----------------------------------------------------------------------------------------------

    async def round(self) -> None:
        """One thing in each tree, or some things that cannot get in each other's way; all at once."""
        steps: list[Awaitable[None]] = []
        while len(self.model.tops) < TREES:
            await self.grow()
        full = sum(1 for _ in self.model.nodes()) > SIZE
        for top in list(self.model.tops):
            steps += self.steps_in(list(subtree(top)), full=full)
        restart = self.random.random() < 0.06
        if restart:
            self.history.append("the agent is restarted")
            steps.append(self.rig.restart())
        await asyncio.gather(*steps)
        await self.settled()

    def steps_in(self, nodes: list[Node], *, full: bool) -> list[Awaitable[None]]:
        drawn = self.random.random()
        sessions = [node for node in nodes if isinstance(node, SessionNode)]
        if drawn < 0.06 and sessions:
            return [self.race(self.random.choice(sessions))]
        if drawn < (0.6 if full else 0.25):
            return [self.prune(self.random.choice(nodes))]
        sources = [node for node in nodes if isinstance(node, SessionNode) or node.held]
        count = min(len(sources), self.random.choice([1, 1, 2]))
        return [self.fork(source) for source in self.random.sample(sources, count)]

    async def settled(self) -> None:
        """Wait until the cluster is what the model says; fail with the differences."""
        deadline = asyncio.get_running_loop().time() + SETTLE_SECONDS
        while differences := await self.differences():
            assert asyncio.get_running_loop().time() < deadline, "\n".join(
                [*differences[:20], "after:", *self.history[-30:]]
            )
            await asyncio.sleep(0.05)

    async def differences(self) -> list[str]:
        if unlike_machines := self.machine_differences():
            return unlike_machines  # Seen without asking anybody, so asked first.
        sessions = {each.metadata.name: each for each in await self.listed(Session)}
        forks = {each.metadata.name: each for each in await self.listed(Fork)}
        wanted_sessions, wanted_forks = self.model.sessions(), self.model.forks()
        found = [
            *named("sessions", set(sessions), set(wanted_sessions)),
            *named("forks", set(forks), set(wanted_forks)),
        ]
        if found:
            return found
        for name, node in wanted_sessions.items():
            node.uid = node.uid or sessions[name].metadata.uid
            found += session_differences(node, sessions[name])
        for name, fork in wanted_forks.items():
            found += fork_differences(fork, forks[name])
        return found + self.machine_differences()  # They may have changed while we listed.

    def machine_differences(self) -> list[str]:
        host = self.rig.host
        running = {machine.owner: Uid(machine.tree) for machine in host.machines.values()}
        wanted = self.model.machines()
        points = {point.owner for point in host.points.values() if point.tree is not None}
        return [
            *named("machines", set(running), set(wanted)),
            *named("instants", set(points), set(self.model.points())),
            *(f"{owner} is in tree {tree}" for owner, tree in running.items() if wanted.get(owner) != tree),
        ]

    async def listed(self, kind: type[Listed]) -> tuple[Listed, ...]:
        return (await self.rig.user.list(kind, self.rig.namespace)).items

    async def cleared(self) -> None:
        """Delete all there is, top by top in a random order and manner; nothing is left of it."""
        tops = list(self.model.tops)
        self.random.shuffle(tops)
        for top in tops:
            kind = Session if isinstance(top, SessionNode) else Fork
            how = self.random.choice(PROPAGATIONS[1:3])
            await self.rig.user.delete(kind, self.rig.namespace, top.name, propagation=how)
            self.model.prune(top, orphan=False)
        await self.settled()


def named(what: str, found: set[Owner] | set[str], wanted: set[Owner] | set[str]) -> list[str]:
    return [
        *(f"{what}: {name} should not be there" for name in sorted(found - wanted)),
        *(f"{what}: {name} is missing" for name in sorted(wanted - found)),
    ]


def session_differences(node: SessionNode, session: Session) -> list[str]:
    status = session.status
    said = {
        "uid": session.metadata.uid,
        "ready": status.ready,
        "root": status.root,
        "parent": status.parent,
        "depth": status.depth,
        "owners": tuple(each.uid for each in session.metadata.owner_references),
        "deleting": session.metadata.deleting,
        "label": session.metadata.labels.get(ROOT_LABEL),
    }
    wanted = {
        "uid": node.uid,
        "ready": True,
        "root": node.root,
        "parent": node.parent,
        "depth": node.depth,
        "owners": () if node.above is None else (node.above.uid,),
        "deleting": False,
        "label": None if node.depth == 0 else node.root,
    }
    return unlike(f"session {node.name}", said, wanted)


def fork_differences(node: ForkNode, fork: Fork) -> list[str]:
    status = fork.status
    said = {
        "uid": fork.metadata.uid,
        "ready": status.ready,
        "root": status.root,
        "parentUID": status.parent_uid,
        "depth": status.depth,
        "recorded": status.recorded,
        "replicas": status.replicas,
        "running": status.ready_replicas,
        "owners": tuple(each.uid for each in fork.metadata.owner_references),
        "deleting": fork.metadata.deleting,
        "label": fork.metadata.labels.get(ROOT_LABEL),
    }
    wanted = {
        "uid": node.uid,
        "ready": True,
        "root": node.root,
        "parentUID": node.above_uid,
        "depth": node.depth,
        "recorded": node.replicas,
        "replicas": node.replicas,
        "running": len(node.children),
        "owners": () if node.above is None else (node.above_uid,),
        "deleting": False,
        "label": node.root,
    }
    return unlike(f"fork {node.name}", said, wanted)


def unlike(what: str, said: Mapping[str, object], wanted: Mapping[str, object]) -> list[str]:
    return [
        f"{what}: {key} is {said[key]!r} and should be {wanted[key]!r}"
        for key in wanted
        if said[key] != wanted[key]
    ]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [20_261_129])
async def test_a_thousand_forks_and_prunes_leave_what_the_model_says_and_nothing_else(
    rig: ControlRig, seed: int
) -> None:
    walk = Walk(rig, seed)
    while walk.steps < STEPS:
        await walk.round()
    await walk.cleared()
    assert rig.control is not None
    world = rig.control.world
    await rig.eventually(
        lambda: not world.records.sessions() and not world.records.forks() and not world.tree.nodes(),
        lambda: (world.records.sessions(), world.records.forks(), world.tree.nodes()),
    )
    assert not rig.host.machines
    started = [order.owner for order in rig.host.orders]
    assert len(started) == len(set(started)), "a child was started twice"
