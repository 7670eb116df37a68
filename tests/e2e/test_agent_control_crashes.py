"""Control dies at every single step that leaves a trace, and the next one makes good.

A step is what comes before and after each record, each write to the API server and each call of the engine.
Dying means that nothing that comes later has any effect, as with `kill -9`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from e2e.control_rig import BOOT, ControlRig
from forktree.kube.access import ClusterAccess
from forktree.kube.client import KubeClient
from forktree.models import Fork, ForkPhase, ForkSpec, Reason, Session, SessionPhase
from forktree.models.fork import Branch, BranchExec, ForkSource, Prune, Scorer, SourceRef
from forktree_agent.control import forks
from forktree_agent.control.control import Control
from forktree_agent.engine.contract import Command, ExecResult, Owner
from forktree_agent.journal import Journal, Json
from forktree_agent.metrics import Metrics
from forktree_dev.control_plane import ControlPlane
from unit.fake_engine import FakeEngine

MOST_STEPS = 400


class Killed(BaseException):
    """What everything that control does meets once it is dead."""


class Life:
    """Counts steps, and ends at the one it is told."""

    def __init__(self, dies_at: int) -> None:
        self._dies_at = dies_at
        self.steps = 0
        self.last = ""

    @property
    def dead(self) -> bool:
        return self.steps >= self._dies_at

    def step(self, what: str) -> None:
        if not self.dead:
            self.steps += 1
            self.last = what
        if self.dead:
            raise Killed


class MortalJournal(Journal):
    """A journal whose writer can die before and after each write."""

    life: Life

    def put(self, kind: str, key: str, record: Mapping[str, Json]) -> None:
        self.life.step(f"before put {kind}")
        super().put(kind, key, record)
        self.life.step(f"after put {kind}")

    def remove(self, kind: str, key: str) -> None:
        self.life.step(f"before remove {kind}")
        super().remove(kind, key)
        self.life.step(f"after remove {kind}")


class MortalClient(KubeClient):
    """A client whose user can die before each write, or after it and before the answer is seen."""

    life: Life

    async def raw(
        self,
        method: str,
        path: str,
        body: Mapping[str, object] | None = None,
        *,
        query: Mapping[str, str] | None = None,
        content_type: str = "application/json",
        deadline: float | None = None,
    ) -> bytes:
        if method != "GET":
            self.life.step(f"before {method} {path}")
        elif self.life.dead:
            raise Killed
        answer = await super().raw(
            method, path, body, query=query, content_type=content_type, deadline=deadline
        )
        if method != "GET":
            self.life.step(f"after {method} {path}")
        return answer


@pytest.fixture
async def rig(control_plane: ControlPlane, namespace: str, tmp_path: Path) -> AsyncIterator[ControlRig]:
    async with ControlRig.running(control_plane, namespace, tmp_path) as rig:
        await rig.running_session("warm")  # So that each life begins with a baked template.
        yield rig


@pytest.fixture
async def mortal(rig: ControlRig) -> AsyncIterator[MortalClient]:
    access = ClusterAccess.from_kubeconfig(rig.folder / "agent.kubeconfig")
    async with MortalClient.connected(access) as client:
        assert isinstance(client, MortalClient)
        yield client


async def live(
    rig: ControlRig,
    client: MortalClient,
    life: Life,
    done: Callable[[], Awaitable[object]],
    *,
    commands: Callable[[Owner, Command], Awaitable[ExecResult]] | None = None,
) -> None:
    """Control runs until it is dead, or until `done` says that all is done."""
    journal = MortalJournal.opened(rig.folder / "journal", BOOT)
    journal.life = client.life = life
    rig.engine = FakeEngine(rig.host, hook=life.step)
    if commands is not None:
        rig.engine.commands = commands
    adoption = await rig.engine.adopt(deadline=0)

    async def run() -> None:
        async with Control.running(
            rig.settings,
            client=client,
            engine=rig.engine,
            journal=journal,
            adoption=adoption,
            metrics=Metrics(),
        ):
            await asyncio.get_running_loop().create_future()

    living = asyncio.create_task(run(), name="life")
    waiting = asyncio.create_task(_until_done(done), name="done")
    await asyncio.wait([living, waiting], return_when=asyncio.FIRST_COMPLETED)
    for task in (living, waiting):
        task.cancel()
        with suppress(BaseExceptionGroup, asyncio.CancelledError, Killed):
            await task


async def _until_done(done: Callable[[], Awaitable[object]]) -> None:
    await done()


async def grown(rig: ControlRig, root: str, split: str) -> None:
    """Wait until the fork of the root has both children."""
    await rig.until(Session, root, _is_ready)
    fork = await rig.until(Fork, split, lambda each: each.status.recorded == 2)
    for child in fork.status.children:
        await rig.until(Session, child.name, _is_ready)


def _is_ready(session: Session) -> bool:
    return session.status.ready


async def shrunk(rig: ControlRig) -> None:
    """Wait until only the first session is left, with all that speaks of it."""
    await rig.machines(1)
    await rig.eventually(lambda: len(rig.host.points) == 1, lambda: rig.host.points)
    folder = rig.folder / "journal"
    await rig.eventually(
        lambda: len(list(folder.glob("session/*"))) == 1 and not list(folder.glob("fork/*")),
        lambda: list(folder.glob("*/*")),
    )


@pytest.mark.parametrize("many", [forks.MANY_FORKS, 1], ids=["told-first", "told-with-children"])
async def test_a_tree_grows_whole_whenever_control_dies(
    rig: ControlRig, mortal: MortalClient, monkeypatch: pytest.MonkeyPatch, many: int
) -> None:
    monkeypatch.setattr(forks, "MANY_FORKS", many)  # As on a node that does nothing else, and on a busy one.
    deaths: list[str] = []
    for dies_at in range(1, MOST_STEPS):
        await rig.stop()
        root, split = f"root-{dies_at}", f"split-{dies_at}"
        await rig.session(root)
        await rig.fork(split, session=root, replicas=2)
        life = Life(dies_at)

        await live(rig, mortal, life, partial(grown, rig, root, split))
        seen = {each.metadata.uid: each for each in (await rig.user.list(Session, rig.namespace)).items}
        answered = await rig.get(Fork, split)

        rig.engine = FakeEngine(rig.host)
        await rig.start()
        await grown(rig, root, split)
        fork = await rig.get(Fork, split)
        fork = await rig.until(Fork, split, lambda each: each.status.phase is ForkPhase.COMPLETE)
        if answered.status.parent_uid is not None:
            assert fork.status.fork_point_id == answered.status.fork_point_id, life.last
        assert len(rig.host.machines) == 4, life.last
        owners = [each.owner for each in rig.host.machines.values()]
        assert len(set(owners)) == len(owners), life.last
        for session in (await rig.user.list(Session, rig.namespace)).items:
            before = seen.get(session.metadata.uid)
            if before is not None and before.status.ready:
                assert session.status.vm_generation_id == before.status.vm_generation_id, life.last
        await rig.delete(Session, root)
        await rig.machines(1)
        await rig.eventually(lambda: len(rig.host.points) == 1, lambda: rig.host.points)
        deaths.append(life.last)
        if not life.dead:
            break
    assert len(deaths) > 20, deaths


async def test_branches_are_run_judged_and_pruned_once_whenever_control_dies(
    rig: ControlRig, mortal: MortalClient
) -> None:
    async def answer(owner: Owner, command: Command) -> ExecResult:
        printed = b"1" if owner.endswith("/0") else b"2"
        return ExecResult(stdout=printed, stderr=b"", exit_code=0, timed_out=False, truncated=False)

    spec = ForkSpec(
        source=ForkSource(session=SourceRef(name="warm")),
        replicas=2,
        branches=tuple(Branch(exec=BranchExec(argv=("act",))) for _ in range(2)),
        score=Scorer(exec=BranchExec(argv=("score",))),
        prune=Prune(keep_top=1),
    )
    deaths: list[str] = []
    for dies_at in range(1, MOST_STEPS):
        await rig.stop()
        name = f"search-{dies_at}"
        created = await rig.branched(name, spec)
        life = Life(dies_at)

        await live(rig, mortal, life, partial(completed, rig, name), commands=answer)
        told = await rig.get(Fork, name)
        rig.engine = FakeEngine(rig.host)
        rig.engine.commands = answer
        await rig.start()
        fork = await completed(rig, name)
        ran = [(owner, argv) for owner, argv in rig.host.ran if created.metadata.uid in owner]
        assert len(set(ran)) == len(ran), life.last
        running = [each for each in fork.status.children if each.phase is SessionPhase.RUNNING]
        assert len(running) == 1, life.last
        cut = [each for each in fork.status.children if each.reason is Reason.INTERRUPTED]
        assert len(cut) <= 2, life.last
        scored = {each.index: each.score for each in fork.status.children if each.score is not None}
        assert scored.items() <= {0: 1.0, 1: 2.0}.items(), life.last
        assert all(each.score is not None or each in cut for each in fork.status.children), life.last
        if scored:
            assert fork.status.best == running[0].name, life.last
            assert running[0].index == max(scored), life.last
        if told.status.phase is ForkPhase.COMPLETE:
            assert told.status.best == fork.status.best, life.last
        await rig.machines(2)
        await rig.delete(Fork, name)
        await rig.machines(1)
        deaths.append(life.last)
        if not life.dead:
            break
    assert len(deaths) > 30, deaths


async def completed(rig: ControlRig, name: str) -> Fork:
    return await rig.until(Fork, name, lambda each: each.status.phase is ForkPhase.COMPLETE)


async def test_a_tree_goes_whole_whenever_control_dies(rig: ControlRig, mortal: MortalClient) -> None:
    deaths: list[str] = []
    for dies_at in range(1, MOST_STEPS):
        root, split = f"root-{dies_at}", f"split-{dies_at}"
        await rig.running_session(root)
        children = await rig.forked(split, session=root, replicas=2)
        await rig.forked(f"lower-{dies_at}", session=children[0].metadata.name)
        await rig.stop()
        await rig.delete(Session, root)
        life = Life(dies_at)

        await live(rig, mortal, life, partial(shrunk, rig))
        rig.engine = FakeEngine(rig.host)
        await rig.start()
        await shrunk(rig)
        deaths.append(life.last)
        if not life.dead:
            break
    assert len(deaths) > 5, deaths
