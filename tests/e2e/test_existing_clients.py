"""Programs that speak Collimate's protocol: `collimate-rl` 0.8.0 as PyPI has it, against real machines."""

# The client has types for a part of what it does, and puts methods on its classes as it is imported.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false, reportAttributeAccessIssue=false, reportPrivateUsage=false

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

import pytest
import pytest_asyncio
from collimate_rl import (
    CollimateClient,
    CollimateDrainingError,
    CollimateError,
    GatewayClient,
    GatewayError,
    Ready,
    Sandbox,
    Template,
    connect,
)

from e2e.conftest import SERVED_NAMESPACE
from e2e.whole import SECONDS, Whole
from forktree_dev.system import System

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    # The client keeps a connection for each of its threads and closes none.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

SEED = "deadbeef" * 8
Result = TypeVar("Result")


async def calling(call: Callable[..., Result], *arguments: Any, **options: Any) -> Result:
    """What a client answers, who knows nothing of event loops."""
    return await asyncio.to_thread(call, *arguments, **options)


@pytest_asyncio.fixture(loop_scope="session")
async def gateway(whole: Whole, monkeypatch: pytest.MonkeyPatch) -> GatewayClient:
    """By the one way in which this client can be told whom to trust. Its key is a token."""
    monkeypatch.setenv("SSL_CERT_FILE", str(whole.node.ca_path))
    await whole.template()
    return GatewayClient(api_key=whole.token, base_url=f"{whole.node.url}/ns/{whole.namespace}")


@pytest_asyncio.fixture(loop_scope="session")
async def here(system: System) -> AsyncIterator[Whole]:
    """A namespace that the agent serves at a socket."""
    await system.kubectl.run("create", "namespace", SERVED_NAMESPACE)
    async with Whole.using(system, SERVED_NAMESPACE) as whole:
        await whole.template()
        yield whole
    await system.kubectl.run("delete", "namespace", SERVED_NAMESPACE, timeout_seconds=SECONDS)


@pytest.fixture
def daemon(here: Whole) -> CollimateClient:
    client = connect(unix_socket=str(here.node.socket_path(SERVED_NAMESPACE)))
    assert isinstance(client, CollimateClient)
    return client


# The daemon's surface.


async def test_a_session_by_the_socket_of_its_namespace(here: Whole, daemon: CollimateClient) -> None:
    health = await calling(daemon.health)
    assert health["status"] == "ok"
    assert (health["sessions"], health["running"], health["queued"]) == (0, 0, 0)
    assert health["templates"] == ["tiny"] == await calling(daemon.templates)

    made = await calling(daemon.create_session, "tiny")
    name = made["session_id"]
    assert made["template_id"] == "tiny"
    assert 0 < made["fork_time_ms"] < made["create_time_ms"]
    done = await calling(daemon.session_exec, name, command="echo out; echo err >&2; exit 3", seed=SEED)
    assert (done["stdout"], done["stderr"], done["exit_code"]) == ("out\nerr\n", "", 3)
    assert (done["seed"], done["seed_ack"]) == (SEED, "off")
    assert 0 < done["exec_time_ms"] < done["total_time_ms"] + 1  # The guest counts whole milliseconds.
    told = await calling(daemon.session_exec, name, command="echo $FORKTREE_SEED")
    assert told["stdout"].strip() == told["seed"] != SEED

    adopted = await calling(Sandbox.attach, daemon, name)
    assert adopted.template == "tiny"
    assert (await calling(adopted.exec, command="hostname")).stdout == f"{name}\n"
    (info,) = await calling(daemon.list_sessions)
    assert (info["session_id"], info["exec_count"]) == (name, 3)
    assert 0 <= info["idle_secs"] < info["age_secs"]

    assert (await calling(daemon.delete_session, name))["deleted"] is True
    assert (await calling(daemon.delete_session, name))["deleted"] is False
    assert await calling(daemon.list_sessions) == []
    with pytest.raises(CollimateError) as gone:
        await calling(daemon.get_session, name)
    assert (gone.value.status, gone.value.error_code) == (404, "no_such_session")
    await here.gone("session", name)


