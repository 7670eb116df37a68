"""What becomes of branches: their commands, scores, pruning, seeds, and the instant they came from."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from e2e.control_rig import ControlRig
from forktree.kube.errors import AlreadyExists
from forktree.models import Fork, ForkPhase, ForkSpec, Reason, Session, SessionPhase
from forktree.models.conditions import ConditionType, find, holds
from forktree.models.fork import (
    Branch,
    BranchExec,
    ForkSource,
    KeepPoint,
    Prune,
    Scorer,
    SeedMode,
    SourceRef,
)
from forktree.models.session_template import EnvVar
from forktree_agent.control.branch_logs import Printed
from forktree_agent.control.branch_records import Step
from forktree_agent.control.owners import ChildMachine, child_owner, meaning
from forktree_agent.engine.contract import Command, CommandRefused, ExecResult, Owner
from forktree_dev.control_plane import ControlPlane

SCORER = Scorer(exec=BranchExec(argv=("score",)))
ROOT = ForkSource(session=SourceRef(name="root"))


@pytest.fixture
async def rig(control_plane: ControlPlane, namespace: str, tmp_path: Path) -> AsyncIterator[ControlRig]:
    async with ControlRig.running(control_plane, namespace, tmp_path) as rig:
        await rig.running_session("root")
        yield rig


def said(stdout: str = "", *, exit_code: int = 0) -> ExecResult:
    return ExecResult(
        stdout=stdout.encode(), stderr=b"", exit_code=exit_code, timed_out=exit_code == -1, truncated=False
    )


def scores(rig: ControlRig, *printed: str) -> None:
    """Have each child's scorer print this, and its own command end well."""

    async def answer(owner: Owner, command: Command) -> ExecResult:
        child = meaning(owner)
        assert isinstance(child, ChildMachine)
        return said(printed[child.index] if command.argv == ("score",) else "acted")

    rig.engine.commands = answer


async def complete(rig: ControlRig, name: str) -> Fork:
    return await rig.until(Fork, name, lambda each: holds(each.status.conditions, ConditionType.COMPLETE))


async def test_a_fork_without_branches_is_complete_when_it_is_recorded(rig: ControlRig) -> None:
    await rig.branched("plain", ForkSpec(source=ROOT, replicas=2))
    fork = await complete(rig, "plain")
    assert fork.status.phase is ForkPhase.COMPLETE
    assert (fork.status.ready, fork.status.recorded, fork.status.best) == (True, 2, None)
    await rig.branched("point", ForkSpec(source=ROOT, replicas=0))
    assert (await complete(rig, "point")).status.children == ()


async def test_branches_run_are_scored_and_the_losers_go_but_what_they_did_stays(rig: ControlRig) -> None:
    scores(rig, "1\n", "3\n", "so:\n2.5\n")
    branches = tuple(
        Branch(name=name, labels={"team": name}, exec=BranchExec(argv=("act", name))) for name in "abc"
    )
    await rig.branched(
        "search",
        ForkSpec(source=ROOT, replicas=3, branches=branches, score=SCORER, prune=Prune(keep_top=1)),
    )
    fork = await complete(rig, "search")
    children = fork.status.children
    assert [each.score for each in children] == [1.0, 3.0, 2.5]
    assert [each.branch for each in children] == ["a", "b", "c"]
    assert [each.exit_code for each in children] == [0, 0, 0]
    assert [each.phase for each in children] == [
        SessionPhase.RELEASED,
        SessionPhase.RUNNING,
        SessionPhase.RELEASED,
    ]
    assert [each.reason for each in children] == [Reason.PRUNED, None, Reason.PRUNED]
    assert (fork.status.best, fork.status.best_score) == (children[1].name, 3.0)
    await rig.machines(2)  # The root and the winner.
    winner = await rig.until(Session, children[1].name, lambda each: each.status.score == 3.0)
    assert winner.metadata.labels["team"] == "b"
    for loser in (children[0], children[2]):
        await rig.gone(Session, loser.name)
    assert rig.control is not None
    logs = rig.control.world.logs
    assert logs.get(fork.metadata.uid, 0, Step.EXEC) == Printed(b"acted", b"")
    assert logs.get(fork.metadata.uid, 0, Step.SCORE) == Printed(b"1\n", b"")
    assert [command for _, command in rig.host.ran].count(("score",)) == 3


