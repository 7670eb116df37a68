"""The HTTP API's objects against a real API server: what is told of each, who may, what is refused."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from e2e.http_stage import NODE, SECONDS, Stage, rights
from forktree.kube.errors import NotFound
from forktree.models import Fork, ForkNode, Session
from forktree.models.names import HEARTBEAT_ANNOTATION, HEARTBEAT_LABEL
from forktree.wire_trees import CONTINUE
from forktree_agent.http.routes import EXISTING_CLIENTS, OPEN, ROUTES
from forktree_agent.http.waiting import until
from forktree_dev import provisioning

COMPLETE: dict[str, object] = {"phase": "Complete", "ready": True, "recorded": 0, "node": NODE}
HELD = {
    "type": "PointAvailable",
    "status": "True",
    "reason": "Held",
    "message": "",
    "lastTransitionTime": "2026-01-01T00:00:00Z",
}


async def child_of(stage: Stage, parent: Session, fork_name: str, index: int, root: Session) -> Session:
    """A child and its fork, as the agent of the node would leave them."""
    forks = {
        "apiVersion": "forktree.dev/v1alpha1",
        "kind": "Fork",
        "metadata": {
            "name": fork_name,
            "namespace": stage.namespace,
            "labels": {"forktree.dev/root": root.metadata.uid},
            "ownerReferences": [parent.owner_reference().to_json()],
        },
        "spec": {"source": {"session": {"name": parent.metadata.name, "uid": parent.metadata.uid}}},
    }
    await stage.plane.kubectl.apply(forks)
    fork = await stage.admin.merge_patch(
        Fork,
        stage.namespace,
        fork_name,
        {
            "status": {
                **COMPLETE,
                "node": NODE,
                "root": root.metadata.uid,
                "depth": (parent.status.depth or 0) + 1,
                "pointBytes": 4096,
                "conditions": [HELD],
            }
        },
        subresource="status",
    )
    session = await stage.agent.create(
        Session.model_validate(
            {
                "metadata": {
                    "name": f"{fork_name}-{index}",
                    "namespace": stage.namespace,
                    "labels": {
                        "forktree.dev/root": root.metadata.uid,
                        "forktree.dev/fork": fork_name,
                        "team": "search",
                    },
                    "ownerReferences": [fork.owner_reference().to_json()],
                },
                "spec": {
                    "forkRef": {"name": fork_name, "uid": fork.metadata.uid, "index": index},
                    "nodeName": NODE,
                },
            }
        )
    )
    status = {
        "phase": "Running",
        "ready": True,
        "node": NODE,
        "root": root.metadata.uid,
        "parent": parent.metadata.uid,
        "depth": (parent.status.depth or 0) + 1,
        "templateUID": root.status.template_uid,
        "seed": "7",
        "vmGenerationID": "a-generation",
    }
    return await stage.admin.merge_patch(
        Session, stage.namespace, session.metadata.name, {"status": status}, subresource="status"
    )


async def grown(stage: Stage) -> tuple[Session, Session, Session]:
    """A root, a child, and a child of that."""
    await stage.template()
    template = await stage.plane.kubectl.json("get", "sessiontemplate", "basic", "-n", stage.namespace)
    root = await stage.session("root", depth=0, templateUID=template["metadata"]["uid"])
    root = await stage.admin.merge_patch(
        Session, stage.namespace, "root", {"status": {"root": root.metadata.uid}}, subresource="status"
    )
    child = await child_of(stage, root, "one", 0, root)
    return root, child, await child_of(stage, child, "two", 0, root)


# What is told.


async def test_a_session_tells_its_place_its_numbers_and_its_labels(stage: Stage) -> None:
    root, *_ = await grown(stage)
    status, info = await stage.ask("GET", "/sessions/one-0")
    assert status == 200
    assert (info["root"], info["parent_session_id"], info["fork_id"]) == ("root", "root", "one")
    assert (info["template_id"], info["labels"]) == ("basic", {"team": "search"})
    assert (info["seed"], info["vm_generation_id"]) == ("7", "a-generation")
    assert "score" not in info
    assert "rewards" not in info
    assert root.metadata.uid not in json.dumps(info)
    assert (await stage.ask("GET", "/sessions/root"))[1]["root"] == "root"


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("", ["one-0", "other", "root", "two-0"]),
        ("?root=root", ["one-0", "root", "two-0"]),
        ("?label=team=search", ["one-0", "two-0"]),
        ("?label=team=search&label=kind=none", []),
        ("?template_id=basic&limit=2", ["one-0", "other"]),
        ("?limit=2&continue=other", ["root", "two-0"]),
        ("?template_id=none", []),
    ],
)
async def test_a_list_is_narrowed_and_cut_as_asked(stage: Stage, query: str, found: list[str]) -> None:
    await grown(stage)
    await stage.session("other")
    status, listed = await stage.ask("GET", f"/sessions{query}")
    assert (status, [each["session_id"] for each in listed]) == (200, found)


async def test_a_list_that_was_cut_says_how_to_go_on(stage: Stage) -> None:
    await grown(stage)
    seen: list[str] = []
    after = ""
    while len(seen) < 10:
        url = f"{stage.url}/ns/{stage.namespace}/v1/sessions?limit=1{after}"
        async with stage.client.get(url, headers={"Authorization": f"Bearer {stage.token}"}) as answer:
            seen += [each["session_id"] for each in await answer.json()]
            if CONTINUE not in answer.headers:
                break
            after = f"&continue={answer.headers[CONTINUE]}"
    assert seen == ["one-0", "root", "two-0"]


async def test_a_fork_is_read_listed_and_deleted(stage: Stage) -> None:
    await grown(stage)
    status, one = await stage.ask("GET", "/forks/one")
    assert status == 200
    assert (one["parent_session_id"], one["phase"], one["complete"]) == ("root", "Complete", True)
    assert (one["point_available"], one["point_bytes"], one["recorded"]) == (True, 4096, 0)
    assert [each["fork_id"] for each in (await stage.ask("GET", "/forks"))[1]] == ["one", "two"]
    assert [each["fork_id"] for each in (await stage.ask("GET", "/forks?session_id=one-0"))[1]] == ["two"]
    assert await stage.ask("DELETE", "/forks/two") == (200, {"deleted": True, "fork_id": "two"})
    status, body = await stage.ask("DELETE", "/forks/two")
    assert (status, body["code"]) == (404, "not_found")
    assert (await stage.ask("GET", "/forks/none"))[1]["code"] == "not_found"


async def test_a_tree_is_the_whole_of_it_or_what_is_below(stage: Stage) -> None:
    await grown(stage)
    for session in ("root", "two-0"):
        status, tree = await stage.ask("GET", f"/sessions/{session}/tree")
        assert status == 200
        assert tree["root_session_id"] == "root"
        assert [each["session_id"] for each in tree["sessions"]] == ["root", "one-0", "two-0"]
        assert [each.get("parent_session_id") for each in tree["sessions"]] == [None, "root", "one-0"]
        assert [each["fork_id"] for each in tree["forks"]] == ["one", "two"]
        assert tree["totals"] == {"sessions": 3, "live": 3, "depth": 2, "point_bytes": 8192}
    _, below = await stage.ask("GET", "/sessions/one-0/tree?below=1")
    assert below["root_session_id"] == "one-0"
    assert [each["session_id"] for each in below["sessions"]] == ["one-0", "two-0"]
    assert [each["fork_id"] for each in below["forks"]] == ["two"]
    assert (await stage.ask("GET", "/sessions/none/tree"))[1]["code"] == "no_such_session"


async def test_a_watched_tree_tells_what_there_is_and_then_what_happens(stage: Stage) -> None:
    await grown(stage)
    url = f"{stage.url}/ns/{stage.namespace}/v1/sessions/one-0/tree?watch=1"
    async with stage.client.get(url, headers={"Authorization": f"Bearer {stage.token}"}) as answer:
        assert answer.content_type == "application/x-ndjson"
        assert answer.headers["X-Request-Id"].startswith("req_")
        lines = [json.loads(await answer.content.readline()) for _ in range(6)]
        assert [named(line) for line in lines] == ["root", "one", "one-0", "two", "two-0", "synced"]
        assert lines[1]["fork"]["parent_session_id"] == "root"
        assert (lines[4]["session"]["parent_session_id"], lines[4]["session"]["root"]) == ("one-0", "root")

        await stage.admin.merge_patch(Session, stage.namespace, "two-0", {"spec": {"score": 2.5}})
        line = json.loads(await answer.content.readline())
        assert (named(line), line["session"]["score"]) == ("two-0", 2.5)
        await stage.admin.delete(Session, stage.namespace, "two-0")
        line = json.loads(await answer.content.readline())
        assert line == {"type": "gone", "kind": "session", "id": "two-0"}
        await stage.admin.delete(Session, stage.namespace, "root")
        gone = {json.loads(line)["id"] async for line in answer.content if json.loads(line)["type"] == "gone"}
        assert gone == {"root", "one", "one-0", "two"}  # And then there is nothing to tell any more.


def named(line: dict[str, Any]) -> str:
    match line["type"]:
        case "session":
            return str(line["session"]["session_id"])
        case "fork":
            return str(line["fork"]["fork_id"])
        case kind:
            return str(kind)


async def test_templates_and_the_node_are_told_of(stage: Stage) -> None:
    await stage.template()
    status, listed = await stage.ask("GET", "/templates")
    assert (status, [each["template_id"] for each in listed]) == (200, ["basic"])
    expected: dict[str, object] = {
        "template_id": "basic", "image": "builtin:tiny", "ready_nodes": 0, "nodes": [], "standby": 0,
    }  # fmt: skip
    status, template = await stage.ask(
        "GET", "/templates/basic"
    )  # What Collimate's clients read beside this.
    assert (status, template | expected) == (200, template)
    assert (await stage.ask("GET", "/templates/none"))[1]["code"] == "not_found"
    assert await stage.ask("GET", "/node") == (200, {"node": NODE, "ready": False})
    await stage.admin.apply(ForkNode, None, NODE, {}, manager="test")
    told = {"ready": True, "engine": "microvm", "accelerator": "tcg", "capacityBytes": 5}
    try:
        await stage.admin.apply(ForkNode, None, NODE, {"status": told}, manager="test", subresource="status")
        _, node = await stage.ask("GET", "/node")
    finally:
        await stage.admin.delete(ForkNode, None, NODE)
    assert node == {
        "node": NODE, "ready": True, "engine": "microvm", "accelerator": "tcg", "capacity_bytes": 5,
    }  # fmt: skip


async def test_the_document_is_served_to_anybody_and_names_every_path(stage: Stage) -> None:
    async with stage.client.get(f"{stage.url}/v1/openapi.json") as answer:
        document = await answer.json()
    assert set(document["paths"]) == {
        *(each.path for each in (*ROUTES, *EXISTING_CLIENTS.routes)),
        *(each.path for each in OPEN),
    }


# What is changed.


async def test_a_score_and_rewards_are_set_kept_and_taken_back(stage: Stage) -> None:
    await stage.session_here("work")
    status, info = await stage.ask("POST", "/sessions/work/score", {"score": 1, "rewards": {"a": 2}})
    assert (status, info["score"], info["rewards"]) == (200, 1.0, {"a": 2.0})
    _, info = await stage.ask("POST", "/sessions/work/score", {"rewards": {"b": 3.5}})
    assert (info["score"], info["rewards"]) == (1.0, {"a": 2.0, "b": 3.5})
    _, info = await stage.ask("POST", "/sessions/work/score", {"score": None})
    assert "score" not in info
    spec = (await stage.admin.get(Session, stage.namespace, "work")).spec
    assert (spec.score, dict(spec.rewards)) == (None, {"a": 2.0, "b": 3.5})
    for wrong in ({}, {"score": "1"}, {"rewards": {"": 1}}, {"scores": 1}):
        assert (await stage.ask("POST", "/sessions/work/score", wrong))[0] == 400, wrong


async def test_a_session_is_paused_once_it_stands_still_and_released_once_it_has_ended(
    stage: Stage,
) -> None:
    await stage.session("work")

    async def play(state: str, phase: str) -> None:
        session = await stage.admin.get(Session, stage.namespace, "work")
        deadline = asyncio.get_running_loop().time() + SECONDS
        await until(stage.admin, session, lambda seen: seen.spec.state == state, deadline=deadline)
        await stage.admin.merge_patch(
            Session, stage.namespace, "work", {"status": {"phase": phase}}, subresource="status"
        )

    for word, state, phase in (
        ("pause", "Paused", "Paused"), ("resume", "Running", "Running"), ("release", "Released", "Released"),
    ):  # fmt: skip
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(play(state, phase), name="play-agent")
            status, info = await stage.ask("POST", f"/sessions/work/{word}", {})
        assert (status, info["phase"]) == (200, phase)
    assert (await stage.ask("POST", "/sessions/work/release", {}))[0] == 200
    status, body = await stage.ask("POST", "/sessions/work/pause", {})
    assert (status, body["code"]) == (410, "session_gone")


async def test_a_session_is_told_what_it_was_asked_to_be_told(stage: Stage) -> None:
    await stage.template()
    body = {"template_id": "basic", "name": "told", "labels": {"a": "b"}, "seed": "", "env": {"K": "V"}}
    async with stage.answering(Session, phase="Running", ready=True, node=NODE):
        assert (await stage.ask("POST", "/sessions", body))[0] == 201
    session = await stage.admin.get(Session, stage.namespace, "told")
    assert session.metadata.labels == {"a": "b"}
    assert (session.spec.seed, [(each.name, each.value) for each in session.spec.env]) == ("", [("K", "V")])
    assert (await stage.ask("POST", "/sessions", body))[0] == 200
    others: tuple[dict[str, object], ...] = ({"seed": "1"}, {"env": {}}, {"labels": {"a": "c"}})
    for other in others:
        assert (await stage.ask("POST", "/sessions", body | other))[1]["code"] == "conflict", other
    for wrong in (
        {"labels": {"forktree.dev/root": "x"}}, {"labels": {"a": "not a value"}}, {"env": {"1": "x"}},
        {"env": {"A": "\0"}},
    ):  # fmt: skip
        assert (await stage.ask("POST", "/sessions", body | wrong))[1]["code"] == "bad_request", wrong


async def test_a_fork_says_to_its_branches_what_its_caller_says(stage: Stage) -> None:
    await stage.session("trunk")
    body: dict[str, object] = {
        "name": "search",
        "labels": {"team": "a"},
        "branches": [
            {"name": "left", "exec": {"command": "go left", "timeout_seconds": 5}, "env": {"WAY": "left"}},
            {"name": "right", "seed": "9", "labels": {"side": "right"}},
        ],
        "seed": "s",
        "score": {"argv": ["judge"]},
        "keep_top": 1,
        "keep_point": True,
        "timeout_seconds": 40,
    }
    children = [
        {"index": 0, "name": "c-0", "phase": "Running", "branch": "left", "exitCode": 0, "score": 2.0},
        {"index": 1, "name": "c-1", "phase": "Released", "branch": "right", "reason": "Pruned"},
    ]
    told = COMPLETE | {"recorded": 2, "children": children, "best": "c-0", "bestScore": 2.0}
    async with stage.answering(Fork, **told):
        status, forked = await stage.ask("POST", "/sessions/trunk/fork?wait=complete", body)
    assert status == 201, forked
    assert (forked["best_session_id"], forked["best_score"]) == ("c-0", 2.0)
    assert [each.get("exit_code") for each in forked["children"]] == [0, None]
    assert [each.get("reason") for each in forked["children"]] == [None, "Pruned"]
    spec = (await stage.admin.get(Fork, stage.namespace, "search")).spec
    left, right = spec.branches
    assert left.exec is not None
    assert (left.exec.argv, left.exec.timeout_seconds) == (("/bin/sh", "-c", "go left"), 5)
    assert (left.env[0].value, left.labels, right.labels) == (
        "left", {"team": "a"}, {"team": "a", "side": "right"},
    )  # fmt: skip
    assert spec.prune is not None
    assert (spec.seed_mode, spec.prune.keep_top, spec.keep_point, spec.timeout_seconds, spec.replicas) == (
        "Derived", 1, "Always", 40, 2,
    )  # fmt: skip
    status, again = await stage.ask("POST", "/sessions/trunk/fork?wait=complete", body)
    assert (status, again["children"]) == (200, forked["children"])
    other = body | {"keep_top": 2}
    assert (await stage.ask("POST", "/sessions/trunk/fork", other))[1]["code"] == "conflict"


async def test_more_children_start_from_the_instant_of_a_fork(stage: Stage) -> None:
    await grown(stage)
    async with stage.answering(Fork, **COMPLETE | {"recorded": 2}):
        status, forked = await stage.ask("POST", "/forks/two/fork", {"replicas": 2, "name": "more"})
    assert (status, forked["parent_session_id"], forked["template_id"]) == (201, "one-0", "basic")
    source = (await stage.admin.get(Fork, stage.namespace, "more")).spec.source.fork
    assert source is not None
    assert source.name == "two"
    assert (await stage.ask("GET", "/forks/more"))[1]["source_fork_id"] == "two"
    assert (await stage.ask("POST", "/forks/none/fork"))[1]["code"] == "not_found"


async def test_a_checkpoint_has_a_name_and_only_old_ones_that_nobody_needs_are_let_go(stage: Stage) -> None:
    await stage.session("work")

    async def checkpoint(name: str, **more: object) -> tuple[int, Any]:
        return await stage.ask("POST", "/sessions/work/checkpoints", {"name": name, **more})

    async with stage.answering(Fork, **COMPLETE | {"pointBytes": 5, "conditions": [HELD], "recorded": 1}):
        status, first = await checkpoint("first")
        assert (status, first["checkpoint"], first["point_bytes"], first["available"]) == (
            201, "first", 5, True,
        )  # fmt: skip
        status, again = await checkpoint("first")
        assert (status, again["fork_id"]) == (200, first["fork_id"])
        status, rolled = await stage.ask("POST", "/sessions/work/rollback", {"checkpoint": "first"})
        assert status == 201, rolled
        for name in ("second", "third"):
            await checkpoint(name)
        assert (await checkpoint("fourth", keep_last=1))[0] == 201
    _, kept = await stage.ask("GET", "/sessions/work/checkpoints")
    assert [each["checkpoint"] for each in kept] == ["first", "fourth"]  # From the first there is a child.
    gone = {"deleted": True, "checkpoint": "first", "fork_id": first["fork_id"]}
    assert await stage.ask("DELETE", "/sessions/work/checkpoints/first") == (200, gone)
    for method, path, body in (
        ("DELETE", "/sessions/work/checkpoints/first", None),
        ("POST", "/sessions/work/rollback", {"checkpoint": "first"}),
    ):
        status, answer = await stage.ask(method, path, body)
        assert (status, answer["code"]) == (404, "not_found")


async def test_many_are_scored_and_pruned_at_once_and_one_that_fails_fails_alone(stage: Stage) -> None:
    await grown(stage)
    status, done = await stage.ask(
        "POST", "/batch/score", {"scores": {"one-0": 1, "none": 2, "../x": 3, "two-0": 4}}
    )
    assert status == 200
    found = [(each["session_id"], each["ok"], each.get("code")) for each in done["results"]]
    assert found == [
        ("one-0", True, None), ("none", False, "no_such_session"), ("../x", False, "no_such_session"),
        ("two-0", True, None),
    ]  # fmt: skip
    assert done["results"][3]["session"]["score"] == 4.0
    _, done = await stage.ask("POST", "/batch/prune", {"session_ids": ["two-0", "none"], "fork_ids": ["two"]})
    assert [(each["ok"], each.get("deleted")) for each in done["results"]] == [
        (True, True), (False, None), (True, True),
    ]  # fmt: skip
    assert done["results"][2]["fork_id"] == "two"
    assert not await stage.exists(Fork, "two")


async def test_a_command_runs_in_many_and_each_says_how_it_ended(stage: Stage) -> None:
    for name in ("a", "b"):
        await stage.session_here(name)
    await stage.session("over", phase="Released", ready=False)
    body = {"session_ids": ["b", "over", "a"], "exec": {"command": "x"}}
    status, done = await stage.ask("POST", "/batch/exec", body)
    assert status == 200
    assert [(each["session_id"], each["ok"]) for each in done["results"]] == [
        ("b", True), ("over", False), ("a", True),
    ]  # fmt: skip
    assert done["results"][1]["code"] == "session_gone"
    assert done["results"][0]["exec"]["exit_code"] == 3
    ids = [each["exec"]["id"] for each in done["results"] if each["ok"]]
    assert len(set(ids)) == 2
    _, done = await stage.ask("POST", "/batch/exec", {"execs": {"a": {"argv": ["y"]}}})
    assert json.loads(done["results"][0]["exec"]["stdout"])["argv"] == ["y"]
    for wrong in (
        {},
        {"session_ids": ["a"]},
        {"exec": {"command": "x"}},
        body | {"execs": {"a": {"argv": ["y"]}}},
    ):
        assert (await stage.ask("POST", "/batch/exec", wrong))[0] == 400, wrong
    many = {"session_ids": [f"s-{i}" for i in range(257)], "exec": {"command": "x"}}
    assert (await stage.ask("POST", "/batch/exec", many))[0] == 400


async def test_a_heartbeat_is_a_lease_that_the_root_names(stage: Stage) -> None:
    await grown(stage)
    expected = {"root_session_id": "root", "renew_within_secs": 30.0}
    assert await stage.ask("POST", "/sessions/two-0/heartbeat", {"ttl_seconds": 30}) == (200, expected)
    root = await stage.admin.get(Session, stage.namespace, "root")
    assert root.metadata.annotations[HEARTBEAT_ANNOTATION] == "root-heartbeat"
    path = f"/apis/coordination.k8s.io/v1/namespaces/{stage.namespace}/leases/root-heartbeat"
    first = json.loads(await stage.admin.raw("GET", path))
    assert HEARTBEAT_LABEL in first["metadata"]["labels"]
    assert first["metadata"]["ownerReferences"][0]["uid"] == root.metadata.uid
    assert (await stage.ask("POST", "/sessions/root/heartbeat", {"ttl_seconds": 60}))[0] == 200
    second = json.loads(await stage.admin.raw("GET", path))
    assert second["spec"]["leaseDurationSeconds"] == 60
    assert second["spec"]["renewTime"] > first["spec"]["renewTime"]


async def test_who_may_change_one_session_sets_no_end_to_its_whole_tree(stage: Stage) -> None:
    await grown(stage)
    kubectl, metadata = stage.plane.kubectl, {"name": "one", "namespace": stage.namespace}
    await kubectl.run("create", "serviceaccount", "one", f"--namespace={stage.namespace}")
    rule = {
        "apiGroups": ["forktree.dev"],
        "resources": ["sessions"],
        "resourceNames": ["two-0"],
        "verbs": ["get", "patch"],
    }
    group = "rbac.authorization.k8s.io"
    role = {"apiVersion": f"{group}/v1", "kind": "Role", "metadata": metadata, "rules": [rule]}
    bound = {
        "roleRef": {"apiGroup": group, "kind": "Role", "name": "one"},
        "subjects": [{"kind": "ServiceAccount", "name": "one", "namespace": stage.namespace}],
    }
    await kubectl.apply(role)
    await kubectl.apply({"apiVersion": f"{group}/v1", "kind": "RoleBinding", "metadata": metadata, **bound})
    token = await provisioning.user_token(kubectl, "one", namespace=stage.namespace)
    async with asyncio.timeout(SECONDS):  # The API server's own authorizer follows its watch.
        while (await stage.ask("GET", "/sessions/two-0", token=token))[0] != 200:
            pass
    ends_soon = {"ttl_seconds": 5}
    status, body = await stage.ask("POST", "/sessions/two-0/heartbeat", ends_soon, token=token)
    assert (status, body["code"]) == (403, "forbidden")
    root = await stage.admin.get(Session, stage.namespace, "root")
    assert HEARTBEAT_ANNOTATION not in root.metadata.annotations


async def test_a_lease_that_is_somebody_elses_is_left_alone(stage: Stage) -> None:
    await stage.session("root")
    lease = {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"name": "root-heartbeat", "namespace": stage.namespace},
        "spec": {"holderIdentity": "a leader"},
    }
    await stage.plane.kubectl.apply(lease)
    status, body = await stage.ask("POST", "/sessions/root/heartbeat", {"ttl_seconds": 30})
    assert (status, body["code"]) == (409, "conflict")
    session = await stage.admin.get(Session, stage.namespace, "root")
    assert HEARTBEAT_ANNOTATION not in session.metadata.annotations


# Who may.


async def test_nobody_may_anything_without_the_right_to_it(stage: Stage) -> None:
    await stage.session("theirs")
    kubectl = stage.plane.kubectl
    await kubectl.run("create", "serviceaccount", "stranger", f"--namespace={stage.namespace}")
    stranger = await provisioning.user_token(kubectl, "stranger", namespace=stage.namespace)
    named = {"session_id": "theirs", "fork_id": "f", "index": "0", "exec_id": "e", "template_id": "basic"}
    for route in ROUTES:
        path = route.path.format_map(named | {"checkpoint": "c", "port": "web", "path": "x"})
        status, body = await stage.ask(route.method, path, token=stranger)
        if route.rights:
            assert status == 403, path
            assert route.method == "HEAD" or body["code"] == "forbidden", path
    for path, sent in (
        ("score", {"scores": {"theirs": 1}}),
        ("prune", {"session_ids": ["theirs"]}),
        ("exec", {"session_ids": ["theirs"], "exec": {"command": "x"}}),
    ):
        _, body = await stage.ask("POST", f"/batch/{path}", sent, token=stranger)
        assert [each["code"] for each in body["results"]] == ["forbidden"], path
    theirs = await stage.admin.get(Session, stage.namespace, "theirs")
    assert theirs.spec.score is None


async def test_a_fork_that_runs_commands_takes_the_right_to_run_them(stage: Stage) -> None:
    await stage.session("trunk")
    objects = rights(stage.namespace, "forker")
    role = next(each for each in objects["items"] if each["kind"] == "Role")  # type: ignore[attr-defined]
    role["rules"] = [{"apiGroups": ["forktree.dev"], "resources": ["sessions/fork"], "verbs": ["create"]}]
    await stage.plane.kubectl.apply(objects)
    token = await provisioning.user_token(stage.plane.kubectl, "forker", namespace=stage.namespace)
    body = {"name": "sly", "branches": [{"exec": {"command": "x"}}]}
    while True:
        # The API server's own authorizer follows its watch.
        status, answer = await stage.ask("POST", "/sessions/trunk/fork", body, token=token)
        if "sessions/fork" not in answer["message"]:
            break
    assert (status, answer["code"]) == (403, "forbidden")
    assert "sessions/exec" in answer["message"]
    with pytest.raises(NotFound):
        await stage.admin.get(Fork, stage.namespace, "sly")
