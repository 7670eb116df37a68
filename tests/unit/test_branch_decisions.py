"""What is decided about branches, as tables: which command is next, what its end means, who goes."""

from __future__ import annotations

import hashlib
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forktree.models import Reason
from forktree.models.fork import (
    Branch,
    BranchExec,
    Fork,
    ForkSource,
    ForkSpec,
    Scorer,
    SeedMode,
    SourceRef,
)
from forktree_agent.control.branch_records import BranchRecord, CommandRecord, Step
from forktree_agent.control.decide_branch import (
    CutOff,
    Done,
    Next,
    Run,
    cut_off,
    ended,
    next_step,
    no_machine,
    not_ended,
    score_in,
)
from forktree_agent.control.decide_prune import Candidate, best, judge
from forktree_agent.control.patience import seconds_left
from forktree_agent.control.seeds import seeds_of
from forktree_agent.engine.contract import (
    AtCapacity,
    CommandRefused,
    DeadlineExceeded,
    EngineError,
    ExecResult,
    MachineGone,
    MachinePaused,
)
from unit.control_facts import FORK, NOW, fork

ACT = BranchExec(argv=("act",))
LOOK = BranchExec(argv=("look",))
BRANCH, SCORER = Branch(exec=ACT), Scorer(exec=LOOK)
WELL = CommandRecord(ended=True, exit_code=0)
BADLY = CommandRecord(ended=True, exit_code=3, reason=Reason.EXEC_FAILED)
BEGUN = CommandRecord()


def record(act: CommandRecord | None = None, look: CommandRecord | None = None) -> BranchRecord:
    return BranchRecord(fork=FORK, index=0, exec=act, score=look)


@pytest.mark.parametrize(
    ("branch", "scorer", "known", "expected"),
    [
        (Branch(), None, None, Done()),
        (BRANCH, None, None, Run(Step.EXEC, ACT)),
        (BRANCH, SCORER, None, Run(Step.EXEC, ACT)),
        (Branch(), SCORER, None, Run(Step.SCORE, LOOK)),
        (BRANCH, SCORER, record(BEGUN), CutOff(Step.EXEC)),
        (BRANCH, SCORER, record(WELL), Run(Step.SCORE, LOOK)),
        (BRANCH, None, record(WELL), Done()),
        (BRANCH, SCORER, record(BADLY), Done()),
        (BRANCH, SCORER, record(cut_off(Step.EXEC)), Done()),
        (BRANCH, SCORER, record(no_machine(Step.EXEC)), Done()),
        (BRANCH, SCORER, record(WELL, BEGUN), CutOff(Step.SCORE)),
        (BRANCH, SCORER, record(WELL, WELL), Done()),
        (BRANCH, SCORER, record(WELL, cut_off(Step.SCORE)), Done()),
    ],
)
def test_the_next_command_of_a_branch(
    branch: Branch, scorer: Scorer | None, known: BranchRecord | None, expected: Next
) -> None:
    assert next_step(branch, scorer, known) == expected


@pytest.mark.parametrize(
    ("printed", "score"),
    [
        (b"1", 1.0),
        (b"1\n", 1.0),
        (b"0.25\r\n", 0.25),
        (b"noise\n-3e-2\n\n", -0.03),
        (b"\xff\xfe\n.5", 0.5),
        (b"  7  ", 7.0),
        (b"+7.", 7.0),
        (b"", None),
        (b"\n", None),
        (b"1\nwell done\n", None),
        (b"NaN\n", None),
        (b"inf\n", None),
        (b"-Infinity\n", None),
        (b"1e999\n", None),
        (b"1 2\n", None),
        (b"1,2\n", None),
        (b"score: 1\n", None),
        (b"1_000\n", None),
        (b"0x10\n", None),
        (b"\xd9\xa1\n", None),  # A digit, but not one of ours.
        (b"1" * 65, None),
    ],
)
def test_a_score_is_one_finite_number_and_all_of_the_last_line(printed: bytes, score: float | None) -> None:
    assert score_in(printed) == score


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_what_a_program_prints_as_a_number_is_that_number(number: float) -> None:
    assert score_in(f"text\n{number!r}\n".encode()) == number


@given(st.binary(max_size=200))
def test_no_output_whatever_breaks_the_judge(printed: bytes) -> None:
    assert score_in(printed) is None or isinstance(score_in(printed), float)


