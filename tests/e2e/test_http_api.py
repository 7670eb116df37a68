"""The HTTP API against a real API server, with the agent's own rights. Machines are scripted; the test itself
plays operator and control, so that each answer is to a state chosen here."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from e2e.http_stage import NODE, SECONDS, Stage, rights
from forktree.kube.watching import Changed, Deleted, Listed, watch
from forktree.models import Fork, ForkNode, Session
from forktree_agent.engine.contract import (
    AtCapacity,
    Command,
    CommandRefused,
    ExecResult,
    MachineGone,
)
from forktree_agent.http import certificates
from forktree_dev import provisioning
from forktree_dev.control_plane import ControlPlane

# Creating, reading and deleting sessions.


async def test_a_created_session_is_answered_once_it_runs(stage: Stage) -> None:
    await stage.template()
    running = {
        "phase": "Running",
        "ready": True,
        "node": NODE,
        "forkMs": 4.5,
        "mode": "Fork",
        "level": "Memory",
        "depth": 0,
    }
    async with stage.answering(Session, **running):
        status, body = await stage.ask("POST", "/sessions", {"template_id": "basic"})
    assert status == 201
    assert body["template_id"] == "basic"
    assert body["fork_time_ms"] == 4.5
    assert 0 < body["create_time_ms"] < SECONDS * 1000
    assert await stage.exists(Session, body["session_id"])

    status, info = await stage.ask("GET", f"/sessions/{body['session_id']}")
    assert status == 200
    assert info["phase"] == "Running"
    assert info["depth"] == 0
    assert info["age_secs"] >= 0
    assert "parent_session_id" not in info
    (listed,) = (await stage.ask("GET", "/sessions"))[1]
    assert listed | {"age_secs": 0} == info | {"age_secs": 0}


async def test_a_deleted_session_is_gone(stage: Stage) -> None:
    await stage.session("short")
    assert await stage.ask("DELETE", "/sessions/short") == (200, {"deleted": True, "session_id": "short"})
    status, body = await stage.ask("DELETE", "/sessions/short")
    assert (status, body["code"]) == (404, "no_such_session")
    assert (await stage.ask("GET", "/sessions/short"))[0] == 404


async def test_an_unknown_template_makes_nothing(stage: Stage) -> None:
    status, body = await stage.ask("POST", "/sessions", {"template_id": "nowhere"})
    assert (status, body["error_code"]) == (404, "no_template")
    assert "nowhere" in body["message"]
    assert (await stage.ask("GET", "/sessions"))[1] == []


@pytest.mark.parametrize(
    ("failure", "status", "code"),
    [
        (
            {"phase": "Failed", "reason": "NeverReady", "message": "the probe failed 30 times"},
            422,
            "template_failed",
        ),
        ({"phase": "Pending", "reason": "AtCapacity", "message": "no room for 128Mi"}, 503, "at_capacity"),
        (
            {"phase": "Failed", "reason": "ForkFailed", "message": "it did not come up"},
            500,
            "session_bringup_failed",
        ),
    ],
)
async def test_a_session_that_cannot_start_leaves_no_object_and_says_why(
    stage: Stage, failure: dict[str, object], status: int, code: str
) -> None:
    await stage.template()
    async with stage.answering(Session, **failure):
        got, body = await stage.ask("POST", "/sessions", {"template_id": "basic", "name": "doomed"})
    assert (got, body["code"], body["message"]) == (status, code, failure["message"])
    assert not await stage.exists(Session, "doomed")


async def test_a_create_with_a_name_can_be_repeated(stage: Stage) -> None:
    await stage.template("other")
    await stage.session("mine")
    status, body = await stage.ask("POST", "/sessions", {"template_id": "basic", "name": "mine"})
    assert (status, body["session_id"]) == (200, "mine")
    status, body = await stage.ask("POST", "/sessions", {"template_id": "other", "name": "mine"})
    assert (status, body["code"]) == (409, "conflict")
    assert await stage.exists(Session, "mine")


async def test_an_abandoned_create_takes_its_object_back(stage: Stage) -> None:
    await stage.template()
    asking = asyncio.create_task(stage.ask("POST", "/sessions", {"template_id": "basic"}), name="ask")
    async with (
        asyncio.timeout(SECONDS),
        aclosing(watch(stage.admin, Session, namespace=stage.namespace)) as events,
    ):
        async for event in events:
            match event:
                case Changed():
                    asking.cancel()
                case Deleted():
                    break
                case Listed(objects=objects):
                    if objects:
                        asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking


# Commands.


async def test_a_command_reaches_the_machine_as_it_was_sent(stage: Stage) -> None:
    await stage.session_here("work")
    body = {"command": "a | b", "env": {"K": "V"}, "cwd": "/tmp", "stdin": "é", "timeout_seconds": 7}
    status, answer = await stage.ask("POST", "/sessions/work/exec", body)
    assert status == 200
    assert json.loads(answer["stdout"]) == {
        "argv": ["/bin/sh", "-c", "a | b"],
        "env": {"K": "V"},
        "cwd": "/tmp",
        "stdin": "é",
        "timeout": 7.0,
    }
    assert answer["stderr"] == "\N{REPLACEMENT CHARACTER}!"
    assert answer["exit_code"] == 3
    assert answer["timed_out"] is False
    assert answer["id"].startswith("req_")
    assert stage.engine.executed == ["m-work"]


async def test_large_output_comes_whole(stage: Stage) -> None:
    async def flood(_: Command) -> ExecResult:
        return ExecResult(stdout=b"\0" * (4 << 20), stderr=b"", exit_code=0, timed_out=False, truncated=True)

    await stage.session_here("work")
    stage.engine.answering = flood
    status, answer = await stage.ask("POST", "/sessions/work/exec", {"argv": ["yes"]})
    assert (status, answer["truncated"]) == (200, True)
    assert answer["stdout"] == "\0" * (4 << 20)


async def test_a_time_out_is_a_result(stage: Stage) -> None:
    async def late(_: Command) -> ExecResult:
        return ExecResult(stdout=b"so far", stderr=b"", exit_code=-1, timed_out=True, truncated=False)

    await stage.session_here("work")
    stage.engine.answering = late
    status, answer = await stage.ask(
        "POST", "/sessions/work/exec", {"argv": ["sleep", "9"], "timeout_seconds": 1}
    )
    assert (status, answer["exit_code"], answer["timed_out"], answer["stdout"]) == (200, -1, True, "so far")


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (MachineGone("the machine was killed by signal 9 (SIGKILL)"), 410, "session_gone"),
        (CommandRefused("there is no /bin/nothing"), 400, "bad_request"),
        (AtCapacity("64 commands run already"), 503, "at_capacity"),
        (RuntimeError("secret in somebody's message"), 500, "internal"),
    ],
)
async def test_a_command_that_fails_says_why_and_no_more(
    stage: Stage, error: Exception, status: int, code: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(_: Command) -> ExecResult:
        raise error

    await stage.session_here("work")
    stage.engine.answering = fail
    got, body = await stage.ask("POST", "/sessions/work/exec", {"argv": ["x"]})
    assert (got, body["code"]) == (status, code)
    assert (body["message"] == str(error)) is (code != "internal")
    assert "secret" not in body["message"] + caplog.text


async def test_a_caller_that_goes_away_ends_its_command(stage: Stage) -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def hang(_: Command) -> ExecResult:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        raise AssertionError

    await stage.session_here("work")
    stage.engine.answering = hang
    asking = asyncio.create_task(stage.ask("POST", "/sessions/work/exec", {"argv": ["x"]}), name="ask")
    async with asyncio.timeout(SECONDS):
        await begun.wait()
        asking.cancel()
        await ended.wait()


async def test_a_command_waits_for_a_session_on_its_way(stage: Stage) -> None:
    session = await stage.session_here("soon", phase="Starting", ready=False)
    asking = asyncio.create_task(stage.ask("POST", "/sessions/soon/exec", {"argv": ["x"]}), name="ask")
    running = {"status": {"phase": "Running", "ready": True}}
    name = session.metadata.name
    stage.sessions.observe(
        await stage.admin.merge_patch(Session, stage.namespace, name, running, subresource="status")
    )
    assert (await asking)[0] == 200


@pytest.mark.parametrize(("method", "what"), [("POST", "exec"), ("POST", "fork"), ("GET", "memory")])
async def test_a_request_about_another_nodes_session_goes_to_the_address_that_its_agent_published(
    stage: Stage, far: str, method: str, what: str
) -> None:
    body = {"exec": {"argv": ["x"]}, "fork": {}}.get(what)
    status, refused = await stage.ask(method, f"/sessions/{far}/{what}", body)
    assert (status, refused["code"]) == (421, "wrong_node")
    assert refused["message"] == "session far is on node far-node: the address of its agent is not known"

    # Nobody listens there: that this is said shows where the request went.
    await stage.admin.apply(ForkNode, None, "far-node", {}, manager="test")
    told = {"endpoint": "https://127.0.0.1:9", "caBundle": stage.ca_bundle}
    await stage.admin.apply(
        ForkNode, None, "far-node", {"status": told}, manager="test", subresource="status"
    )
    status, refused = await stage.ask(method, f"/sessions/{far}/{what}", body)
    assert (status, refused["code"]) == (502, "upstream_error")
    assert "node far-node, where session far is, does not answer at https://127.0.0.1:9" in refused["message"]
    await stage.admin.delete(ForkNode, None, "far-node")
    assert await stage.asked_for(Fork) == []


async def test_of_a_query_only_what_is_known_goes_to_another_node(
    stage: Stage, far: str, tmp_path: Path
) -> None:
    asked: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.path_qs)
        return web.json_response({})

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    identity = certificates.self_signed(tmp_path / "far-tls", ["127.0.0.1"])
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=identity.context).start()
        told = {
            "endpoint": f"https://127.0.0.1:{runner.addresses[0][1]}",
            "caBundle": identity.ca_bundle,
        }
        await stage.admin.apply(ForkNode, None, "far-node", {}, manager="test")
        await stage.admin.apply(
            ForkNode, None, "far-node", {"status": told}, manager="test", subresource="status"
        )
        path = f"/sessions/{far}/execs/work"
        assert await stage.ask("GET", f"{path}?wait_seconds=7.5&other=1#part") == (200, {})
        assert await stage.ask("GET", path) == (200, {})
    finally:
        await runner.cleanup()
        await stage.admin.delete(ForkNode, None, "far-node")
    there = f"/ns/{stage.namespace}/v1{path}"
    assert asked == [f"{there}?wait_seconds=7.5", f"{there}?wait_seconds=0.0"]


async def test_another_nodes_session_is_read_and_deleted_without_its_agent(stage: Stage, far: str) -> None:
    assert (await stage.ask("GET", f"/sessions/{far}"))[1]["node"] == "far-node"
    assert [each["session_id"] for each in (await stage.ask("GET", "/sessions"))[1]] == [far]
    assert (await stage.ask("DELETE", f"/sessions/{far}"))[0] == 200


async def test_what_memory_a_session_takes_is_told_and_of_one_that_does_not_run_why_not(stage: Stage) -> None:
    await stage.session_here("here")
    told = {"session_id": "here", "unique_bytes": 5 << 20, "shared_bytes": 7 << 20}
    assert await stage.ask("GET", "/sessions/here/memory") == (200, told)
    await stage.session("coming", phase="Starting", ready=False)
    status, body = await stage.ask("GET", "/sessions/coming/memory")
    assert (status, body["code"]) == (409, "not_ready")
    await stage.session("over", phase="Released", ready=False)
    status, body = await stage.ask("GET", "/sessions/over/memory")
    assert (status, body["code"]) == (410, "session_gone")
    assert (await stage.ask("GET", "/sessions/none/memory"))[1]["code"] == "no_such_session"


async def test_a_command_for_an_ended_session_is_told_how_it_ended(stage: Stage) -> None:
    await stage.session(
        "over", phase="Failed", ready=False, reason="MachineLost", message="killed by SIGKILL"
    )
    status, body = await stage.ask("POST", "/sessions/over/exec", {"argv": ["x"]})
    assert (status, body["code"], body["message"]) == (410, "session_gone", "killed by SIGKILL")
    assert (await stage.ask("POST", "/sessions/none/exec", {"argv": ["x"]}))[1]["code"] == "no_such_session"


# Forks.


async def test_a_fork_is_answered_once_every_child_can_be_used(stage: Stage) -> None:
    await stage.session("trunk")
    child = {"phase": "Running", "mode": "Fork", "level": "Memory"}
    children = [{"index": i, "name": f"child-{i}", **child} for i in range(2)]
    running = {
        "phase": "Running",
        "ready": True,
        "pauseMs": 2.0,
        "forkMs": 5.0,
        "readyMs": 9.0,
        "children": children,
    }
    async with stage.answering(Fork, **running, recorded=2):
        status, body = await stage.ask("POST", "/sessions/trunk/fork", {"replicas": 2, "name": "twice"})
    assert status == 201
    assert body["session_id"] == "child-0"
    assert body["parent_session_id"] == "trunk"
    assert body["template_id"] == "basic"
    assert (body["pause_time_ms"], body["fork_time_ms"], body["ready_time_ms"]) == (2.0, 5.0, 9.0)
    assert body["total_time_ms"] > 0
    assert body["fork_id"] == "twice"
    assert [each["session_id"] for each in body["children"]] == ["child-0", "child-1"]

    fork = await stage.admin.get(Fork, stage.namespace, "twice")
    assert fork.spec.source.session is not None
    trunk = await stage.admin.get(Session, stage.namespace, "trunk")
    assert fork.spec.source.session.uid == trunk.metadata.uid

    status, again = await stage.ask("POST", "/sessions/trunk/fork", {"replicas": 2, "name": "twice"})
    assert (status, again["children"]) == (200, body["children"])
    status, body = await stage.ask("POST", "/sessions/trunk/fork", {"replicas": 3, "name": "twice"})
    assert (status, body["code"]) == (409, "conflict")


async def test_the_whole_time_of_a_request_begins_when_it_is_seen(stage: Stage) -> None:
    await stage.session("trunk")
    held_ms: list[float] = []

    async def slowly(body: bytes) -> AsyncGenerator[bytes]:
        """Asked for when the server has seen the request, and then not sent at once."""
        began = time.monotonic()
        await asyncio.sleep(2.0)  # Longer than all that follows.
        held_ms.append((time.monotonic() - began) * 1000)
        yield body

    async with (
        stage.answering(Fork, phase="Running", ready=True, recorded=0),
        stage.answering(Session, phase="Running", ready=True, node=NODE),
    ):
        for path, sent, clock in (
            ("/sessions/trunk/fork", b'{"replicas": 0}', "total_time_ms"),
            ("/sessions", b'{"template_id": "basic"}', "create_time_ms"),
        ):
            async with stage.client.post(
                f"{stage.url}/ns/{stage.namespace}/v1{path}",
                data=slowly(sent),
                headers={"Authorization": f"Bearer {stage.token}"},
                expect100=True,
            ) as answer:
                assert (await answer.json())[clock] >= held_ms[-1]


async def test_a_fork_without_children_answers_without_a_session(stage: Stage) -> None:
    await stage.session("trunk")
    async with stage.answering(Fork, phase="Running", ready=True, recorded=0):
        status, body = await stage.ask("POST", "/sessions/trunk/fork", {"replicas": 0})
    assert status == 201
    assert "session_id" not in body
    assert body["children"] == []


@pytest.mark.parametrize(
    ("failure", "status", "code"),
    [
        (
            {"phase": "Failed", "reason": "ForkFailed", "message": "child 1 did not come up"},
            500,
            "session_bringup_failed",
        ),
        ({"phase": "Pending", "reason": "AtCapacity", "message": "no room"}, 503, "at_capacity"),
        (
            {"phase": "Failed", "reason": "DepthLimit", "message": "depth 65 is too deep"},
            409,
            "limit_reached",
        ),
        ({"phase": "Failed", "reason": "ParentLost", "message": "the parent ended"}, 410, "session_gone"),
    ],
)
async def test_a_fork_that_fails_leaves_no_object_and_says_why(
    stage: Stage, failure: dict[str, object], status: int, code: str
) -> None:
    await stage.session("trunk")
    async with stage.answering(Fork, **failure):
        got, body = await stage.ask("POST", "/sessions/trunk/fork", {"name": "doomed"})
    assert (got, body["code"], body["message"]) == (status, code, failure["message"])
    assert not await stage.exists(Fork, "doomed")


async def test_only_what_runs_can_be_forked(stage: Stage) -> None:
    await stage.session("over", phase="Failed", ready=False, reason="MachineLost", message="killed")
    assert (await stage.ask("POST", "/sessions/over/fork"))[1]["code"] == "session_gone"
    status, body = await stage.ask("POST", "/sessions/none/fork")
    assert (status, body["code"]) == (404, "no_such_session")
    assert body["error"] == body["message"]
    assert body["error_code"] == body["code"]


# Who may.


async def test_a_token_without_the_audience_is_told_how_to_get_one(stage: Stage) -> None:
    kubectl = stage.plane.kubectl
    ordinary = (await kubectl.run("create", "token", "user", f"--namespace={stage.namespace}")).strip()
    forged = stage.token[:-8] + "AAAAAAAA"
    for token in ("", stage.plane.token, ordinary, forged, "Bearer"):
        status, body = await stage.ask("GET", "/sessions", token=token)
        assert (status, body["code"]) == (401, "unauthorized"), token
        assert "kubectl create token" in body["message"]
        assert "--audience forktree.dev" in body["message"]
    async with stage.client.get(f"{stage.url}/v1/sessions") as answer:
        assert answer.status == 401
        assert "client certificates" in (await answer.json())["message"]
        assert answer.headers["WWW-Authenticate"] == "Bearer"


async def test_a_caller_may_only_what_rbac_lets_it(stage: Stage, control_plane: ControlPlane) -> None:
    await stage.session("theirs")
    kubectl = control_plane.kubectl
    await kubectl.run("create", "serviceaccount", "stranger", f"--namespace={stage.namespace}")
    stranger = await provisioning.user_token(kubectl, "stranger", namespace=stage.namespace)
    for method, path in (
        ("GET", "/sessions"),
        ("POST", "/sessions"),
        ("GET", "/sessions/theirs"),
        ("DELETE", "/sessions/theirs"),
        ("POST", "/sessions/theirs/exec"),
        ("POST", "/sessions/theirs/fork"),
    ):
        status, body = await stage.ask(method, path, token=stranger)
        assert (status, body["code"]) == (403, "forbidden"), path
        assert stage.namespace in body["message"]
    # Existence is not told to those who may not look.
    assert (await stage.ask("GET", "/sessions/none", token=stranger))[0] == 403
    assert await stage.exists(Session, "theirs")


async def test_a_right_counts_as_soon_as_it_is_granted(stage: Stage, control_plane: ControlPlane) -> None:
    kubectl = control_plane.kubectl
    await kubectl.run("create", "serviceaccount", "late", f"--namespace={stage.namespace}")
    token = await provisioning.user_token(kubectl, "late", namespace=stage.namespace)
    assert (await stage.ask("GET", "/sessions", token=token))[0] == 403
    await kubectl.apply(rights(stage.namespace, "late"))
    async with asyncio.timeout(SECONDS):  # The API server's own authorizer follows its watch.
        while (await stage.ask("GET", "/sessions", token=token))[0] != 200:
            pass


async def test_short_paths_mean_the_callers_own_namespace(stage: Stage) -> None:
    await stage.session("mine")
    status, body = await stage.ask("GET", "/sessions", own=True)
    assert status == 200
    assert [each["session_id"] for each in body] == ["mine"]


async def test_another_namespace_is_not_the_callers(stage: Stage) -> None:
    async with stage.client.get(
        f"{stage.url}/ns/kube-system/v1/sessions", headers={"Authorization": f"Bearer {stage.token}"}
    ) as answer:
        assert answer.status == 403


# Bad requests.


async def test_a_wrong_request_gets_one_sentence_and_a_code(stage: Stage) -> None:
    wrong: list[tuple[str, str, object, int, str]] = [
        ("POST", "/sessions/x/exec", {"cmd": "ls"}, 400, "bad_request"),
        ("POST", "/sessions/x/fork", {"replicas": 257}, 400, "bad_request"),
        ("POST", "/sessions", {}, 400, "template_id_required"),
        ("POST", "/sessions", {"template_id": "a", "name": "Not-A-Label"}, 400, "bad_request"),
        ("POST", "/sessions/x/exec", {"command": "x" * (1 << 20)}, 413, "body_too_large"),
        ("PUT", "/sessions/x", {}, 405, "method_not_allowed"),
        ("GET", "/nothing", None, 404, "not_found"),
        ("GET", "/sessions/%2e%2e%2fsecrets", None, 404, "no_such_session"),
        ("GET", "/sessions/UPPER", None, 404, "no_such_session"),
    ]
    for method, path, body, status, code in wrong:
        got, answer = await stage.ask(method, path, body)
        assert (got, answer["code"]) == (status, code), (method, path)
        assert answer.keys() == {"error", "error_code", "code", "message"}
        assert answer["message"]


async def test_health_needs_no_token_and_tells_no_secret(stage: Stage) -> None:
    await stage.session_here("hidden")
    async with stage.client.get(f"{stage.url}/v1/health") as answer:
        assert answer.status == 200
        assert (await answer.json()).keys() == {"status", "version"}


async def test_logs_hold_neither_tokens_nor_what_is_run(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    await stage.session_here("work")
    body = {"command": "cat my-secret-file", "env": {"KEY": "env-secret"}, "stdin": "stdin-secret"}
    await stage.ask("POST", "/sessions/work/exec", body)
    await stage.ask("POST", "/sessions/work/exec", {**body, "argv": ["both"]})
    await stage.ask("GET", "/sessions", token="bad-token-secret")
    assert "request_answered" in caplog.text
    assert "secret" not in caplog.text
    assert stage.token not in caplog.text


async def test_an_api_server_that_is_away_is_said_so(stage: Stage) -> None:
    await stage.session_here("work")
    assert (await stage.ask("POST", "/sessions/work/exec", {"argv": ["x"]}))[0] == 200
    plane = stage.plane
    await plane.api_server.kill()
    try:
        # A caller that was known seconds ago can go on working with what runs on this node.
        assert (await stage.ask("POST", "/sessions/work/exec", {"argv": ["x"]}))[0] == 200
        status, body = await stage.ask("GET", "/sessions")
        assert (status, body["code"]) == (502, "upstream_error")
    finally:
        plane.api_server.start()
        await plane.ready(deadline=asyncio.get_running_loop().time() + 2 * SECONDS)


async def test_a_batch_reaches_another_nodes_session_and_what_that_says_is_of_it_alone(
    stage: Stage, far: str, tmp_path: Path
) -> None:
    asked: list[tuple[str, str, Any]] = []
    answers = iter(
        [
            web.json_response({"error": "it is paused", "code": "not_ready"}, status=409),
            web.json_response({"anything": "else"}),
        ]
    )

    async def answer(request: web.Request) -> web.Response:
        asked.append((request.method, request.path_qs, await request.json()))
        return next(answers)

    app = web.Application()
    app.router.add_post("/{path:.*}", answer)
    identity = certificates.self_signed(tmp_path / "far-tls", ["127.0.0.1"])
    runner = web.AppRunner(app)
    await runner.setup()
    await stage.session_here("here")
    body = {"session_ids": [far, "here"], "exec": {"command": "hostname", "timeout_seconds": 5}}
    try:
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=identity.context).start()
        endpoint = f"https://127.0.0.1:{runner.addresses[0][1]}"
        told = {"endpoint": endpoint, "caBundle": identity.ca_bundle}
        await stage.admin.apply(ForkNode, None, "far-node", {}, manager="test")
        await stage.admin.apply(
            ForkNode, None, "far-node", {"status": told}, manager="test", subresource="status"
        )
        results = [(await stage.ask("POST", "/batch/exec", body))[1]["results"] for _ in range(2)]
    finally:
        await runner.cleanup()
        await stage.admin.delete(ForkNode, None, "far-node")
    there = f"/ns/{stage.namespace}/v1/sessions/{far}/exec"
    assert asked == [("POST", there, body["exec"])] * 2
    assert [(each["session_id"], each["ok"], each.get("code")) for each in results[0]] == [
        (far, False, "not_ready"),
        ("here", True, None),
    ]
    assert results[0][0]["error"] == "it is paused"
    assert results[1][0]["code"] == "upstream_error"