async def test_what_goes_wrong_in_a_branch_leaves_its_child_without_a_score_and_no_more(
    rig: ControlRig,
) -> None:
    async def answer(owner: Owner, command: Command) -> ExecResult:
        match command.argv[0]:
            case "absent":
                raise CommandRefused("there is no program absent")
            case "hangs":
                return said(exit_code=-1)
            case "fails":
                return said(exit_code=3)
            case "score":
                child = meaning(owner)
                assert isinstance(child, ChildMachine)
                return said({3: "nan", 4: "1 2", 5: "", 6: "0.5"}[child.index])
            case _:
                return said("acted")

    rig.engine.commands = answer
    programs = ("absent", "hangs", "fails", "ok", "ok", "ok", "ok")
    branches = tuple(Branch(exec=BranchExec(argv=(program,))) for program in programs)
    await rig.branched(
        "trouble",
        ForkSpec(source=ROOT, replicas=7, branches=branches, score=SCORER, prune=Prune(keep_top=3)),
    )
    fork = await complete(rig, "trouble")
    assert fork.status.phase is ForkPhase.COMPLETE
    assert [each.reason for each in fork.status.children] == [
        Reason.EXEC_NOT_STARTED,
        Reason.EXEC_TIMED_OUT,
        Reason.EXEC_FAILED,
        Reason.NO_SCORE,
        Reason.NO_SCORE,
        Reason.NO_SCORE,
        None,
    ]
    assert [each.exit_code for each in fork.status.children] == [None, -1, 3, 0, 0, 0, 0]
    assert [each.score for each in fork.status.children] == [None] * 6 + [0.5]
    assert fork.status.best == fork.status.children[6].name
    kept = [each.index for each in fork.status.children if each.phase is SessionPhase.RUNNING]
    assert kept == [0, 1, 6]  # The scored one, and of those without a score the first.
    assert "child 2: the branch's command ended with exit code 3" in (fork.status.message or "")


async def test_ties_are_kept_by_index(rig: ControlRig) -> None:
    scores(rig, "1", "2", "2", "2")
    await rig.branched("ties", ForkSpec(source=ROOT, replicas=4, score=SCORER, prune=Prune(keep_top=2)))
    fork = await complete(rig, "ties")
    alive = [each.index for each in fork.status.children if each.phase is SessionPhase.RUNNING]
    assert (alive, fork.status.best) == ([1, 2], fork.status.children[1].name)


async def test_a_loser_that_was_forked_already_is_kept(rig: ControlRig) -> None:
    go_on = asyncio.Event()

    async def answer(owner: Owner, command: Command) -> ExecResult:
        await go_on.wait()
        return said("1" if owner.endswith("/0") else "2")

    rig.engine.commands = answer
    fork = await rig.branched(
        "search", ForkSpec(source=ROOT, replicas=3, score=SCORER, prune=Prune(keep_top=1))
    )
    running = await rig.until(Fork, "search", lambda each: each.status.recorded == 3)
    assert running.status.phase is ForkPhase.RUNNING
    assert not holds(running.status.conditions, ConditionType.COMPLETE)
    loser = running.status.children[0].name
    await rig.until(Session, loser, lambda each: each.status.ready)
    (below,) = await rig.forked("below", session=loser)
    go_on.set()
    fork = await complete(rig, "search")
    assert [each.phase for each in fork.status.children] == [
        SessionPhase.RUNNING,
        SessionPhase.RUNNING,
        SessionPhase.RELEASED,
    ]
    assert fork.status.best == fork.status.children[1].name
    assert (await rig.get(Session, below.metadata.name)).status.ready


async def test_a_users_score_counts_before_a_scorers(rig: ControlRig) -> None:
    go_on = asyncio.Event()

    async def answer(owner: Owner, command: Command) -> ExecResult:
        await go_on.wait()
        return said("1")

    rig.engine.commands = answer
    await rig.branched("search", ForkSpec(source=ROOT, replicas=2, score=SCORER, prune=Prune(keep_top=1)))
    running = await rig.until(Fork, "search", lambda each: each.status.recorded == 2)
    chosen = running.status.children[1].name
    await rig.user.merge_patch(Session, rig.namespace, chosen, {"spec": {"score": 7}})
    await rig.until(Fork, "search", lambda each: each.status.best_score == 7)
    go_on.set()
    fork = await complete(rig, "search")
    assert (fork.status.best, fork.status.best_score) == (chosen, 7.0)
    assert fork.status.children[0].phase is SessionPhase.RELEASED


