"""Bad input and faults on the whole system: one clear sentence where a user looks, and nothing left."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from e2e.whole import Whole, until

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.mark.parametrize(
    ("spec", "reason", "sentence"),
    [
        ({"image": "builtin:none"}, "ImageNotFound", "image builtin:none is not on this node"),
        (
            {"network": {"egress": "Open"}},
            "EgressForbidden",
            "lets no machine reach the outside: start its agent with --egress",
        ),
        ({"command": ["/no/such/program"]}, "BakeFailed", "/no/such/program"),
        (
            {"readinessProbe": {"exec": {"command": ["false"]}, "periodSeconds": 1, "failureThreshold": 2}},
            "NeverReady",
            "false failed 2 times in a row",
        ),
        (
            {"readinessProbe": {"pins": [{"name": "model", "command": ["echo", "v2"], "expect": "v1"}]}},
            "PinMismatch",
            "pin model wants 'v1' but echo v2 printed 'v2'",
        ),
    ],
    ids=["no-image", "no-egress", "no-command", "never-ready", "pin"],
)
async def test_a_template_that_can_not_become_ready_fails_its_session_with_the_reason(
    whole: Whole, spec: dict[str, object], reason: str, sentence: str
) -> None:
    before = whole.machines()
    await whole.template("broken", **spec)
    await whole.apply("Session", "root", {"templateRef": {"name": "broken"}})
    said_reason, said = await whole.failed("session", "root")
    assert (said_reason, sentence in said) == (reason, True), said
    nodes = (await whole.status("sessiontemplate", "broken"))["nodes"]
    assert [(node["phase"], node["reason"]) for node in nodes] == [("Failed", reason)]
    await whole.machines_are(before)


async def test_a_fork_of_what_can_not_be_forked_fails_with_the_reason(whole: Whole) -> None:
    await whole.template("broken", image="builtin:none")
    await whole.apply("Session", "failed", {"templateRef": {"name": "broken"}})
    await whole.failed("session", "failed")
    await whole.fork("of-failed", "failed")
    reason, said = await whole.failed("fork", "of-failed")
    assert reason == "SourceFailed"
    assert "failed" in said
    await whole.fork("of-nothing", "nothing")
    reason, said = await whole.failed("fork", "of-nothing")
    assert (reason, "nothing" in said) == ("SourceNotFound", True), said


async def test_a_fork_of_a_session_that_is_being_deleted_fails(whole: Whole) -> None:
    await whole.template()
    await whole.session()
    await whole.kubectl("patch", "session", "root", "--type=merge",
                        '--patch={"metadata":{"finalizers":["test.forktree.dev/hold"]}}')  # fmt: skip
    await whole.delete("session", "root", "--wait=false")
    await whole.fork("late")
    reason, said = await whole.failed("fork", "late")
    assert reason == "SourceGone"
    assert "root" in said
    await whole.kubectl(
        "patch", "session", "root", "--type=merge", '--patch={"metadata":{"finalizers":null}}'
    )


async def test_limits_of_depth_and_memory_hold_and_name_themselves(whole: Whole) -> None:
    await whole.template("shallow", treeLimits={"depth": 1})
    await whole.session("shallow", "shallow")
    (child,) = await whole.forked("one", "shallow")
    await whole.fork("two", child)
    reason, said = await whole.failed("fork", "two")
    assert (reason, "1" in said) == ("DepthLimit", True), said
    await whole.template("small", treeLimits={"memory": "500Mi"})
    await whole.session("small", "small")
    before = whole.machines()
    await whole.fork("big", "small", replicas=4)
    reason, said = await whole.failed("fork", "big")
    assert (reason, "limit of 500 MiB" in said) == ("MemoryLimit", True), said
    await whole.machines_are(before)
    assert await whole.sh("small", "echo unharmed") == "unharmed\n"


async def test_a_killed_machine_fails_its_session_and_no_other(whole: Whole) -> None:
    await whole.template()
    before = whole.machines()
    await whole.session()
    (root,) = whole.machines() - before
    (child,) = await whole.forked("one")
    os.kill(root, signal.SIGKILL)
    reason, said = await whole.failed("session", "root")
    assert (reason, "SIGKILL" in said) == ("MachineLost", True), said
    assert await whole.sh(child, "echo alive") == "alive\n"
    status, body = await whole.post("sessions/root/exec", {"command": "true"})
    assert status == 410
    assert body["error_code"] == body["code"] == "session_gone"


async def test_a_killed_agent_finds_everything_again(whole: Whole) -> None:
    await whole.template()
    await whole.session()
    await whole.sh("root", "echo kept > /tmp/file")
    (child,) = await whole.forked("one")
    before = whole.machines()
    status = await whole.status("session", child)
    await whole.crash_agent()
    assert await whole.sh(child, "cat /tmp/file") == "kept\n"
    assert await whole.sh("root", "cat /tmp/file") == "kept\n"
    assert whole.machines() == before
    after = await whole.status("session", child)
    assert after["vmGenerationID"] == status["vmGenerationID"]
    (grandchild,) = await whole.forked("two", child)
    assert await whole.sh(grandchild, "cat /tmp/file") == "kept\n"
    await whole.fork("again", "one", kind="fork")
    await whole.ready("fork", "again")


async def test_an_agent_killed_in_the_middle_of_a_fork_finishes_or_undoes_it(whole: Whole) -> None:
    await whole.template()
    await whole.session()
    before = whole.machines()
    await whole.fork("cut", replicas=3)
    await until(lambda: len(whole.machines() - before) >= 2)
    await whole.crash_agent()
    await whole.ready("fork", "cut")
    await whole.wait("fork", "cut", "jsonpath={.status.recorded}=3")
    assert len(whole.machines() - before) == 3
    for child in (await whole.status("fork", "cut"))["children"]:
        assert await whole.sh(child["name"], "echo here") == "here\n"


async def test_a_parent_deleted_while_it_forks_leaves_nothing(whole: Whole) -> None:
    await whole.template()
    before = whole.machines()
    await whole.session()
    running = whole.machines()
    await whole.fork("cut", replicas=4)
    await until(lambda: bool(whole.machines() - running))
    await whole.delete("session", "root")
    await whole.machines_are(before)
    async with asyncio.timeout(60):
        while "cut" in await whole.kubectl("get", "forks", "-o", "name"):
            status = await whole.status("fork", "cut")
            if status.get("phase") == "Failed":  # It had no owner yet, so it stays and says why.
                assert status["reason"] in {"SourceGone", "ParentLost"}, status
                break
            await asyncio.sleep(0.1)
    assert await whole.kubectl("get", "sessions", "-o", "name") == ""
    await whole.machines_are(before)


async def test_a_fork_made_while_the_operator_is_down_is_forked_when_it_is_back(whole: Whole) -> None:
    await whole.template()
    await whole.session()
    await whole.system.operator.kill()
    await whole.fork("waits")
    await whole.fork("waits-too", replicas=0)
    whole.system.operator.start()
    await whole.ready("fork", "waits")
    await whole.ready("fork", "waits-too")


async def test_a_fork_applied_before_its_session_is_forked_when_that_runs(whole: Whole) -> None:
    await whole.fork("early", replicas=2)
    await whole.fork("earlier", "early", kind="fork")
    await whole.apply("Session", "root", {"templateRef": {"name": "tiny"}})
    await whole.template()
    await whole.ready("fork", "early")
    await whole.ready("fork", "earlier")


async def test_an_orphaned_fork_keeps_its_children_and_a_deleted_one_does_not(whole: Whole) -> None:
    await whole.template()
    before = whole.machines()
    await whole.session()
    (orphan,) = await whole.forked("orphaned")
    (pruned,) = await whole.forked("pruned")
    await whole.delete("fork", "pruned")
    await whole.gone("session", pruned)
    await whole.delete("fork", "orphaned", "--cascade=orphan")
    await whole.delete("session", "root")
    assert await whole.sh(orphan, "echo lives on") == "lives on\n"
    assert len(whole.machines() - before) == 1
    (child,) = await whole.forked("further", orphan)
    assert await whole.sh(child, "echo and is forked") == "and is forked\n"


async def test_a_root_with_twenty_sessions_goes_as_a_whole(whole: Whole) -> None:
    await whole.template()
    before = whole.machines()
    await whole.session()
    first = await whole.forked("first", replicas=3)
    await asyncio.gather(*(whole.forked(f"second-{i}", child, replicas=5) for i, child in enumerate(first)))
    await whole.forked("third", first[0], replicas=1)
    assert len(whole.machines() - before) == 20
    await whole.delete("session", "root")
    await whole.machines_are(before)
    await whole.gone("session", "root", *first)
    assert await whole.kubectl("get", "sessions,forks", "-o", "name") == ""


async def test_the_users_road_over_http(whole: Whole) -> None:
    await whole.template()
    status, session = await whole.post("sessions", {"template_id": "tiny", "name": "mine"})
    assert status == 201, session
    assert (session["session_id"], session["template_id"]) == ("mine", "tiny")
    await whole.sh("mine", "echo state > /tmp/file")
    status, fork = await whole.post("sessions/mine/fork", {})
    assert status == 201, fork
    assert fork["parent_session_id"] == "mine"
    assert fork["template_id"] == "tiny"
    assert 0 < fork["fork_time_ms"] < fork["total_time_ms"]
    assert await whole.sh(fork["session_id"], "cat /tmp/file") == "state\n"


async def test_a_killed_keeper_takes_its_machines_and_their_sessions_say_so(whole: Whole) -> None:
    await whole.template()
    await whole.session()
    (child,) = await whole.forked("one")
    await whole.system.keeper.kill()
    whole.system.keeper.start()
    await whole.crash_agent()
    for name in ("root", child):
        reason, said = await whole.failed("session", name)
        assert (reason, "keeper" in said) == ("MachineLost", True), said
    await whole.session("next")
    assert await whole.sh("next", "echo works") == "works\n"
