"""Trees on the whole system: every way to delete a part, to run out of something, and to lose the server."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from e2e.whole import SECONDS, Whole, until
from forktree_dev.kubectl import KubectlFailed
from forktree_dev.system import Sizes, System

pytestmark = pytest.mark.asyncio(loop_scope="session")

OUTAGE_SECONDS = 20.0
BURST = 100


async def get(whole: Whole, kind: str, name: str) -> dict[str, Any]:
    found: dict[str, Any] = await whole.system.kubectl.json("get", kind, name, "-n", whole.namespace)
    return found


# Deleting at each level, in each manner ---------------------------------------------------------------------


@pytest.mark.parametrize("level", ["root", "fork", "child"])
@pytest.mark.parametrize("cascade", ["orphan", "foreground"])
async def test_a_deletion_takes_what_is_below_or_leaves_it_alive(
    whole: Whole, level: str, cascade: str
) -> None:
    before = whole.machines()
    await whole.template()
    await whole.session()
    (child,) = await whole.forked("one")
    (grandchild,) = await whole.forked("two", child)
    await whole.sh(grandchild, "echo mine > /tmp/file")
    chain = ["session/root", "fork/one", f"session/{child}", "fork/two", f"session/{grandchild}"]
    at = {"root": 0, "fork": 1, "child": 2}[level]
    await whole.kubectl("delete", chain[at], f"--cascade={cascade}")
    left = {*chain[:at], *(chain[at + 1 :] if cascade == "orphan" else [])}
    await whole.names_are(left)
    sessions = sum(each.startswith("session/") for each in left)
    await until(lambda: len(whole.machines() - before) == sessions)
    if cascade == "foreground":
        return
    # What was left alive has no owner, is not taken back in, and is as good as any.
    kind, name = chain[at + 1].split("/")
    assert (await get(whole, kind, name))["metadata"].get("ownerReferences", []) == []
    assert await whole.sh(grandchild, "cat /tmp/file") == "mine\n"
    (further,) = await whole.forked("three", grandchild)
    assert await whole.sh(further, "cat /tmp/file") == "mine\n"
    await whole.crash_agent()
    await whole.names_are(left | {"fork/three", f"session/{further}"})
    assert len(whole.machines() - before) == sessions + 1
    assert (await get(whole, kind, name))["metadata"].get("ownerReferences", []) == []


async def test_a_namespace_is_deleted_with_a_live_tree(whole: Whole) -> None:
    other = f"{whole.namespace}-too"
    await whole.system.kubectl.run("create", "namespace", other)
    before = whole.machines()
    async with Whole.using(whole.system, other) as there:
        await there.template()
        await there.session()
        children = await there.forked("one", replicas=2)
        await there.forked("two", children[0])
        assert len(there.machines() - before) == 4
        await whole.system.kubectl.run("delete", "namespace", other, timeout_seconds=SECONDS)
        await there.machines_are(before)


# Running out of something -----------------------------------------------------------------------------------


async def test_a_quota_reached_in_the_middle_of_a_fork_ends_only_the_children_beyond_it(whole: Whole) -> None:
    await whole.template()
    before = whole.machines()
    await whole.session()
    await whole.kubectl("create", "quota", "few", "--hard=count/sessions.forktree.dev=3")
    await whole.wait("quota", "few", "jsonpath={.status.used.count/sessions\\.forktree\\.dev}=1")
    await whole.fork("four", replicas=4)
    await whole.ready("fork", "four")
    await whole.wait("fork", "four", "jsonpath={.status.readyReplicas}=2")
    status = await whole.status("fork", "four")
    assert "exceeded quota" in status["message"]
    assert status["recorded"] == 2
    phases = {child["name"]: child["phase"] for child in status["children"]}
    assert sorted(phases.values()) == ["Failed", "Failed", "Running", "Running"]
    await until(lambda: len(whole.machines() - before) == 3)
    for name, phase in phases.items():
        if phase == "Running":
            assert await whole.sh(name, "echo here") == "here\n"
    await whole.kubectl("delete", "quota", "few")
    await whole.forked("more", replicas=1)
    assert len(await whole.kubectl("get", "sessions", "-o", "name")) > 0


async def test_limits_of_time_and_number_hold_and_name_themselves(whole: Whole) -> None:
    await whole.template("bounded", treeLimits={"live": 2, "execSeconds": 5})
    await whole.session("root", "bounded")
    await whole.fork("many", replicas=2)
    reason, said = await whole.failed("fork", "many")
    assert (reason, "may have 2 at once" in said) == ("LiveLimit", True), said
    status, body = await whole.post("sessions/root/exec", {"command": "true", "timeout_seconds": 6})
    assert (status, body["code"]) == (400, "bad_request")
    assert "5 seconds" in body["message"]
    status, body = await whole.post("sessions/root/exec", {"command": "sleep 7"})
    assert (status, body["timed_out"]) == (200, True)


async def test_an_idle_session_loses_its_machine_and_can_be_gone_on_from_by_its_instant(whole: Whole) -> None:
    await whole.template("brief", treeLimits={"idleSeconds": 20})
    before = whole.machines()
    await whole.session("root", "brief")
    await whole.sh("root", "echo kept > /tmp/file")
    await whole.apply(
        "Fork", "kept", {"source": {"session": {"name": "root"}}, "replicas": 0, "keepPoint": "Always"}
    )
    await whole.ready("fork", "kept")
    await whole.wait("session", "root", "jsonpath={.status.phase}=Released")
    status = await whole.status("session", "root")
    assert (status["reason"], "20 s" in status["message"]) == ("Expired", True)
    await whole.machines_are(before)
    code, body = await whole.post("sessions/root/exec", {"command": "true"})
    assert (code, body["code"]) == (410, "session_gone")
    await whole.fork("again", "kept", kind="fork")
    await whole.ready("fork", "again")
    (child,) = (await whole.status("fork", "again"))["children"]
    await whole.ready("session", child["name"])
    assert await whole.sh(child["name"], "cat /tmp/file") == "kept\n"


# Things that change under a live tree -----------------------------------------------------------------------


async def test_a_template_deleted_or_made_anew_changes_nothing_in_a_live_tree(whole: Whole) -> None:
    await whole.template("tiny", treeLimits={"depth": 2})
    await whole.session()
    old = await whole.status("session", "root")
    await whole.delete("sessiontemplate", "tiny")
    (child,) = await whole.forked("one")
    assert (await whole.status("session", child))["baselineId"] == old["baselineId"]
    await whole.template("tiny", env=[{"name": "AGE", "value": "new"}], treeLimits={"depth": 1})
    (grandchild,) = await whole.forked("two", child)  # By the limits of the template that the tree is of.
    assert await whole.sh(grandchild, "echo ${AGE-old}") == "old\n"
    await whole.session("fresh")
    assert await whole.sh("fresh", "echo ${AGE-old}") == "new\n"
    new = await whole.status("session", "fresh")
    assert new["templateUID"] != old["templateUID"]
    assert new["baselineId"] != old["baselineId"]
    assert (await whole.status("session", grandchild))["templateUID"] == old["templateUID"]


async def test_a_root_with_two_owners_lives_until_both_are_gone(whole: Whole) -> None:
    before = whole.machines()
    await whole.template()
    await whole.session()
    owners: list[dict[str, str]] = []
    for name in ("job", "run"):
        await whole.kubectl("create", "configmap", name)
        uid = (await get(whole, "configmap", name))["metadata"]["uid"]
        owners.append({"apiVersion": "v1", "kind": "ConfigMap", "name": name, "uid": uid})
    patch = json.dumps({"metadata": {"ownerReferences": owners}})
    await whole.kubectl("patch", "session", "root", "--type=merge", f"--patch={patch}")
    (child,) = await whole.forked("one")
    await whole.delete("configmap", "job")
    await whole.forked("two", child)
    assert await whole.sh(child, "echo lives") == "lives\n"
    await whole.delete("configmap", "run")
    await whole.machines_are(before)
    await whole.names_are(set())


async def test_nobody_gives_a_child_a_second_owner_and_a_fork_drops_those_it_was_made_with(
    whole: Whole,
) -> None:
    await whole.template()
    await whole.session()
    await whole.kubectl("create", "configmap", "mine")
    uid = (await get(whole, "configmap", "mine"))["metadata"]["uid"]
    owner = {"apiVersion": "v1", "kind": "ConfigMap", "name": "mine", "uid": uid}
    metadata = {"name": "one", "namespace": whole.namespace, "ownerReferences": [owner]}
    spec = {"source": {"session": {"name": "root"}}, "replicas": 1}
    await whole.system.kubectl.apply(
        {"apiVersion": "forktree.dev/v1alpha1", "kind": "Fork", "metadata": metadata, "spec": spec}
    )
    await whole.ready("fork", "one")
    await whole.wait("fork", "one", "jsonpath={.status.recorded}=1")
    references = (await get(whole, "fork", "one"))["metadata"]["ownerReferences"]
    assert [(each["kind"], each["name"], each["controller"]) for each in references] == [
        ("Session", "root", True)
    ]
    (child,) = [each["name"] for each in (await whole.status("fork", "one"))["children"]]
    patch = json.dumps({"metadata": {"ownerReferences": [owner]}})
    for target in (f"session/{child}", "fork/one"):
        with pytest.raises(KubectlFailed, match="place in the tree"):
            await whole.kubectl("patch", target, "--type=merge", f"--patch={patch}")
    await whole.delete("configmap", "mine")
    assert await whole.sh(child, "echo lives") == "lives\n"


# Outages ----------------------------------------------------------------------------------------------------


async def test_an_operator_restarted_in_a_burst_of_forks_loses_none_and_doubles_none(whole: Whole) -> None:
    await whole.template()
    before = whole.machines()
    await whole.session()
    forks = [
        {
            "apiVersion": "forktree.dev/v1alpha1",
            "kind": "Fork",
            "metadata": {"name": f"burst-{number}", "namespace": whole.namespace},
            "spec": {"source": {"session": {"name": "root"}}, "replicas": 0},
        }
        for number in range(BURST)
    ]
    applying = asyncio.create_task(
        whole.system.kubectl.apply({"apiVersion": "v1", "kind": "List", "items": forks})
    )
    while len(await whole.names()) < BURST // 5:  # noqa: ASYNC110  # kubectl says nothing of its own progress.
        await asyncio.sleep(0.05)
    await whole.system.operator.kill()
    whole.system.operator.start()
    await applying
    await whole.kubectl("wait", "forks", "--all", "--for=condition=Ready", f"--timeout={SECONDS:.0f}s")
    listed = json.loads(await whole.kubectl("get", "forks", "-o", "json"))["items"]
    points = {each["status"]["forkPointID"] for each in listed}
    assert (len(listed), len(points)) == (BURST, BURST)
    root = (await get(whole, "session", "root"))["metadata"]["uid"]
    owners = {tuple(owner["uid"] for owner in each["metadata"]["ownerReferences"]) for each in listed}
    assert owners == {(root,)}
    assert len(whole.machines() - before) == 1


@pytest.mark.timeout(600)
async def test_an_api_server_away_for_twenty_seconds_during_forks_loses_none_of_them(tmp_path: Path) -> None:
    """On a system of its own: nobody else's server is stopped."""
    async with System.running(tmp_path / "own", sizes=Sizes(memory_limit_bytes=6 << 30)) as system:
        plane = system.control_plane
        assert plane is not None
        await system.kubectl.run("create", "namespace", "test")
        async with Whole.using(system, "test") as whole:
            await whole.template()
            await whole.session()
            before = whole.machines()
            for number in range(3):
                await whole.fork(f"cut-{number}", replicas=2)
            await until(lambda: bool(whole.machines() - before))
            await plane.api_server.kill()
            await asyncio.sleep(OUTAGE_SECONDS)
            agent = whole.node.agent  # It looks for what is gone once in a while, and must have meanwhile.
            await until(lambda: "sweep_given_up" in agent.log_tail(1000) or not before <= whole.machines())
            machines = whole.machines()
            assert before <= machines
            plane.api_server.start()
            await plane.ready(deadline=asyncio.get_running_loop().time() + SECONDS)
            for part in (system.operator, plane.controller_manager):
                part.start()  # Both end themselves when they cannot renew their Lease, to be started again.
            children: list[str] = []
            for number in range(3):
                await whole.ready("fork", f"cut-{number}")
                await whole.wait("fork", f"cut-{number}", "jsonpath={.status.recorded}=2")
                status = await whole.status("fork", f"cut-{number}")
                children += [child["name"] for child in status["children"]]
            for child in children:
                await whole.ready("session", child)
                assert await whole.sh(child, "echo here") == "here\n"
            assert machines <= whole.machines(), "a machine that was forked before the outage is gone"
            assert len(whole.machines() - before) == len(set(children)) == 6
            await whole.delete("session", "root")
            await whole.machines_are(set())
