"""Branches on the whole system: real commands in real machines, scored, pruned, and read after their end."""

from __future__ import annotations

from typing import Any

import pytest
import pytest_asyncio

from e2e.whole import Whole, until

pytestmark = pytest.mark.asyncio(loop_scope="session")

MIB = 1 << 20


@pytest_asyncio.fixture(loop_scope="session")
async def whole(whole: Whole) -> Whole:
    """With a session `root` of a small template."""
    await whole.template()
    await whole.session()
    return whole


def sh(script: str, timeout_seconds: int = 60) -> dict[str, object]:
    return {"argv": ["/bin/sh", "-c", script], "timeoutSeconds": timeout_seconds}


async def search(whole: Whole, name: str, scripts: list[str], **spec: object) -> dict[str, Any]:
    """Fork the root into one branch for each script, and return the status once it is complete."""
    branches = [{"name": f"b{index}", "exec": sh(script)} for index, script in enumerate(scripts)]
    await whole.apply(
        "Fork",
        name,
        {"source": {"session": {"name": "root"}}, "replicas": len(scripts), "branches": branches} | spec,
    )
    await whole.wait("fork", name, "condition=Complete")
    return await whole.status("fork", name)


async def log(whole: Whole, fork: str, index: int) -> dict[str, Any]:
    url = f"{whole.node.url}/ns/{whole.namespace}/v1/forks/{fork}/children/{index}/log"
    async with whole.http.get(url) as answer:
        assert answer.status == 200, await answer.text()
        body: dict[str, Any] = await answer.json()
        return body


async def test_the_best_branch_goes_on_and_the_others_leave_their_logs(whole: Whole) -> None:
    before = whole.machines()
    status = await search(
        whole,
        "step",
        ["echo 1 > /tmp/state", "echo 5 > /tmp/state; echo done $FORKTREE_BRANCH", "echo 3 > /tmp/state"],
        score={"exec": sh("echo judging $FORKTREE_SEED; cat /tmp/state")},
        prune={"keepTop": 1},
        seedMode="Derived",
        seed="s",
    )
    assert status["phase"] == "Complete"
    assert [child["score"] for child in status["children"]] == [1, 5, 3]
    assert [child["phase"] for child in status["children"]] == ["Released", "Running", "Released"]
    winner = status["children"][1]
    assert (status["best"], status["bestScore"]) == (winner["name"], 5)
    assert len(whole.machines() - before) == 1
    assert await whole.sh(winner["name"], "cat /tmp/state; echo $FORKTREE_SEED") == f"5\n{winner['seed']}\n"
    await whole.wait("session", winner["name"], "jsonpath={.status.score}=5")
    for child in status["children"]:
        kept = await log(whole, "step", child["index"])
        assert kept["score"]["stdout"] == f"judging {child['seed']}\n{child['score']}\n"
        assert kept["printed_score"] == child["score"]
    assert (await log(whole, "step", 1))["exec"]["stdout"] == "done b1\n"
    # The next step starts from the winner.
    (below,) = await whole.forked("next", winner["name"])
    assert await whole.sh(below, "cat /tmp/state") == "5\n"


async def test_whatever_a_branch_does_the_fork_goes_on(whole: Whole) -> None:
    scripts = [
        "sleep 600",
        "head -c 20000000 /dev/zero | tr '\\0' 'x'; echo; echo the end; echo an error >&2",
        "exit 7",
        "kill -9 -1; kill -9 $$",
        "for pid in $(ps -o pid,ppid | awk '$2 == 1 && $1 != 1 { print $1 }'); do kill -9 $pid; done; true",
        "true",
    ]
    branches: list[dict[str, object]] = [{"exec": sh(script)} for script in scripts]
    branches[0] = {"exec": sh(scripts[0], timeout_seconds=2)}
    branches.append({"exec": {"argv": ["/no/such/program"]}})
    await whole.apply(
        "Fork",
        "trouble",
        {
            "source": {"session": {"name": "root"}},
            "replicas": len(branches),
            "branches": branches,
            "score": {"exec": sh("echo 1")},
        },
    )
    await whole.wait("fork", "trouble", "condition=Complete")
    status = await whole.status("fork", "trouble")
    children = status["children"]
    assert [child["phase"] for child in children] == ["Running"] * len(branches)
    assert [child.get("exitCode") for child in children[:4]] == [-1, 0, 7, 137]
    assert [child.get("reason") for child in children[:4]] == [
        "ExecTimedOut",
        None,
        "ExecFailed",
        "ExecFailed",
    ]
    # It has killed itself as one of them, or not; init and the machine live either way.
    assert children[4].get("exitCode") in {0, 137}
    assert (children[5]["score"], children[6].get("reason")) == (1, "ExecNotStarted")
    assert "exitCode" not in children[6]
    for child in children:
        assert await whole.sh(child["name"], "echo alive") == "alive\n"
    loud = (await log(whole, "trouble", 1))["exec"]
    assert loud["truncated"] is True
    assert len(loud["stdout"]) <= MIB // 2
    assert loud["stdout"].endswith("x\nthe end\n")
    assert loud["stderr"] == "an error\n"
    assert children[1]["score"] == 1
    absent = (await log(whole, "trouble", 6))["exec"]
    assert "/no/such/program" in absent["message"]