def result(
    stdout: bytes = b"", *, exit_code: int = 0, timed_out: bool = False, end_lost: bool = False
) -> ExecResult:
    return ExecResult(
        stdout=stdout,
        stderr=b"",
        exit_code=exit_code,
        timed_out=timed_out,
        truncated=end_lost,
        end_lost=end_lost,
    )


@pytest.mark.parametrize(
    ("step", "outcome", "reason", "exit_code", "number"),
    [
        (Step.EXEC, result(b"5"), None, 0, None),
        (Step.EXEC, result(exit_code=3), Reason.EXEC_FAILED, 3, None),
        (Step.EXEC, result(exit_code=137), Reason.EXEC_FAILED, 137, None),
        (Step.EXEC, result(exit_code=-1, timed_out=True), Reason.EXEC_TIMED_OUT, -1, None),
        (Step.EXEC, result(end_lost=True), None, 0, None),
        (Step.SCORE, result(b"5"), None, 0, 5.0),
        (Step.SCORE, result(b"5", exit_code=1), Reason.NO_SCORE, 1, None),
        (Step.SCORE, result(b"5", exit_code=-1, timed_out=True), Reason.NO_SCORE, -1, None),
        (Step.SCORE, result(b"five"), Reason.NO_SCORE, 0, None),
        (Step.SCORE, result(b"5", end_lost=True), Reason.NO_SCORE, 0, None),
    ],
)
def test_what_the_end_of_a_command_means(
    step: Step, outcome: ExecResult, reason: Reason | None, exit_code: int, number: float | None
) -> None:
    noted, printed = ended(step, outcome)
    assert (noted.ended, noted.reason, noted.exit_code, printed) == (True, reason, exit_code, number)
    assert (noted.message is None) is (reason is None)


@pytest.mark.parametrize(
    ("step", "error", "reason", "exit_code"),
    [
        (Step.EXEC, CommandRefused("there is no such file"), Reason.EXEC_NOT_STARTED, None),
        (Step.EXEC, AtCapacity("too many"), Reason.EXEC_NOT_STARTED, None),
        (Step.EXEC, MachinePaused("stands still"), Reason.EXEC_NOT_STARTED, None),
        (Step.EXEC, DeadlineExceeded("late"), Reason.EXEC_TIMED_OUT, -1),
        (Step.EXEC, MachineGone("gone"), Reason.INTERRUPTED, None),
        (Step.SCORE, CommandRefused("there is no such file"), Reason.NO_SCORE, None),
        (Step.SCORE, DeadlineExceeded("late"), Reason.NO_SCORE, -1),
        (Step.SCORE, MachineGone("gone"), Reason.INTERRUPTED, None),
    ],
)
def test_what_it_means_that_a_command_did_not_end(
    step: Step, error: EngineError, reason: Reason, exit_code: int | None
) -> None:
    noted = not_ended(step, error)
    assert (noted.ended, noted.reason, noted.exit_code) == (True, reason, exit_code)
    assert noted.message


def candidate(
    index: int, score: float | None, *, alive: bool = True, present: bool = True, forked: bool = False
) -> Candidate:
    return Candidate(index=index, score=score, alive=alive, present=present, forked=forked)


@pytest.mark.parametrize(
    ("candidates", "keep", "losers"),
    [
        ([candidate(0, 1), candidate(1, 3), candidate(2, 2)], 1, (0, 2)),
        ([candidate(0, 1), candidate(1, 3), candidate(2, 2)], 2, (0,)),
        ([candidate(0, 1), candidate(1, 3)], 5, ()),
        ([candidate(0, 1), candidate(1, 3)], None, ()),
        # Of equals the lower index is kept.
        ([candidate(0, 1), candidate(1, 1), candidate(2, 1)], 2, (2,)),
        # Without a score is lowest, below any number.
        ([candidate(0, None), candidate(1, -1e9), candidate(2, None)], 2, (2,)),
        # Who was forked already is kept, and takes nobody's place.
        ([candidate(0, 1, forked=True), candidate(1, 2), candidate(2, 3)], 1, (1,)),
        # Who does not live cannot go on, however good, and goes unless somebody lives below.
        ([candidate(0, 9, alive=False), candidate(1, 2), candidate(2, 1)], 1, (0, 2)),
        ([candidate(0, 9, alive=False, forked=True), candidate(1, 2)], 1, ()),
        ([candidate(0, 9, alive=False, present=False), candidate(1, 2)], 1, ()),
        ([], 1, ()),
    ],
)
def test_who_is_pruned(candidates: list[Candidate], keep: int | None, losers: tuple[int, ...]) -> None:
    verdict = judge(candidates, keep)
    assert verdict.losers == losers
    assert verdict.lost == tuple(each.index for each in candidates if not each.alive)
    assert verdict.pruned is (keep is None)


