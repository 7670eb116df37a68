"""The HTTP API's objects in a whole system: a search over HTTP alone, in real machines."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
import pytest_asyncio

from e2e.whole import SECONDS, Whole

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest_asyncio.fixture(loop_scope="session")
async def whole(whole: Whole) -> Whole:
    """With a session `root` of a small template, opened over HTTP."""
    await whole.template()
    body: dict[str, object] = {
        "template_id": "tiny",
        "name": "root",
        "seed": "s",
        "env": {"WAY": "none"},
        "labels": {"a": "b"},
    }
    status, opened = await whole.post("sessions", body)
    assert status == 201, opened
    return whole


async def ok(whole: Whole, path: str, body: dict[str, object]) -> dict[str, Any]:
    status, answer = await whole.post(path, body)
    assert status in {200, 201}, answer
    return answer


async def test_a_search_goes_on_from_the_best_branch_and_back_to_a_checkpoint(whole: Whole) -> None:
    assert await whole.sh("root", "echo $FORKTREE_SEED $WAY") == "s none\n"
    branches = [
        {"name": name, "env": {"WAY": name}, "exec": {"command": f"echo {score} > /tmp/won; exit {code}"}}
        for name, score, code in (("left", 1, 0), ("right", 5, 0), ("wrong", 9, 3))
    ]
    forked = await ok(
        whole,
        "sessions/root/fork?wait=complete",
        {"branches": branches, "score": {"command": "cat /tmp/won"}, "labels": {"step": "1"}},
    )
    left, best, _ = (each["session_id"] for each in forked["children"])
    assert (forked["best_session_id"], forked["best_score"]) == (best, 5.0)
    assert [each["exit_code"] for each in forked["children"]] == [0, 0, 3]
    assert [each["branch"] for each in forked["children"]] == ["left", "right", "wrong"]
    _, info = await whole.get(f"sessions/{best}")
    assert (info["score"], info["labels"], info["root"]) == (5.0, {"step": "1"}, "root")

    await whole.sh(best, "echo before > /tmp/state")
    held = await ok(whole, f"sessions/{best}/checkpoints", {"name": "good"})
    assert held["available"] is True
    await whole.sh(best, "echo after > /tmp/state")
    back = await ok(whole, f"sessions/{best}/rollback", {"checkpoint": "good", "release": True})
    assert back["parent_session_id"] == best
    assert await whole.sh(back["session_id"], "cat /tmp/state; echo $WAY") == "before\nright\n"
    assert (await whole.get(f"sessions/{best}"))[1]["phase"] == "Released"

    _, tree = await whole.get(f"sessions/{left}/tree?memory=1")
    assert tree["root_session_id"] == "root"
    assert tree["totals"] | {"point_bytes": 0} == {"sessions": 5, "live": 4, "depth": 2, "point_bytes": 0}
    assert tree["totals"]["point_bytes"] > 0
    assert [bool(each.get("unique_bytes")) for each in tree["sessions"]] == [
        each["session_id"] != best for each in tree["sessions"]
    ]
    assert {each["fork_id"] for each in tree["forks"]} == {
        forked["fork_id"], held["fork_id"], back["fork_id"],
    }  # fmt: skip


async def test_children_that_come_first_have_the_labels_that_were_asked_for(whole: Whole) -> None:
    forked = await ok(whole, "sessions/root/fork", {"replicas": 2, "labels": {"team": "x"}, "name": "quick"})
    assert forked["recorded"] is False
    names = [each["session_id"] for each in forked["children"]]
    for name in names:  # A number for a child waits for its object.
        assert (await ok(whole, f"sessions/{name}/score", {"score": 1}))["labels"] == {"team": "x"}
    _, found = await whole.get("sessions?label=team=x&root=root")
    assert [each["session_id"] for each in found] == names
    again: dict[str, object] = {"replicas": 2, "labels": {"team": "x"}, "name": "quick"}
    status, answer = await whole.post("sessions/root/fork", again)
    assert (status, [each["session_id"] for each in answer["children"]]) == (200, names)
    status, answer = await whole.post("sessions/root/fork", again | {"labels": {"team": "y"}})
    assert (status, answer["code"]) == (409, "conflict")
    done = await ok(whole, "batch/exec", {"session_ids": [*names, "none"], "exec": {"command": "hostname"}})
    assert [each.get("exec", {}).get("stdout") for each in done["results"]] == [
        *(f"{each}\n" for each in names),
        None,
    ]
    done = await ok(whole, "batch/prune", {"session_ids": names})
    assert [each["deleted"] for each in done["results"]] == [True, True]
    await whole.gone("session", *names)


async def test_a_paused_session_stands_still_until_it_is_resumed(whole: Whole) -> None:
    assert (await ok(whole, "sessions/root/pause", {}))["phase"] == "Paused"
    status, refused = await whole.post("sessions/root/exec", {"command": "true"})
    assert (status, refused["code"]) == (409, "not_ready")
    assert (await ok(whole, "sessions/root/resume", {}))["phase"] == "Running"
    assert await whole.sh("root", "echo on") == "on\n"


async def test_a_watched_tree_shows_a_fork_as_it_happens(whole: Whole) -> None:
    url = f"{whole.node.url}/ns/{whole.namespace}/v1/sessions/root/tree?watch=1"
    async with asyncio.timeout(SECONDS), whole.http.get(url) as answer:
        lines = aiter(answer.content)
        seen = [json.loads(await anext(lines)) for _ in range(2)]
        assert [each["type"] for each in seen] == ["session", "synced"]
        forked = await ok(whole, "sessions/root/fork", {"name": "seen"})
        (child,) = (each["session_id"] for each in forked["children"])
        told: dict[str, Any] = {}
        while told.get("session", {}).get("session_id") != child or not told["session"]["ready"]:
            told = json.loads(await anext(lines))
        assert (told["session"]["parent_session_id"], told["session"]["fork_id"]) == ("root", "seen")
        async with whole.http.delete(f"{whole.node.url}/ns/{whole.namespace}/v1/sessions/{child}") as deleted:
            assert deleted.status == 200
        while told != {"type": "gone", "kind": "session", "id": child}:
            told = json.loads(await anext(lines))


@pytest.mark.timeout(240)
async def test_a_tree_whose_heartbeat_is_silent_goes(whole: Whole) -> None:
    heard = await ok(whole, "sessions/root/heartbeat", {"ttl_seconds": 5})
    assert heard == {"root_session_id": "root", "renew_within_secs": 5.0}
    await whole.gone("session", "root")
    await whole.gone("lease", "root-heartbeat")