async def test_a_scorer_that_says_no_number_leaves_no_score(whole: Whole) -> None:
    says = ["NaN", "1 2", "a lot", "", "inf", "2", "2"]
    status = await search(
        whole,
        "judged",
        [f"echo '{text}' > /tmp/says" for text in says],
        score={"exec": sh("cat /tmp/says")},
        prune={"keepTop": 3},
    )
    assert [child.get("score") for child in status["children"]] == [None] * 5 + [2, 2]
    assert [child.get("reason") for child in status["children"][:5]] == ["NoScore"] * 5
    # The two that are scored, and of the others the first.
    assert [child["index"] for child in status["children"] if child["phase"] == "Running"] == [0, 5, 6]
    assert status["best"] == status["children"][5]["name"]


async def test_a_killed_agent_runs_no_command_twice_and_comes_to_an_end(whole: Whole) -> None:
    script = "echo once >> /tmp/ran; test $FORKTREE_INDEX = 1 || sleep 600"
    branches = [{"exec": sh(script, timeout_seconds=600)} for _ in range(2)]
    await whole.apply(
        "Fork",
        "cut",
        {
            "source": {"session": {"name": "root"}},
            "replicas": 2,
            "branches": branches,
            "score": {"exec": sh("wc -l < /tmp/ran")},
        },
    )
    await whole.ready("fork", "cut")
    await whole.wait("fork", "cut", "jsonpath={.status.children[1].score}=1")
    await whole.crash_agent()
    await whole.wait("fork", "cut", "condition=Complete")
    children = (await whole.status("fork", "cut"))["children"]
    assert [child.get("reason") for child in children] == ["Interrupted", None]
    assert [child.get("score") for child in children] == [None, 1]
    assert await whole.sh(children[0]["name"], "cat /tmp/ran") == "once\n"
    assert (await log(whole, "cut", 1))["score"]["stdout"] == "1\n"
    assert "not run twice" in (await log(whole, "cut", 0))["exec"]["message"]


async def test_an_instant_goes_with_its_last_child_and_a_checkpoint_does_not(whole: Whole) -> None:
    (child,) = await whole.forked("split")
    await whole.fork("checkpoint", replicas=0)
    await whole.ready("fork", "checkpoint")
    await whole.delete("session", child)
    await whole.wait("fork", "split", "condition=PointAvailable=False")
    await whole.fork("late", "split", kind="fork")
    reason, _ = await whole.failed("fork", "late")
    assert reason == "PointLost"
    await whole.fork("from-checkpoint", "checkpoint", kind="fork")
    await whole.ready("fork", "from-checkpoint")


async def test_a_fork_made_again_under_its_name_at_once_is_another(whole: Whole) -> None:
    before = whole.machines()
    first = await search(whole, "again", ["echo 1", "echo 2"])
    await whole.delete("fork", "again")
    second = await search(whole, "again", ["echo 3", "echo 4"])
    names = {child["name"] for status in (first, second) for child in status["children"]}
    assert len(names) == 4
    assert (await log(whole, "again", 0))["exec"]["stdout"] == "3\n"
    await until(lambda: len(whole.machines() - before) == 2)


async def test_a_log_is_only_for_whoever_may_read_it_and_what_is_not_there_says_so(whole: Whole) -> None:
    await whole.fork("plain")
    await whole.wait("fork", "plain", "condition=Complete")
    assert (await log(whole, "plain", 0)).keys() == {"fork_id", "index"}
    base = f"{whole.node.url}/ns/{whole.namespace}/v1/forks"
    for path, status in (
        ("plain/children/1/log", 404),
        ("plain/children/x/log", 404),
        ("nobody/children/0/log", 404),
    ):
        async with whole.http.get(f"{base}/{path}") as answer:
            assert answer.status == status, await answer.text()
    other = f"{whole.node.url}/ns/default/v1/forks/plain/children/0/log"
    async with whole.http.get(other) as answer:
        assert answer.status == 403
        assert "forks/log" in (await answer.json())["message"]
