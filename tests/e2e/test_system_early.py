"""Forks over HTTP in a whole system: answered when the children run, recorded afterwards, whatever comes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from e2e.whole import SECONDS, Whole
from forktree_dev.system import Artifacts, System

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest_asyncio.fixture(loop_scope="session")
async def whole(whole: Whole) -> Whole:
    """With a session to fork."""
    await whole.template()
    await whole.session()
    await whole.sh("root", "echo kept > /tmp/file")
    return whole


async def fork(
    whole: Whole, session: str, body: dict[str, object], key: str | None = None
) -> tuple[int, Any]:
    url = f"{whole.node.url}/ns/{whole.namespace}/v1/sessions/{session}/fork"
    headers = {} if key is None else {"Idempotency-Key": key}
    async with whole.http.post(url, json=body, headers=headers) as answer:
        return answer.status, await answer.json()


def names(forked: dict[str, Any]) -> list[str]:
    return [each["session_id"] for each in forked["children"]]


async def recorded(whole: Whole, forked: dict[str, Any]) -> None:
    """Wait until everything of a fork is there, and see that it is there once."""
    async with asyncio.timeout(SECONDS):
        while f"fork/{forked['fork_id']}" not in await whole.names():  # noqa: ASYNC110  # kubectl asks no sooner.
            await asyncio.sleep(0.1)
    await whole.wait("fork", forked["fork_id"], f"jsonpath={{.status.recorded}}={len(names(forked))}")
    status = await whole.status("fork", forked["fork_id"])
    assert status["ready"] is True
    assert [each["name"] for each in status["children"]] == names(forked)
    assert status["phase"] == "Complete"
    for name in names(forked):
        await whole.ready("session", name)


async def test_children_are_used_forked_and_deleted_as_soon_as_they_are_told_of(whole: Whole) -> None:
    before = whole.machines()
    status, forked = await fork(whole, "root", {"replicas": 2})
    assert status == 201, forked
    assert forked["recorded"] is False
    assert "ready_time_ms" not in forked
    assert 0 < forked["pause_time_ms"] < forked["fork_time_ms"] < forked["total_time_ms"]
    one, two = names(forked)
    status, info = await whole.get(f"sessions/{two}")
    assert (status, info["session_id"]) == (200, two)
    said = await asyncio.gather(*(whole.sh(each, "hostname; cat /tmp/file") for each in (one, two)))
    assert said == [f"{one}\nkept\n", f"{two}\nkept\n"]
    status, below = await fork(whole, one, {})
    assert status == 201, below
    assert await whole.sh(below["session_id"], "cat /tmp/file") == "kept\n"
    await recorded(whole, forked)
    await recorded(whole, below)
    async with whole.http.delete(f"{whole.node.url}/ns/{whole.namespace}/v1/sessions/{one}") as answer:
        assert answer.status == 200
    await whole.gone("session", one, below["session_id"])
    assert len(whole.machines() - before) == 1


async def test_a_key_makes_the_call_repeatable(whole: Whole) -> None:
    before = whole.machines()
    (first, one), (second, two) = await asyncio.gather(
        fork(whole, "root", {"replicas": 2}, "a key"), fork(whole, "root", {"replicas": 2}, "a key")
    )
    assert {first, second} == {200, 201}
    assert names(one) == names(two)
    status, refused = await fork(whole, "root", {"replicas": 1}, "a key")
    assert (status, refused["code"]) == (409, "conflict")
    assert "Idempotency-Key" in refused["message"]
    await recorded(whole, one)
    status, three = await fork(whole, "root", {"replicas": 2}, "a key")
    assert (status, names(three)) == (200, names(one))
    assert three["recorded"] is True
    status, refused = await fork(whole, names(one)[0], {"replicas": 2}, "a key")
    assert (status, refused["code"]) == (409, "conflict")
    assert len(whole.machines() - before) == 2
    status, refused = await fork(whole, "root", {"name": "both"}, "a key")
    assert (status, refused["code"]) == (400, "bad_request")


async def test_who_asks_to_wait_is_answered_when_all_is_recorded(whole: Whole) -> None:
    status, forked = await whole.post("sessions/root/fork?record=wait", {"replicas": 2})
    assert status == 201, forked
    assert forked["recorded"] is True
    assert forked["ready_time_ms"] >= forked["fork_time_ms"]
    assert {f"session/{each}" for each in names(forked)} <= await whole.names()
    status, refused = await whole.post("sessions/root/fork?record=never", {})
    assert (status, refused["code"]) == (400, "bad_request")


async def test_a_killed_agent_records_what_it_had_answered(whole: Whole) -> None:
    status, forked = await fork(whole, "root", {"replicas": 2})
    assert status == 201, forked
    await whole.crash_agent()
    await recorded(whole, forked)
    for name in names(forked):
        assert await whole.sh(name, "hostname; cat /tmp/file") == f"{name}\nkept\n"
    assert len([each for each in await whole.names() if each.startswith("fork/")]) == 1


async def test_while_the_api_server_is_away_children_are_forked_and_used(
    artifacts: Artifacts, tmp_path: Path
) -> None:
    async with System.running(tmp_path, artifacts=artifacts) as system:
        await system.kubectl.run("create", "namespace", "away")
        async with Whole.using(system, "away") as whole:
            await whole.template()
            await whole.session()
            await whole.sh("root", "echo kept > /tmp/file")
            plane = system.control_plane
            assert plane is not None
            # So that it is known for some seconds that he who asks may.
            status, first = await fork(whole, "root", {})
            assert status == 201, first
            await plane.api_server.kill()
            status, forked = await fork(whole, "root", {"replicas": 2, "name": "meanwhile"})
            assert (status, forked["recorded"]) == (201, False), forked
            status, again = await fork(whole, "root", {"replicas": 2, "name": "meanwhile"})
            assert (status, names(again)) == (200, names(forked))
            plane.api_server.start()
            await plane.ready(deadline=asyncio.get_running_loop().time() + SECONDS)
            for part in (system.operator, plane.controller_manager):
                part.start()  # Both end themselves when they cannot renew their Lease, to be started again.
            await recorded(whole, first)
            await recorded(whole, forked)
            for name in names(forked):
                assert await whole.sh(name, "hostname; cat /tmp/file") == f"{name}\nkept\n"
