"""Two namespaces on one node, and what a quota does to forks: real machines, real accounts."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from e2e.whole import Whole, until

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def limited(whole: Whole, **most: int) -> None:
    """A quota of so many objects; returns when it counts what is there: until then it refuses everything."""
    hard = ",".join(f"count/{plural}.forktree.dev={number}" for plural, number in most.items())
    await whole.kubectl("create", "quota", "few", f"--hard={hard}")
    for plural in most:
        await whole.wait("quota", "few", f"jsonpath={{.status.used.count/{plural}\\.forktree\\.dev}}")


# Quota ------------------------------------------------------------------------------------------------------


async def test_a_fork_over_http_loses_the_children_that_a_quota_refuses_and_they_say_so(whole: Whole) -> None:
    await whole.template()
    before = whole.machines()
    await whole.session()
    await limited(whole, sessions=3)
    status, body = await whole.post("sessions/root/fork", {"replicas": 4, "name": "four"})
    assert status == 201, body
    names = [child["session_id"] for child in body["children"]]
    await whole.wait("fork", "four", "create")  # The children are there first.
    await whole.wait("fork", "four", "jsonpath={.status.readyReplicas}=2")
    await until(lambda: len(whole.machines() - before) == 3)
    lost = 0
    for name in names:
        code, said = await whole.post(f"sessions/{name}/exec", {"command": "echo here"})
        if code == 200:
            assert said["stdout"] == "here\n"
            continue
        lost += 1
        assert (code, said["code"]) == (410, "session_gone"), said
        assert "exceeded quota: few, requested: count/sessions.forktree.dev=1" in said["message"]
    assert lost == 2
    told = (await whole.status("fork", "four"))["message"]
    assert "exceeded quota: few" in told


async def test_a_root_or_a_fork_over_its_quota_is_refused_before_anything_starts(whole: Whole) -> None:
    await whole.template()
    await whole.session()
    before = whole.machines()
    await limited(whole, sessions=1, forks=0)
    status, body = await whole.post("sessions", {"template_id": "tiny"})
    assert (status, body["code"]) == (429, "quota_exceeded"), body
    assert "limited: count/sessions.forktree.dev=1" in body["message"]
    for path in ("sessions/root/fork?record=wait", "sessions/root/checkpoints"):
        status, body = await whole.post(path, {"name": "x"})
        assert (status, body["code"]) == (429, "quota_exceeded"), (path, body)
        assert "limited: count/forks.forktree.dev=0" in body["message"]
    assert whole.machines() == before
    assert await whole.names() == {"session/root"}


# Neighbours -------------------------------------------------------------------------------------------------


@pytest_asyncio.fixture(loop_scope="session")
async def next_door(whole: Whole) -> AsyncIterator[Whole]:
    """Somebody else's namespace, on the same node."""
    kubectl, other = whole.system.kubectl, f"{whole.namespace}-next"
    await kubectl.run("create", "namespace", other)
    async with Whole.using(whole.system, other) as there:
        yield there
    await kubectl.run("delete", "namespace", other, "--wait=false")


async def test_a_fork_reaches_nothing_in_another_namespace(whole: Whole, next_door: Whole) -> None:
    """By the names and uids that things have there, which are no secret; one has a name that ours has too."""
    for each in (whole, next_door):
        await each.template()
        await each.session("root")
    await next_door.session("theirs")
    await next_door.forked("theirs-fork", "theirs")
    machines = whole.machines()
    uids = {name: await uid(next_door, *name.split("/")) for name in
            ("session/root", "session/theirs", "fork/theirs-fork")}  # fmt: skip
    sources = {
        "by-name": {"session": {"name": "theirs"}},
        "by-uid": {"session": {"name": "theirs", "uid": uids["session/theirs"]}},
        "by-twin": {"session": {"name": "root", "uid": uids["session/root"]}},
        "by-fork": {"fork": {"name": "theirs-fork", "uid": uids["fork/theirs-fork"]}},
    }
    for name, source in sources.items():
        await whole.apply("Fork", name, {"source": source})
    for name in sources:
        reason, message = await whole.failed("fork", name)
        assert reason == ("SourceGone" if name == "by-twin" else "SourceNotFound"), (name, message)
    for path in ("sessions/theirs/fork", "sessions/theirs/exec", "forks/theirs-fork/fork"):
        status, body = await whole.post(path, {"command": "id"} if "exec" in path else {"replicas": 1})
        assert status == 404, (path, body)
    assert whole.machines() == machines
    assert await next_door.sh("theirs", "echo here") == "here\n"


async def test_who_names_an_owner_next_door_loses_only_what_is_their_own(
    whole: Whole, next_door: Whole
) -> None:
    for each in (whole, next_door):
        await each.template()
    await next_door.session("theirs")
    await whole.session("root")
    before = whole.machines()
    owner = {
        "apiVersion": "forktree.dev/v1alpha1",
        "kind": "Session",
        "name": "theirs",
        "uid": await uid(next_door, "session", "theirs"),
        "blockOwnerDeletion": True,
        "controller": True,
    }
    for kind, name, spec in (
        ("Session", "hung", {"templateRef": {"name": "tiny"}}),
        ("Fork", "hung-fork", {"source": {"session": {"name": "root"}}}),
    ):
        metadata = {"name": name, "namespace": whole.namespace, "ownerReferences": [owner]}
        made = {"apiVersion": "forktree.dev/v1alpha1", "kind": kind, "metadata": metadata, "spec": spec}
        await whole.system.kubectl.apply(made)
    await whole.names_are({"session/root"})  # The garbage collector takes such an owner for one that is gone.
    await whole.machines_are(before)
    assert await next_door.sh("theirs", "echo here") == "here\n"
    await next_door.delete("session", "theirs")
    assert await whole.sh("root", "echo here") == "here\n"


async def uid(whole: Whole, kind: str, name: str) -> str:
    return await whole.kubectl("get", kind, name, "-o", "jsonpath={.metadata.uid}")