async def test_children_are_told_their_seed_branch_and_environment(rig: ControlRig) -> None:
    branches = (
        Branch(name="left", env=(EnvVar(name="MODE", value="a"), EnvVar(name="FORKTREE_SEED", value="x"))),
        Branch(name="right", seed="mine"),
    )
    await rig.branched(
        "told",
        ForkSpec(source=ROOT, replicas=2, branches=branches, seed="s", seed_mode=SeedMode.COMMON),
    )
    fork = await complete(rig, "told")
    assert [each.seed for each in fork.status.children] == ["s", "mine"]
    left, right = rig.host.orders[-2:]
    assert (left.env["FORKTREE_SEED"], left.env["FORKTREE_BRANCH"], left.env["MODE"]) == ("s", "left", "a")
    assert (right.env["FORKTREE_SEED"], right.env["FORKTREE_BRANCH"]) == ("mine", "right")
    assert "MODE" not in right.env
    session = await rig.get(Session, fork.status.children[0].name)
    assert session.spec.seed == "s"
    # What a session was told, all below it are told.
    (below,) = await rig.forked("below", session=session.metadata.name)
    assert rig.host.orders[-1].env["MODE"] == "a"
    assert rig.host.orders[-1].env["FORKTREE_BRANCH"] == ""
    again = ForkSpec(source=ForkSource(fork=SourceRef(name="below")), seed_mode=SeedMode.COMMON)
    await rig.branched("again", again)
    # The instant is that of the left child, so its seed is what they have in common.
    assert [each.seed for each in (await complete(rig, "again")).status.children] == ["s"]
    assert rig.host.orders[-1].env["MODE"] == "a"
    assert below.spec.seed not in {None, "s"}


async def test_a_command_that_was_cut_off_with_its_agent_is_not_run_again(rig: ControlRig) -> None:
    never = asyncio.Event()

    async def answer(owner: Owner, command: Command) -> ExecResult:
        if command.argv[0] == "hangs":
            await never.wait()
        return said("1")

    rig.engine.commands = answer
    branches = (Branch(exec=BranchExec(argv=("hangs",))), Branch(exec=BranchExec(argv=("acts",))))
    await rig.branched("cut", ForkSpec(source=ROOT, replicas=2, branches=branches, score=SCORER))
    await rig.eventually(lambda: len(rig.host.ran) == 3, lambda: rig.host.ran)
    await rig.stop()
    rig.engine.commands = answer
    await rig.restart()
    fork = await complete(rig, "cut")
    assert [each.reason for each in fork.status.children] == [Reason.INTERRUPTED, None]
    assert [each.score for each in fork.status.children] == [None, 1.0]
    assert sorted(argv[0] for _, argv in rig.host.ran) == ["acts", "hangs", "score"]


async def test_a_fork_deleted_while_its_branches_run_leaves_nothing(rig: ControlRig) -> None:
    never = asyncio.Event()

    async def answer(owner: Owner, command: Command) -> ExecResult:
        if owner.endswith("/0"):
            return said("1")
        await never.wait()
        raise AssertionError

    rig.engine.commands = answer
    fork = await rig.branched("gone", ForkSpec(source=ROOT, replicas=3, score=SCORER))
    await rig.eventually(lambda: len(rig.host.ran) == 3, lambda: rig.host.ran)
    await rig.delete(Fork, "gone")
    await rig.machines(1)
    journal = rig.folder / "journal"
    await rig.eventually(
        lambda: not list(journal.glob("branch/*")) and not list(journal.glob("fork/*")),
        lambda: list(journal.glob("*/*")),
    )
    assert not (rig.folder / "branch-logs" / fork.metadata.uid).exists()
    assert len(rig.host.ran) == 3


async def test_a_child_deleted_while_its_command_runs_does_not_hold_up_the_others(rig: ControlRig) -> None:
    released = asyncio.Event()

    async def answer(owner: Owner, command: Command) -> ExecResult:
        if owner.endswith("/0"):
            while any(each.owner == owner for each in rig.engine.machines()):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            released.set()
            raise CommandRefused("the machine is gone")
        return said("1")

    rig.engine.commands = answer
    await rig.branched("search", ForkSpec(source=ROOT, replicas=2, score=SCORER, prune=Prune(keep_top=1)))
    running = await rig.until(Fork, "search", lambda each: each.status.recorded == 2)
    await rig.delete(Session, running.status.children[0].name)
    fork = await complete(rig, "search")
    assert released.is_set()
    assert fork.status.best == fork.status.children[1].name
    assert [each.phase for each in fork.status.children] == [SessionPhase.RELEASED, SessionPhase.RUNNING]