async def test_a_command_of_its_own_leaves_nothing(here: Whole, daemon: CollimateClient) -> None:
    files = [{"path": "/tmp/deep/er/input", "content": "41"}]
    done = await calling(
        daemon.exec_once, "tiny", command="echo $(($(cat /tmp/deep/er/input) + 1))", files=files
    )
    assert (done["stdout"], done["exit_code"]) == ("42\n", 0)
    assert done["fork_time_ms"] > 0
    late = await calling(daemon.exec_once, "tiny", command="echo before; sleep 60", timeout_seconds=1)
    assert (late["stdout"], late["exit_code"]) == ("before\ntimeout after 1s\n", -1)
    many = await calling(
        daemon.exec_once, "tiny", commands=[["false"], ["bash", "-lc", "x"], ["echo", "it's $HOME"]]
    )
    assert many["stdout"].splitlines()[-1] == "it's $HOME"
    assert await here.names() == set()


async def test_code_under_a_seed_draws_the_same_numbers(here: Whole, daemon: CollimateClient) -> None:
    await here.template("python", image="builtin:python", machine={"memory": "256Mi"})
    draw = "import random, os\nprint(random.getrandbits(64), os.urandom(8).hex())"
    with await calling(Sandbox("python", client=daemon).start) as sandbox:
        drawn = [
            (await calling(sandbox.exec, draw, seed=seed)).stdout.split() for seed in (SEED, SEED, "0" * 64)
        ]
        assert drawn[0][0] == drawn[1][0] != drawn[2][0]
        assert drawn[0][1] != drawn[1][1]  # So it does not say that the kernel's follow.
        again = await calling(sandbox.exec, draw)
        assert (await calling(sandbox.exec, draw, seed=again.seed)).stdout.split()[0] == again.stdout.split()[
            0
        ]
        await calling(sandbox.close)


async def test_a_wrong_request_has_the_daemons_words(here: Whole, daemon: CollimateClient) -> None:
    for code, call in {
        "no_template": lambda: daemon.create_session("nowhere"),
        "invalid_seed": lambda: daemon.exec_once("tiny", command="x", seed="5eed"),
        "bad_request": lambda: daemon.create_session("tiny", egress={"mode": "open"}),
        "no_such_session": lambda: daemon.session_exec("No_Name", command="x"),
        "template_id_required": lambda: daemon._request("POST", "/v1/sessions", {}, idempotent=False),
        "not_found": lambda: daemon._request("GET", "/v1/nothing"),
    }.items():
        with pytest.raises(CollimateError) as refused:
            await calling(call)
        assert refused.value.error_code == code
        assert refused.value.status in {400, 404}
    assert await here.names() == set()


