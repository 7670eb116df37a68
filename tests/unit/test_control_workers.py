"""Workers: one round at a time for each object, none lost, and a failing one does not harm the others."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from forktree.errors import ForktreeError
from forktree.models import Session, Uid
from forktree_agent.control.defects import TRIES, Defects
from forktree_agent.control.objects import ObjectGone, Store
from forktree_agent.control.owners import (
    ChildMachine,
    ForkPoint,
    RootMachine,
    child_owner,
    meaning,
    point_owner,
    root_owner,
)
from forktree_agent.control.records import Records
from forktree_agent.control.waiting import SourceName, Waiting
from forktree_agent.control.workers import Workers
from forktree_agent.engine.contract import EngineError, Owner
from forktree_agent.journal import Journal
from unit.control_facts import FORK, child_record, fork_record, root, root_record

A, B = Uid("a"), Uid("b")


async def test_a_poke_during_a_round_leads_to_one_more() -> None:
    rounds: list[Uid] = []
    go_on = asyncio.Event()

    async def round_(uid: Uid) -> None:
        rounds.append(uid)
        await go_on.wait()

    async with asyncio.TaskGroup() as tasks:
        workers = Workers("test", tasks)
        workers.do(round_)
        workers.poke(A)
        await asyncio.sleep(0)
        for _ in range(5):
            workers.poke(A)
        assert rounds == [A]
        go_on.set()
    assert rounds == [A, A]


async def test_a_failing_round_is_tried_again_and_harms_no_other() -> None:
    rounds: list[Uid] = []

    async def round_(uid: Uid) -> None:
        rounds.append(uid)
        if uid == A and rounds.count(A) < 3:
            raise ForktreeError("not yet") if rounds.count(A) == 1 else ZeroDivisionError

    async with asyncio.TaskGroup() as tasks:
        workers = Workers("test", tasks)
        workers.do(round_)
        workers.poke(A)
        workers.poke(B)
    assert rounds.count(A) == 3
    assert rounds.count(B) == 1


async def test_a_halted_worker_has_ended_and_can_begin_anew() -> None:
    ended = asyncio.Event()
    rounds = 0

    async def round_(_: Uid) -> None:
        nonlocal rounds
        rounds += 1
        if rounds == 1:
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                await asyncio.sleep(0)
                ended.set()

    async with asyncio.TaskGroup() as tasks:
        workers = Workers("test", tasks)
        workers.do(round_)
        workers.poke(A)
        await asyncio.sleep(0)
        await workers.halt([A, B])
        assert ended.is_set()
        workers.poke(A)
    assert rounds == 2


async def test_a_closed_pool_ends_what_runs_and_begins_nothing() -> None:
    async def round_(_: Uid) -> None:
        await asyncio.get_running_loop().create_future()

    async with asyncio.timeout(5), asyncio.TaskGroup() as tasks:
        workers = Workers("test", tasks)
        workers.do(round_)
        workers.poke(A)
        workers.close()
        workers.poke(B)


async def test_an_engine_that_breaks_again_and_again_is_an_engine_error() -> None:
    defects = Defects()

    async def broken() -> None:
        raise ZeroDivisionError

    for _ in range(TRIES - 1):
        with pytest.raises(ZeroDivisionError):
            await defects.guarded(A, broken())
    with pytest.raises(EngineError, match="ZeroDivisionError"):
        await defects.guarded(A, broken())
    with pytest.raises(ZeroDivisionError):
        await defects.guarded(A, broken())


def versioned(version: int) -> Session:
    session = root()
    return session.model_copy(
        update={"metadata": session.metadata.model_copy(update={"resource_version": str(version)})}
    )


def test_a_store_keeps_the_newest_version_and_no_deleted_object() -> None:
    store: Store[Session] = Store()
    uid = root().metadata.uid
    assert store.observe(versioned(10))
    assert not store.observe(versioned(9))
    assert store.named("ns", "root") == versioned(10)
    store.forget(uid)
    assert store.gone(uid)
    assert not store.observe(versioned(11))
    assert store.named("ns", "root") is None


async def test_waiting_for_an_object_ends_when_it_is_there_or_gone() -> None:
    store: Store[Session] = Store()
    uid = root().metadata.uid
    deadline = asyncio.get_running_loop().time() + 5
    async with asyncio.TaskGroup() as tasks:
        first = tasks.create_task(
            store.when(uid, lambda each: each.metadata.resource_version == "2", deadline=deadline)
        )
        await asyncio.sleep(0)
        store.observe(versioned(1))
        await asyncio.sleep(0)
        assert not first.done()
        store.observe(versioned(2))
    assert first.result() == versioned(2)
    waiting = asyncio.create_task(store.when(uid, lambda _: False, deadline=deadline))
    await asyncio.sleep(0)
    store.forget(uid)
    with pytest.raises(ObjectGone):
        await waiting
    with pytest.raises(TimeoutError):
        await store.when(Uid("never"), lambda _: True, deadline=asyncio.get_running_loop().time())


def test_owner_names_mean_what_they_were_made_of() -> None:
    assert meaning(root_owner(A)) == RootMachine(A)
    assert meaning(child_owner(A, 3)) == ChildMachine(A, 3)
    assert meaning(point_owner(A)) == ForkPoint(A)
    for foreign in ("canary", "session", "session/", "fork/a/x", "fork/a/1/2", ""):
        assert meaning(Owner(foreign)) is None


def test_records_come_back_and_a_child_that_is_over_stays_known_while_its_fork_does(tmp_path: Path) -> None:
    journal = Journal.opened(tmp_path, "boot")
    records = Records(journal)
    records.put_session(root_record())
    records.put_fork(fork_record())
    records.put_session(child_record())
    records.end_session(child_owner(FORK, 0))
    records.end_session(root_record().owner)
    again = Records(Journal.opened(tmp_path, "boot"))
    assert again.fork(FORK) == fork_record()
    assert again.session(root_record().owner) is None
    child = again.session(child_owner(FORK, 0))
    assert child is not None
    assert child.ended
    again.remove_fork(FORK)
    assert Records(Journal.opened(tmp_path, "boot")).sessions() == ()


def test_a_record_of_another_version_is_dropped(tmp_path: Path) -> None:
    journal = Journal.opened(tmp_path, "boot")
    journal.put("fork", "x", {"uid": 3})
    assert Records(journal).forks() == ()
    assert journal.load("fork") == {}


def test_those_who_wait_longest_for_room_ask_first() -> None:
    waiting = Waiting()
    source = SourceName("Session", "ns", "root")
    assert waiting.for_room(B, 1.0) == 1.0
    assert waiting.for_room(A, 2.0) == 2.0
    assert waiting.for_room(B, 3.0) == 1.0
    assert waiting.on_room() == (B, A)
    assert waiting.for_source(A, source, 4.0) == 4.0
    assert waiting.on_source(source) == (A,)
    waiting.over(A)
    assert waiting.on_room() == (B,)
    assert waiting.on_source(source) == ()
