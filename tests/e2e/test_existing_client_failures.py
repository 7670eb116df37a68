"""What the client of Collimate's protocol does when a request is refused: states chosen here, on a real API
server and the real HTTP server."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from collimate_rl import GatewayClient, GatewayError

from e2e.http_stage import Stage
from forktree.kube.watching import Changed, Listed, watch
from forktree.models import Fork, ForkNode, Session
from forktree_agent.http import certificates
from forktree_agent.http.collimate.daemon import DAEMON
from forktree_agent.http.collimate.gateway import GATEWAY
from forktree_agent.http.collimate.surfaces import Surface
from forktree_dev import provisioning

pytestmark = [
    # The client keeps a connection for each of its threads and closes none.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

RUNNING: dict[str, object] = {
    "phase": "Running",
    "ready": True,
    "forkMs": 4.5,
    "mode": "Fork",
    "level": "Memory",
}
FULL: dict[str, object] = {"phase": "Pending", "reason": "AtCapacity", "message": "no room for 128Mi"}
NOWHERE: dict[str, object] = {"phase": "Pending", "reason": "Unscheduled", "message": "no node has room"}
BROKEN: dict[str, object] = {"phase": "Failed", "reason": "ForkFailed", "message": "it did not come up"}


@pytest.fixture
def gateway(stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> GatewayClient:
    authority = tmp_path / "ca.pem"
    authority.write_text(stage.ca_bundle)
    monkeypatch.setenv("SSL_CERT_FILE", str(authority))
    return GatewayClient(api_key=stage.token, base_url=f"{stage.url}/ns/{stage.namespace}")


@asynccontextmanager
async def answering(stage: Stage, statuses: Sequence[dict[str, object]]) -> AsyncGenerator[list[str]]:
    """Inside the block each new session gets the next of these; the names of those that were made."""
    made: list[str] = []

    async def play() -> None:
        seen: set[str] = set()
        async with aclosing(watch(stage.admin, Session, namespace=stage.namespace)) as events:
            async for event in events:
                match event:
                    case Changed(obj=session) if session.metadata.uid not in seen:
                        seen.add(session.metadata.uid)
                        made.append(session.metadata.name)
                        await stage.admin.merge_patch(
                            Session,
                            stage.namespace,
                            session.metadata.name,
                            {"status": statuses[len(made) - 1]},
                            subresource="status",
                        )
                    case Listed():
                        ready.set()
                    case _:
                        pass

    ready = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(play(), name="play-agent")
        await ready.wait()
        yield made
        task.cancel()


@pytest.mark.parametrize("full", [FULL, NOWHERE])
async def test_a_client_that_finds_no_room_twice_has_one_session_in_the_end(
    stage: Stage, gateway: GatewayClient, full: dict[str, object]
) -> None:
    await stage.template()
    async with answering(stage, [full, full, RUNNING]) as made:
        opened = await asyncio.to_thread(gateway.create_sandbox, "basic")
    assert len(made) == 3
    assert await stage.asked_for(Session) == [opened["id"]] == [made[2]]


async def test_a_session_that_did_not_come_up_is_not_tried_again_by_itself(
    stage: Stage, gateway: GatewayClient
) -> None:
    await stage.template()
    async with answering(stage, [BROKEN]) as made:
        with pytest.raises(GatewayError) as failed:
            await asyncio.to_thread(gateway.create_sandbox, "basic")
    assert (failed.value.status, failed.value.code) == (500, "session_bringup_failed")
    assert len(made) == 1
    assert await stage.asked_for(Session) == []


async def test_a_fork_without_room_is_tried_again_and_leaves_no_object(
    stage: Stage, gateway: GatewayClient
) -> None:
    await stage.session("trunk")
    async with stage.answering(Fork, **FULL):
        with pytest.raises(GatewayError) as full:
            await asyncio.to_thread(gateway.fork, "trunk", count=2)
    assert (full.value.status, full.value.code) == (503, "at_capacity")
    assert await stage.asked_for(Fork) == []


async def test_a_group_of_which_a_child_is_missing_is_deleted_by_its_client(
    stage: Stage, gateway: GatewayClient
) -> None:
    for name in ("trunk", "got"):
        await stage.session(name)
    session = gateway.session("basic")
    session.id = "trunk"
    told: dict[str, object] = {
        "phase": "Running",
        "ready": True,
        "replicas": 2,
        "recorded": 2,
        "children": [{"index": 0, "name": "got", "phase": "Running"}],
    }
    async with stage.answering(Fork, **told):
        with pytest.raises(GatewayError) as short:
            await asyncio.to_thread(session.fork_group, 2, labels=["a", "b"])
    assert short.value.code == "fork_short"
    assert await stage.asked_for(Session) == ["trunk"]


@pytest.mark.parametrize("surface", [GATEWAY, DAEMON], ids=["gateway", "daemon"])
async def test_who_may_nothing_may_nothing_here(stage: Stage, surface: Surface) -> None:
    await stage.session("theirs")
    kubectl = stage.plane.kubectl
    await kubectl.run("create", "serviceaccount", "stranger", f"--namespace={stage.namespace}")
    stranger = await provisioning.user_token(kubectl, "stranger", namespace=stage.namespace)
    ordinary = (await kubectl.run("create", "token", "user", f"--namespace={stage.namespace}")).strip()
    for route in surface.routes:
        path = route.path.format(session_id="theirs", template_id="basic")
        for token, status, code in ((stranger, 403, "forbidden"), (ordinary, 401, "unauthorized")):
            url = f"{stage.url}/ns/{stage.namespace}{surface.below}/v1{path}"
            headers = {"Authorization": f"Bearer {token}"}
            async with stage.client.request(route.method, url, headers=headers, json={}) as answer:
                body = await answer.json()
                assert (answer.status, body["code"], body["error_code"]) == (status, code, code), path
    assert await stage.asked_for(Session) == ["theirs"]


async def test_what_is_wrong_in_a_body_is_said_in_one_sentence(stage: Stage) -> None:
    await stage.session_here("work")
    path = "/sandboxes/work"
    for method, where, body, status in (
        ("POST", "/sandboxes", {"template": 5}, 400),
        ("POST", "/sandboxes", {"template": "../../secrets"}, 400),
        ("POST", "/sandboxes", {"template": "basic", "labels": {"a": "x" * 2000}}, 400),
        ("POST", f"{path}/exec", {"command": ["ls"]}, 400),
        ("POST", f"{path}/exec", {}, 400),
        ("POST", f"{path}/exec", {"command": "x", "timeout_seconds": 1e9}, 400),
        ("POST", f"{path}/exec", {"command": "x" * (1 << 20)}, 413),
        ("POST", f"{path}/exec", {"files": [{"path": "/a", "content": "b", "mode": 7}]}, 400),
        ("POST", f"{path}/fork", {"count": 0}, 400),
        ("POST", f"{path}/fork", {"count": True}, 400),
        ("POST", f"{path}/fork", {"count": 2, "labels": "ab"}, 400),
        ("POST", f"{path}/connect-url", {"port": 0}, 400),
        ("GET", "/sandboxes/%2e%2e%2fsecrets", None, 404),
        ("PUT", path, {}, 405),
    ):
        got, answer = await stage.ask(method, where, body)
        assert got == status, (where, body, answer)
        assert answer["message"] == answer["error"] != ""
    assert stage.engine.executed == []


async def test_a_sandbox_of_another_node_is_asked_for_there_in_the_same_words(
    stage: Stage, far: str, tmp_path: Path
) -> None:
    asked: list[tuple[str, Any]] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append((request.path_qs, await request.json()))
        return web.json_response({"answered": "there"})

    app = web.Application()
    app.router.add_post("/{path:.*}", answer)
    identity = certificates.self_signed(tmp_path / "far-tls", ["127.0.0.1"])
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=identity.context).start()
        endpoint = f"https://127.0.0.1:{runner.addresses[0][1]}"
        told = {"status": {"endpoint": endpoint, "caBundle": identity.ca_bundle}}
        await stage.admin.apply(ForkNode, None, "far-node", {}, manager="test")
        await stage.admin.apply(ForkNode, None, "far-node", told, manager="test", subresource="status")
        for path in (f"sandboxes/{far}/exec?x=1", f"sandboxes/{far}/fork"):
            body = {"command": "x"} if "exec" in path else {"count": 2}
            assert await stage.ask("POST", f"/{path}", body) == (200, {"answered": "there"})
        url = f"{stage.url}/ns/{stage.namespace}/daemon/v1/sessions/far/exec"
        headers = {"Authorization": f"Bearer {stage.token}"}
        async with stage.client.post(url, headers=headers, json={"commands": [["x"]]}) as got:
            assert await got.json() == {"answered": "there"}
    finally:
        await runner.cleanup()
        await stage.admin.delete(ForkNode, None, "far-node")
    space = f"/ns/{stage.namespace}"
    assert asked == [
        (f"{space}/v1/sandboxes/far/exec", {"command": "x"}),
        (f"{space}/v1/sandboxes/far/fork", {"count": 2}),
        (f"{space}/daemon/v1/sessions/far/exec", {"commands": [["x"]]}),
    ]
    # Its agent is away now, and the client would not ask again.
    assert (await stage.ask("DELETE", "/sandboxes/far"))[1] == {"deleted": True, "id": "far"}
