"""The demo's judge: it believes a fork only where memory, counter, file and processes all say the same."""

from __future__ import annotations

import hashlib

import pytest

from forktree_dev.demo.history import (
    Awakening,
    Contradiction,
    State,
    check_apart,
    check_consistent,
    check_continued,
    check_unmoved,
)
from forktree_dev.demo.workload.program import BLOCK_BYTES, BLOCKS


def program(
    name: str, lucks: list[int], *, awakenings: tuple[tuple[str, int], ...], note: str = "-"
) -> State:
    """A program that has drawn these numbers, and wrote `note` at its last step."""
    memory, digest, total, history = bytearray(BLOCKS * BLOCK_BYTES), "", 0, list[str]()
    for step, luck in enumerate(lucks, start=1):
        total += luck
        words = f"{step} {luck:08x} {total} {note if step == len(lucks) else '-'}"
        digest = hashlib.sha256(f"{digest} {words}".encode()).hexdigest()
        at = step % BLOCKS * BLOCK_BYTES
        memory[at : at + 32] = bytes.fromhex(digest)
        history.append(f"{words} {digest}")
    return State(
        name=name,
        step=len(lucks),
        total=total,
        digest=digest,
        memory_sha256=hashlib.sha256(memory).hexdigest(),
        pids=(50, 51),
        connection=(4000, 5000),
        awakenings=tuple(Awakening(name=name, step=step) for name, step in awakenings),
        slowest_step_ms=100.0,
        history=tuple(history),
    )


ROOT = (("root", 1),)
BEFORE = program("root", [3, 1, 4, 1], awakenings=ROOT)
AFTER = program("root", [3, 1, 4, 1, 5, 9], awakenings=ROOT)
CHILD = program("child", [3, 1, 4, 1, 5, 77], awakenings=(*ROOT, ("child", 5)), note="left")
SIBLING = program("sibling", [3, 1, 4, 1, 5, 88], awakenings=(*ROOT, ("sibling", 5)), note="right")


def test_a_true_fork_is_believed() -> None:
    for state in (BEFORE, AFTER, CHILD, SIBLING):
        check_consistent(state)
    assert check_continued(CHILD, BEFORE, AFTER).at_step == 5
    check_unmoved(BEFORE, AFTER)
    check_apart([CHILD, SIBLING], ["left", "right"])


@pytest.mark.parametrize(
    ("what", "changed"),
    [
        ("memory", {"memory_sha256": "0" * 64}),
        ("counter", {"total": 12}),
        ("length of its file", {"step": 5}),
        ("line 2", {"history": (AFTER.history[0], AFTER.history[2])}),
        ("running hash", {"digest": "0" * 64}),
    ],
)
def test_state_that_disagrees_with_itself_is_found(what: str, changed: dict[str, object]) -> None:
    with pytest.raises(Contradiction, match=what):
        check_consistent(AFTER.model_copy(update=changed))


@pytest.mark.parametrize(
    ("what", "child"),
    [
        ("its past", program("child", [3, 1, 4, 1, 6], awakenings=(*ROOT, ("child", 5)))),
        ("never noticed", program("child", [3, 1, 4, 1, 5], awakenings=ROOT)),
        ("forked between", program("child", [3, 1, 4], awakenings=(*ROOT, ("child", 3)))),
        ("its forks before", program("child", [3, 1, 4, 1, 5], awakenings=(("child", 5),))),
        ("its processes", CHILD.model_copy(update={"pids": (60, 61)})),
        ("its connection", CHILD.model_copy(update={"connection": (1, 2)})),
    ],
)
def test_a_child_that_did_not_go_on_is_found(what: str, child: State) -> None:
    with pytest.raises(Contradiction, match=what):
        check_continued(child, BEFORE, AFTER)


@pytest.mark.parametrize(
    "change",
    [
        {"pids": (50, 52)},
        {"connection": (4000, 5001)},
        {"awakenings": (*AFTER.awakenings, Awakening(name="x", step=5))},
        {"history": AFTER.history[1:]},
    ],
)
def test_a_parent_that_noticed_is_found(change: dict[str, object]) -> None:
    with pytest.raises(Contradiction):
        check_unmoved(BEFORE, AFTER.model_copy(update=change))


def test_a_sibling_with_anothers_note_is_found() -> None:
    with pytest.raises(Contradiction, match="what it was told"):
        check_apart([CHILD, SIBLING], ["right", "left"])