async def test_a_client_behind_a_proxy_reaches_the_socket(
    here: Whole, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    client = CollimateClient(unix_socket=str(here.node.socket_path(SERVED_NAMESPACE)))
    assert (await calling(client.health))["status"] == "ok"
    done = await calling(client.exec_once, "tiny", command="echo $0")
    assert done["exit_code"] == 0


async def test_a_socket_is_its_owners_and_its_groups(here: Whole) -> None:
    path = here.node.socket_path(SERVED_NAMESPACE)
    assert path.stat().st_mode & 0o777 == 0o660
    assert path.is_socket()


async def test_a_session_that_has_no_room_here_is_told_so_and_leaves_nothing(
    here: Whole, daemon: CollimateClient
) -> None:
    await here.template("huge", machine={"memory": "64Gi"})
    for call in (daemon.create_session, daemon.exec_once):
        with pytest.raises(CollimateError) as full:
            await calling(call, "huge", **({} if call == daemon.create_session else {"command": "x"}))
        assert (full.value.status, full.value.error_code) == (503, "at_capacity")
    assert await here.names() == set()


# The gateway's.


async def test_a_sandbox_is_forked_by_a_client_that_knows_nothing_of_us(
    whole: Whole, gateway: GatewayClient
) -> None:
    (image,) = await calling(gateway.images)
    assert (image["id"], image["name"], image["image"]) == ("tiny", "tiny", "builtin:tiny")
    assert (await calling(gateway.health))["status"] == "ok"
    session = await calling(gateway.session("tiny", label="trunk").open)
    assert 0 < session.fork_time_ms < session.create_time_ms
    await calling(session.exec, command="echo kept > /tmp/file")

    children = await calling(session.fork, 2, labels=["a", "it's b"])
    assert len(children) == 2
    assert (await calling(session.exec, command="cat /tmp/file")).stdout == "kept\n"
    for child, label in zip(children, ("a", "it's b"), strict=True):
        assert (await calling(gateway.exec, child["id"], command="cat /tmp/file"))["stdout"] == "kept\n"
        assert (await calling(gateway.get_sandbox, child["id"]))["label"] == label
    (grandchild,) = (await calling(gateway.fork, children[0]["id"]))["children"]
    assert (await calling(gateway.exec, grandchild["id"], command="cat /tmp/file"))["stdout"] == "kept\n"

    listed = {each["id"]: each for each in await calling(gateway.list_sandboxes)}
    assert {name: each.get("label") for name, each in listed.items()} == {
        session.id: "trunk",
        children[0]["id"]: "a",
        children[1]["id"]: "it's b",
        **({grandchild["id"]: None} if grandchild["id"] in listed else {}),  # Its object may follow.
    }
    assert {each["template"] for each in listed.values()} == {"tiny"}
    assert listed[children[0]["id"]]["parent"] == session.id
    with pytest.raises(GatewayError) as wide:
        await calling(gateway.fork, session.id, count=33)
    assert (wide.value.status, wide.value.code) == (400, "bad_request")
    assert "32" in str(wide.value)

    stands = await calling(session.suspend)
    assert stands == {"id": session.id, "state": "suspended"}
    with pytest.raises(GatewayError) as still:
        await calling(session.exec, command="true")
    assert still.value.code == "not_ready"
    assert (await calling(session.resume))["state"] == "running"
    assert (await calling(session.exec, command="cat /tmp/file")).stdout == "kept\n"
    for name in (session.id, grandchild["id"], children[0]["id"], children[1]["id"]):
        assert (await calling(gateway.delete_sandbox, name))["deleted"] is True
    await whole.names_are(set())


async def test_a_parent_that_is_closed_leaves_its_children_and_the_last_of_them_leaves_nothing(
    whole: Whole, gateway: GatewayClient
) -> None:
    session = await calling(gateway.session("tiny").open)
    await calling(session.exec, command="echo kept > /tmp/file")
    first, second = [each["id"] for each in await calling(session.fork, 2)]
    await calling(session.close)  # At once: the objects of the fork are on their way.
    (third,) = [each["id"] for each in (await calling(gateway.fork, first, labels=["third"]))["children"]]
    assert (await calling(gateway.delete_sandbox, first))["deleted"] is True
    assert (await calling(gateway.delete_sandbox, first))["deleted"] is False
    for name in (second, third):
        assert (await calling(gateway.exec, name, command="cat /tmp/file"))["stdout"] == "kept\n"
    assert {each["id"] for each in await calling(gateway.list_sandboxes)} == {second, third}
    await asyncio.gather(*(calling(gateway.delete_sandbox, each) for each in (second, third)))
    await whole.names_are(set())


async def test_a_group_wider_than_one_call_is_whole_and_goes_as_one(
    whole: Whole, gateway: GatewayClient
) -> None:
    session = await calling(gateway.session("tiny").open)
    group = await calling(session.fork_group, 70, labels=[f"rollout {index}" for index in range(70)])
    assert len({child.session_id for child in group}) == 70
    first, last = group.children[0], group.children[69]
    done = await asyncio.gather(*(calling(each.exec, command="hostname") for each in (first, last)))
    assert [each.stdout.strip() for each in done] == [first.session_id, last.session_id]
    listed = {each["id"]: each.get("label") for each in await calling(gateway.list_sandboxes)}
    assert listed[first.session_id] == "rollout 0"
    assert listed[last.session_id] == "rollout 69"
    await calling(group.close)
    assert (await calling(session.exec, command="echo alive")).stdout == "alive\n"
    assert [each["id"] for each in await calling(gateway.list_sandboxes)] == [session.id]
    await calling(session.close)


async def test_bytes_go_in_and_come_out_as_they_were(whole: Whole, gateway: GatewayClient) -> None:
    sent = os.urandom(1 << 20)
    with await calling(Sandbox("tiny", client=gateway).start) as sandbox:
        await calling(sandbox.upload_bytes, "/tmp/up/load", sent)
        got = await calling(sandbox.download, "/tmp/up/load")
        assert hashlib.sha256(got).digest() == hashlib.sha256(sent).digest()
        late = await calling(sandbox.exec, command="sleep 60", timeout_seconds=1)
        assert late.exit_code == -1
        assert "timeout" in late.stdout
        await calling(sandbox.close)
    await whole.names_are(set())


async def test_a_template_is_made_sized_and_deleted(whole: Whole, gateway: GatewayClient) -> None:
    made: dict[str, Any] = {"name": "warm", "image": "builtin:tiny", "width": 0}
    handle = await calling(Template.bake, gateway, ready=Ready(cmd="test -d /tmp", env={"A": "b"}), **made)
    assert (await calling(handle.wait, timeout=SECONDS)).converged
    assert (await calling(gateway.expect_width, "warm", 100_000))["expected_width"] == 64
    assert (await calling(handle.status)).declared == 64
    assert (await calling(gateway.release_template, "warm"))["released"] is True
    assert (await calling(handle.status)).declared == 0
    async with asyncio.timeout(SECONDS):
        while (await calling(handle.status)).phase != "Live":  # noqa: ASYNC110  # It was to keep some waiting, so it is baked.
            await asyncio.sleep(0.1)
    with await calling(gateway.session("warm").open) as session:
        assert (await calling(session.exec, command="echo $A")).stdout == "b\n"
        with pytest.raises(GatewayError) as used:
            await calling(gateway.delete_template, "warm")
        assert (used.value.status, used.value.code) == (409, "template_in_use")
        await calling(session.close)
    assert {each["id"] for each in await calling(gateway.list_templates)} == {"tiny", "warm"}
    again = await calling(gateway.create_template, ready={"cmd": "test -d /tmp", "env": {"A": "b"}}, **made)
    assert again["id"] == "warm"
    assert (await calling(gateway.delete_template, "warm"))["deleted"] is True
    with pytest.raises(GatewayError) as gone:
        await calling(gateway.get_template, "warm")
    assert (gone.value.status, gone.value.code) == (404, "not_found")


async def test_a_wrong_request_has_the_gateways_words(whole: Whole, gateway: GatewayClient) -> None:
    there = await calling(gateway.session("tiny").open)
    stranger = GatewayClient(api_key="col_pro_test0001_x", base_url=gateway.base)
    bake: dict[str, Any] = {"name": "mine", "width": 1}
    for code, status, call in (
        ("unauthorized", 401, stranger.list_sandboxes),
        ("not_found", 404, lambda: gateway.get_sandbox("nobody")),
        ("not_found", 404, lambda: gateway.exec("nobody", command="x")),
        ("not_found", 404, lambda: gateway.fork("No_Name")),
        ("not_found", 404, lambda: gateway.create_sandbox("nowhere")),
        ("bad_request", 400, lambda: gateway.exec(there.id, command="x", seed="5eed")),
        ("bad_request", 400, lambda: gateway.create_sandbox("tiny", egress={"mode": "open"})),
        ("bad_request", 400, lambda: gateway.create_sandbox("tiny", secret_refs=["key"])),
        ("bad_request", 400, lambda: gateway.fork(there.id, count=2, labels=["one"])),
        ("bad_request", 400, lambda: gateway.create_template(image="python:3.11", **bake)),
        (
            "bad_request",
            400,
            lambda: gateway.create_template(image="builtin:tiny", ready={"ports": [1]}, **bake),
        ),
        ("port_not_exposed", 409, lambda: gateway.connect_url(there.id, 8000)),
        ("not_found", 404, lambda: gateway.connect_url("nobody", 8000)),
        ("not_found", 404, gateway.usage),
    ):
        with pytest.raises(GatewayError) as refused:
            await calling(call)
        assert (refused.value.code, refused.value.status) == (code, status), refused.value
        assert len(str(refused.value)) > 20
    await calling(there.close)
    await whole.names_are(set())


async def test_what_has_no_room_is_told_at_once_and_leaves_nothing(
    whole: Whole, gateway: GatewayClient
) -> None:
    await whole.template("huge", machine={"memory": "64Gi"})
    with pytest.raises(GatewayError) as full:
        await calling(gateway.create_sandbox, "huge")
    assert (full.value.status, full.value.code) == (503, "at_capacity")
    await whole.names_are(set())


async def test_a_client_goes_on_after_its_agent_was_started_anew(
    whole: Whole, gateway: GatewayClient
) -> None:
    # All in one thread, which has one connection. What fails there because it is closed is not sent again.
    def before() -> str:
        gateway.health()
        gateway.list_templates()
        return str(gateway.create_sandbox("tiny")["id"])

    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(max_workers=1) as thread:
        name = await loop.run_in_executor(thread, before)
        await whole.crash_agent()
        done = await loop.run_in_executor(thread, lambda: gateway.exec(name, command="echo on"))
        assert done["stdout"] == "on\n"
        await loop.run_in_executor(thread, gateway.health)
        await whole.crash_agent()
        (child,) = (await loop.run_in_executor(thread, lambda: gateway.fork(name)))["children"]
        assert child["id"] != name
    await calling(gateway.delete_sandbox, name)


async def test_an_agent_that_stops_says_so_and_finishes_what_it_does(
    here: Whole, daemon: CollimateClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(here.node.ca_path))
    gateway = GatewayClient(api_key=here.token, base_url=f"{here.node.url}/ns/{SERVED_NAMESPACE}")
    name = (await calling(daemon.create_session, "tiny"))["session_id"]
    await calling(gateway.exec, name, command="mkfifo /tmp/go")
    by_socket = asyncio.create_task(
        calling(daemon.session_exec, name, command="echo 1 > /tmp/a; cat /tmp/go")
    )
    by_tls = asyncio.create_task(calling(gateway.exec, name, command="echo 1 > /tmp/b; cat /tmp/go"))
    await here.sh(name, "until [ -s /tmp/a ] && [ -s /tmp/b ]; do sleep 0.05; done")
    stopping = asyncio.create_task(here.node.agent.stop())
    try:
        async with asyncio.timeout(SECONDS):
            while (await calling(daemon.health))["status"] != "draining":
                pass
        with pytest.raises(CollimateDrainingError):
            await calling(CollimateClient(unix_socket=daemon.unix_socket, retries=0).create_session, "tiny")
        with pytest.raises(GatewayError) as drains:
            await calling(gateway.create_sandbox, "tiny")
        assert (drains.value.status, drains.value.code) == (503, "draining")
    finally:
        await stopping
        for task in (by_socket, by_tls):
            with suppress(CollimateError, GatewayError):
                await task
        await here.revive_agent()
    # The machine is the keeper's: it went on, and the next agent serves it at the same socket.
    assert (await calling(daemon.session_exec, name, command="echo alive"))["stdout"] == "alive\n"
    await calling(daemon.delete_session, name)


async def test_the_daemons_surface_is_on_the_server_too_for_clients_with_a_token(
    whole: Whole, gateway: GatewayClient
) -> None:
    async def ask(method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
        url = f"{whole.node.url}/ns/{whole.namespace}/daemon/v1/{path}"
        async with whole.http.request(method, url, json=body) as answer:
            return answer.status, await answer.json()

    status, made = await ask("POST", "sessions", {"template_id": "tiny"})
    assert status == 201
    name = made["session_id"]
    listed = [["bash", "-lc", "exit 1"], ["sh", "-c", "echo second"]]
    status, done = await ask("POST", f"sessions/{name}/exec", {"commands": listed, "timeout_seconds": 30})
    assert (status, done["exit_code"]) == (200, 0)
    assert done["stdout"].endswith("second\n")
    status, done = await ask("POST", f"sessions/{name}/exec", {"files": [{"path": "/tmp/x", "content": "y"}]})
    assert (status, done["stdout"]) == (200, "")
    assert [each["session_id"] for each in (await ask("GET", "sessions"))[1]] == [name]
    assert (await ask("DELETE", f"sessions/{name}?force=true"))[1]["deleted"] is True
    assert (await ask("GET", f"sessions/{name}"))[0] == 404