async def test_an_instant_is_let_go_with_the_last_that_came_from_it(rig: ControlRig) -> None:
    (one,) = await rig.forked("split", session="root")
    (two,) = await rig.forked("again", fork="split")
    point = (await rig.get(Fork, "split")).status.fork_point_id
    await rig.delete(Session, one.metadata.name)
    await rig.gone(Session, one.metadata.name)
    assert any(each.id == point for each in rig.host.points.values())
    await rig.delete(Session, two.metadata.name)
    await rig.eventually(
        lambda: all(each.id != point for each in rig.host.points.values()), lambda: rig.host.points
    )
    for name in ("split", "again"):
        fork = await rig.until(
            Fork, name, lambda each: not holds(each.status.conditions, ConditionType.POINT_AVAILABLE)
        )
        assert fork.status.phase is ForkPhase.COMPLETE
    held = find((await rig.get(Fork, "split")).status.conditions, ConditionType.POINT_AVAILABLE)
    assert held is not None
    assert held.reason == "NoChildren"
    await rig.fork("late", fork="split")
    late = await rig.until(Fork, "late", lambda each: each.status.phase is ForkPhase.FAILED)
    assert late.status.reason is Reason.POINT_LOST


async def test_an_instant_is_held_while_something_still_wants_it(rig: ControlRig) -> None:
    await rig.branched("kept", ForkSpec(source=ROOT, keep_point=KeepPoint.ALWAYS))
    await rig.branched("checkpoint", ForkSpec(source=ROOT, replicas=0))
    await rig.branched("split", ForkSpec(source=ROOT))
    from_split = ForkSource(fork=SourceRef(name="split"))
    await rig.branched("alias", ForkSpec(source=from_split, replicas=0))
    for name in ("kept", "split"):
        (child,) = (await complete(rig, name)).status.children
        await rig.delete(Session, child.name)
        await rig.gone(Session, child.name)
    await complete(rig, "alias")
    await rig.machines(1)
    for name in ("kept", "checkpoint", "split"):
        await rig.forked(f"more-{name}", fork=name)
    point = (await rig.get(Fork, "split")).status.fork_point_id
    (child,) = (await rig.get(Fork, "more-split")).status.children
    await rig.delete(Session, child.name)
    await rig.gone(Session, child.name)
    assert any(each.id == point for each in rig.host.points.values())
    await rig.delete(Fork, "alias")
    await rig.eventually(
        lambda: all(each.id != point for each in rig.host.points.values()), lambda: rig.host.points
    )


async def test_a_fork_has_its_own_time_for_room_and_for_its_source(rig: ControlRig) -> None:
    rig.engine.capacity = 1
    await rig.branched("room", ForkSpec(source=ROOT, timeout_seconds=2))
    rig.engine.go_on.clear()
    await rig.template("other")
    await rig.session("slow", "other")
    await rig.branched(
        "source", ForkSpec(source=ForkSource(session=SourceRef(name="slow")), timeout_seconds=2)
    )
    room = await rig.until(Fork, "room", lambda each: each.status.phase is ForkPhase.FAILED)
    assert room.status.reason is Reason.AT_CAPACITY
    assert "timeoutSeconds of 2 s" in (room.status.message or "")
    source = await rig.until(Fork, "source", lambda each: each.status.phase is ForkPhase.FAILED)
    assert source.status.reason is Reason.DEADLINE_EXCEEDED
    condition = find(source.status.conditions, ConditionType.COMPLETE)
    assert condition is not None
    assert condition.reason == Reason.DEADLINE_EXCEEDED
    rig.engine.go_on.set()


async def test_a_fork_of_a_name_that_is_taken_is_refused_and_made_again_it_is_another(
    rig: ControlRig,
) -> None:
    scores(rig, "1", "2")
    first = await rig.branched("again", ForkSpec(source=ROOT, replicas=2, score=SCORER))
    done = await complete(rig, "again")
    with pytest.raises(AlreadyExists):
        await rig.branched("again", ForkSpec(source=ROOT, replicas=2))
    await rig.delete(Fork, "again")
    await rig.gone(Fork, "again")
    second = await rig.branched("again", ForkSpec(source=ROOT, replicas=2, score=SCORER))
    again = await complete(rig, "again")
    assert second.metadata.uid != first.metadata.uid
    assert not {each.name for each in done.status.children} & {each.name for each in again.status.children}
    assert [each.score for each in again.status.children] == [1.0, 2.0]
    await rig.machines(3)
    owners = {each.owner for each in rig.host.machines.values()}
    assert {child_owner(second.metadata.uid, index) for index in range(2)} < owners