@given(
    st.lists(st.tuples(st.none() | st.integers(0, 3), st.booleans(), st.booleans()), max_size=12),
    st.integers(1, 12),
)
def test_so_many_are_kept_and_nobody_better_goes(
    children: list[tuple[int | None, bool, bool]], keep: int
) -> None:
    candidates = [
        candidate(index, score, alive=alive, forked=forked)
        for index, (score, alive, forked) in enumerate(children)
    ]
    losers = judge(candidates, keep).losers
    kept = [each for each in candidates if each.alive and each.index not in losers]
    alive = [each for each in candidates if each.alive]
    assert len(kept) >= min(keep, len(alive))
    assert sum(not each.forked for each in kept) <= keep

    def rank(each: Candidate) -> float:
        return float("-inf") if each.score is None else each.score

    worst = min((rank(each) for each in kept if not each.forked), default=float("inf"))
    assert all(rank(candidates[index]) <= worst for index in losers if candidates[index].alive)


@pytest.mark.parametrize(
    ("scores", "out", "expected"),
    [
        ([], set[int](), None),
        ([(0, None), (1, None)], set[int](), None),
        ([(0, 1.0), (1, 2.0)], set[int](), (1, 2.0)),
        ([(1, 2.0), (0, 2.0)], set[int](), (0, 2.0)),
        ([(0, 1.0), (1, 2.0)], {1}, (0, 1.0)),
        ([(0, -5.0), (1, None)], set[int](), (0, -5.0)),
    ],
)
def test_the_best_is_the_first_of_the_highest(
    scores: list[tuple[int, float | None]], out: set[int], expected: tuple[int, float] | None
) -> None:
    assert best(scores, out) == expected


def spec(mode: SeedMode = SeedMode.FRESH, seed: str | None = None, own: str | None = None) -> ForkSpec:
    branches = (Branch(seed=own), Branch(), Branch())
    source = ForkSource(session=SourceRef(name="root"))
    return ForkSpec(source=source, replicas=3, branches=branches, seed=seed, seed_mode=mode)


def test_fresh_seeds_are_all_different_and_a_branchs_own_wins() -> None:
    seeds = {*seeds_of(spec(), "parent"), *seeds_of(spec(), "parent")}
    assert len(seeds) == 6
    assert all(len(each) == 16 for each in seeds)
    assert seeds_of(spec(own="mine"), "parent")[0] == "mine"


def test_common_seeds_are_the_given_one_or_the_parents() -> None:
    assert seeds_of(spec(SeedMode.COMMON, "s"), "parent") == ("s", "s", "s")
    assert seeds_of(spec(SeedMode.COMMON), "parent") == ("parent",) * 3
    assert seeds_of(spec(SeedMode.COMMON, "s", own="mine"), "parent") == ("mine", "s", "s")
    assert len(set(seeds_of(spec(SeedMode.COMMON), None))) == 1


def test_derived_seeds_follow_from_seed_and_index() -> None:
    expected = tuple(hashlib.sha256(f"s:{index}".encode()).hexdigest()[:16] for index in range(3))
    assert seeds_of(spec(SeedMode.DERIVED, "s"), "parent") == expected
    assert seeds_of(spec(SeedMode.DERIVED), "s") == expected
    assert seeds_of(spec(SeedMode.DERIVED), "s") == seeds_of(spec(SeedMode.DERIVED), "s")


@pytest.mark.parametrize(
    ("age_seconds", "left"), [(0, 300), (100, 200), (-50, 300), (299, 1), (300, 300), (5000, 300)]
)
def test_the_time_of_a_fork_counts_from_its_creation_as_far_as_clocks_can_be_believed(
    age_seconds: float, left: float
) -> None:
    asked = _aged(fork(), age_seconds)
    assert seconds_left(asked, NOW) == left


def _aged(asked: Fork, seconds: float) -> Fork:
    created = NOW - timedelta(seconds=seconds)
    metadata = asked.metadata.model_copy(update={"creation_timestamp": created})
    return asked.model_copy(update={"metadata": metadata})
