"""Between the demo's halves: a beam search by objects only, and what its winner costs without forks.

The objects are those of `examples/beam-search`, so whoever watches can do the same by hand.
"""

from __future__ import annotations

import asyncio

from pydantic import BaseModel, ConfigDict
from rich.table import Table

from forktree.models import Fork, Session
from forktree.models.conditions import ConditionType, holds
from forktree_dev.checkout import CHECKOUT
from forktree_dev.demo import manifests
from forktree_dev.demo.history import Contradiction
from forktree_dev.demo.report import ForkClocks
from forktree_dev.demo.stage import WAIT_SECONDS, DemoFailed, Stage

ROOT = "lake"
DEPTH = 6
"""Steps from the start of this lake to its goal."""

STEPS = 4
"""How many steps `search` tells about."""

_LAKE = CHECKOUT / "examples" / "beam-search" / "lake.yaml"
_STEP = _LAKE.with_name("step.yaml")


class Game(BaseModel):
    """What the environment program in a machine says of itself."""

    model_config = ConfigDict(frozen=True)

    observation: int
    actions: tuple[int, ...]
    total: float
    ended: bool
    history: str
    """Digest over every observation and reward on the way."""
    random: str
    """Digest of the random generator: what may come is equal too."""


async def begin(stage: Stage) -> None:
    """Ask for the lake. It becomes ready while something else is shown."""
    await stage.apply_text(_LAKE.read_text())


async def search(stage: Stage) -> None:
    """Find the way over the lake, and reach the winner's state again: by a fork, and by replay.

    Raises `DemoFailed`, or `Contradiction` when the three are not equal.
    """
    winner = await _climb(stage)
    game = await _look(stage, winner.metadata.name)
    if not game.ended or game.total <= 0:
        raise DemoFailed(f"the winner is not at the goal: {game}")
    forked_seconds = await _fork_again(stage, winner, game)
    with stage.narrator.step(f"kubectl delete session {ROOT}: the search is over"):
        await _remove(stage)
    replay_seconds = await _replay(stage, winner, game)
    stage.narrator.say(
        f"the winner's state once more: {forked_seconds:.1f} s by a fork,"
        f" {replay_seconds:.1f} s by a clean start and its {len(game.actions)} actions; all equal"
    )
    stage.report.replay_seconds = round(replay_seconds, 3)


async def _climb(stage: Stage) -> Session:
    """The last winner."""
    forks: list[Fork] = []
    title = f"kubectl apply, {DEPTH} times: three branches, each scored, the best one kept and forked again"
    with stage.narrator.step(title, total=DEPTH) as step:
        root = await stage.until(Session, ROOT, lambda session: session.status.ready)
        winner = ROOT
        for number in range(1, DEPTH + 1):
            await stage.apply_text(_STEP.read_text().replace("STEP", str(number)).replace("WINNER", winner))
            fork = await stage.until(Fork, f"step-{number}", _complete)
            if fork.status.best is None:
                raise DemoFailed(f"no branch of step-{number} has a score")
            winner = fork.status.best
            forks.append(fork)
            step.reached(number)
        session = await stage.until(Session, winner, lambda session: session.status.ready)
    stage.report.forks += [ForkClocks.of(fork) for fork in forks]
    stage.narrator.show(_table(forks))
    await _check_pruned(stage, root)
    return session


def _complete(fork: Fork) -> bool:
    return holds(fork.status.conditions, ConditionType.COMPLETE)


async def _check_pruned(stage: Stage, root: Session) -> None:
    """The root and the winners are left, and of the rest nothing but what the Forks say about it."""
    sessions, _ = await stage.cluster.list(Session, manifests.NAMESPACE)
    left = [each for each in sessions if each.status.root == root.metadata.uid]
    if len(left) != 1 + DEPTH:
        raise DemoFailed(f"{len(left)} sessions of the search are left, not {1 + DEPTH}")
    depths = sorted(each.status.depth or 0 for each in left)
    stage.narrator.say(f"depth {depths[-1]} reached; {2 * DEPTH} losing branches are pruned, {len(left)} run")


async def _fork_again(stage: Stage, winner: Session, game: Game) -> float:
    """Seconds until another machine was where the winner is, from asking for it."""
    began = asyncio.get_running_loop().time()
    with stage.narrator.step("kubectl apply: fork the winner once more"):
        await stage.apply(manifests.fork("again", winner.metadata.name, 1))
        fork = await stage.until(Fork, "again", lambda fork: fork.status.ready and bool(fork.status.recorded))
        _check_equal("the winner's child", await _look(stage, fork.status.children[0].name), game)
    stage.report.forks.append(ForkClocks.of(fork))
    return asyncio.get_running_loop().time() - began


async def _replay(stage: Stage, winner: Session, game: Game) -> float:
    """Seconds until a machine that shares nothing with the tree was where the winner is.

    The template is gone, and with it the frozen instant that its sessions start from: so this boots.
    """
    began = asyncio.get_running_loop().time()
    with stage.narrator.step("the same without a fork: boot anew, and replay the winner's actions"):
        await stage.apply_text(_LAKE.read_text())
        clean = await stage.until(Session, ROOT, lambda session: session.status.ready)
        await stage.commands.run(ROOT, "gym-ask", "step", *(str(action) for action in game.actions))
        _check_equal("the clean start", await _look(stage, ROOT), game)
    seconds = asyncio.get_running_loop().time() - began
    if clean.status.baseline_id != winner.status.baseline_id:
        raise Contradiction("the clean start has another baseline id than the tree that it repeats")
    await _remove(stage)
    return seconds


async def _remove(stage: Stage) -> None:
    """The whole tree and its template, and wait until no object of the tree is there."""
    here = f"--namespace={manifests.NAMESPACE}"
    await stage.system.kubectl.run(
        "delete", "session", ROOT, here, "--cascade=foreground", timeout_seconds=WAIT_SECONDS
    )
    await stage.system.kubectl.run("delete", "sessiontemplate", ROOT, here)


async def _look(stage: Stage, session: str) -> Game:
    return Game.model_validate_json(await stage.commands.run(session, "gym-ask", "state"))


def _check_equal(whose: str, seen: Game, expected: Game) -> None:
    if seen != expected:
        raise Contradiction(f"the state of {whose} is {seen}, and the winner's is {expected}")


def _table(forks: list[Fork]) -> Table:
    table = Table("step", title="scores", title_justify="left")
    for child in forks[0].status.children:
        table.add_column(child.branch or child.name, justify="right")
    table.add_column("went on with")
    for number, fork in enumerate(forks, start=1):
        children = fork.status.children
        scores = ["-" if child.score is None else f"{child.score:.3f}" for child in children]
        best = next(child.branch or child.name for child in children if child.name == fork.status.best)
        table.add_row(str(number), *scores, best)
    return table
