"""Who may not, may not anywhere: every declared route, asked with every kind of token that is no good."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, utils

from e2e.http_stage import SECONDS, Stage, rights
from forktree.models import Fork, Session
from forktree_agent.http.collimate.daemon import DAEMON
from forktree_agent.http.collimate.gateway import GATEWAY
from forktree_agent.http.routes import OPEN, ROUTES
from forktree_agent.http.table import Route
from forktree_dev import provisioning

THERE = {
    "session_id": "theirs",
    "fork_id": "theirs-fork",
    "template_id": "basic",
    "checkpoint": "good",
    "index": "0",
    "exec_id": "e",
    "port": "8000",
    "path": "x",
}

BODIES: dict[str, object] = {
    "/sessions": {"template_id": "basic"},
    "/sessions/{session_id}/exec": {"command": "true"},
    "/sessions/{session_id}/execs/{exec_id}/stdin": {"data_base64": "eA=="},
    "/sessions/{session_id}/fork": {"replicas": 1},
    "/forks/{fork_id}/fork": {"replicas": 1},
    "/sessions/{session_id}/score": {"score": 1.0},
    "/sessions/{session_id}/heartbeat": {"ttl_seconds": 5},
    "/sessions/{session_id}/checkpoints": {"name": "good", "keep_last": 1},
    "/sessions/{session_id}/rollback": {"checkpoint": "good", "release": True},
    "/batch/score": {"scores": {"theirs": 1.0}},
    "/batch/prune": {"session_ids": ["theirs"], "fork_ids": ["theirs-fork"]},
    "/batch/exec": {"session_ids": ["theirs"], "exec": {"command": "true"}},
    "/templates": {"name": "made", "image": "tiny"},
    "/templates/{template_id}/expect": {"width": 1},
    "/sandboxes": {"template": "basic"},
    "/sandboxes/{session_id}/exec": {"command": "true"},
    "/sandboxes/{session_id}/fork": {"count": 1},
    "/sandboxes/{session_id}/connect-url": {"port": 80},
    "/exec": {"template_id": "basic", "command": "true"},
}
"""Whole ones: a request is to fail for who asks, and not for what it says."""

WALKED: tuple[tuple[str, Route], ...] = (
    *(("", route) for route in ROUTES),
    *((surface.below, route) for surface in (GATEWAY, DAEMON) for route in surface.routes),
)
"""Every route that takes a token, and below what it stands."""

UPGRADE = {
    "Connection": "Upgrade",
    "Upgrade": "websocket",
    "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA==",
}


def segment(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def read_segment(text: str) -> Any:
    return json.loads(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))


def signed_again(stage: Stage, **claims: object) -> str:
    """The user's token with other claims, and a signature that the API server accepts."""
    head, payload, _ = stage.token.split(".")
    told = f"{head}.{segment(json.dumps(read_segment(payload) | claims).encode())}"
    pem = (stage.plane.state_dir / "service-account.key").read_bytes()
    key = serialization.load_pem_private_key(pem, None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    r, s = utils.decode_dss_signature(key.sign(told.encode(), ec.ECDSA(hashes.SHA256())))
    return f"{told}.{segment(r.to_bytes(32, 'big') + s.to_bytes(32, 'big'))}"


async def none(_: Stage) -> str:
    return ""


async def garbage(_: Stage) -> str:
    return "~.%00." + "A" * 4000


async def nested(_: Stage) -> str:
    """Looks like a token, and its claims go deeper than any stack."""
    claims = segment(b'{"x":' + b"[" * 4000)
    return f"a.{claims}.c"


async def forged(stage: Stage) -> str:
    return stage.token[:-8] + "AAAAAAAA"


async def unsigned(stage: Stage) -> str:
    _, payload, _ = stage.token.split(".")
    head = segment(b'{"alg":"none"}')
    return f"{head}.{payload}."


async def expired(stage: Stage) -> str:
    now = int(time.time())
    return signed_again(stage, iat=now - 7200, nbf=now - 7200, exp=now - 3600)


async def for_the_api_server(stage: Stage) -> str:
    told = await stage.plane.kubectl.run("create", "token", "user", f"--namespace={stage.namespace}")
    return str(told.strip())


async def for_somebody_else(stage: Stage) -> str:
    told = await stage.plane.kubectl.run(
        "create", "token", "user", f"--namespace={stage.namespace}", "--audience=vault"
    )
    return str(told.strip())


async def administrator(stage: Stage) -> str:
    return stage.plane.token


async def without_account(stage: Stage) -> str:
    """Was good until its account was deleted."""
    kubectl = stage.plane.kubectl
    await kubectl.run("create", "serviceaccount", "gone", f"--namespace={stage.namespace}")
    token = await provisioning.user_token(kubectl, "gone", namespace=stage.namespace)
    await kubectl.run("delete", "serviceaccount", "gone", f"--namespace={stage.namespace}")
    return token


Kind = Callable[[Stage], Awaitable[str]]
BAD: tuple[Kind, ...] = (
    none,
    garbage,
    nested,
    forged,
    unsigned,
    expired,
    for_the_api_server,
    for_somebody_else,
    administrator,
    without_account,
)


@pytest.fixture
async def victim(stage: Stage) -> Stage:
    """A namespace with something in it to be read, changed and deleted."""
    session = await stage.session_here("theirs")
    await stage.plane.kubectl.apply(
        {
            "apiVersion": "forktree.dev/v1alpha1",
            "kind": "Fork",
            "metadata": {
                "name": "theirs-fork",
                "namespace": stage.namespace,
                "labels": {"forktree.dev/checkpoint": "good"},
            },
            "spec": {"source": {"session": {"name": "theirs", "uid": session.metadata.uid}}},
        }
    )
    return stage


async def asked(
    stage: Stage, route: Route, prefix: str, token: str, *, upgrade: bool = True
) -> tuple[int, Any]:
    """The answer, which must be one of this API, to a request that is right but for who asks."""
    path = route.path.format(**THERE)
    body = BODIES.get(route.path) if route.method == "POST" else None
    data: bytes | None = None if route.body is None else json.dumps(body or {}).encode()
    query = "?path=/etc/passwd" if route.query is not None and "path" in route.query.model_fields else ""
    headers = {"Authorization": f"Bearer {token}"} | (
        UPGRADE if upgrade and path.endswith("/terminal") else {}
    )
    url = f"{stage.url}{prefix}/v1{path}{query}"
    async with stage.client.request(route.method, url, data=data, headers=headers) as answer:
        assert answer.content_type == "application/json", (route.method, url, answer.status)
        if route.method == "HEAD":  # Has no body to say it in.
            return answer.status, {"code": {401: "unauthorized", 403: "forbidden"}.get(answer.status)}
        return answer.status, await answer.json()


async def state_of(stage: Stage) -> list[tuple[str, str | None]]:
    """All objects of the namespace with their versions."""
    sessions = (await stage.admin.list(Session, stage.namespace)).items
    forks = (await stage.admin.list(Fork, stage.namespace)).items
    return sorted(
        (f"{type(each).__name__} {each.metadata.name}", each.metadata.resource_version)
        for each in (*sessions, *forks)
    )


def test_all_routes_that_take_a_body_have_one_here() -> None:
    taking = {route.path for _, route in WALKED if route.method == "POST" and "port" not in route.parameters}
    assert taking - set(BODIES) == {
        *(f"/sessions/{{session_id}}/{state}" for state in ("pause", "resume", "release")),
        *(f"/sandboxes/{{session_id}}/{state}" for state in ("suspend", "resume")),
        "/templates/{template_id}/release",
    }
    assert {name for _, route in WALKED for name in route.parameters} == set(THERE)


@pytest.mark.parametrize("kind", BAD, ids=lambda kind: kind.__name__)
async def test_no_route_answers_whoever_has_no_good_token(victim: Stage, kind: Kind) -> None:
    token, before = await kind(victim), await state_of(victim)
    for below, route in WALKED:
        for prefix in (f"/ns/{victim.namespace}", "/ns/kube-system", ""):
            status, body = await asked(victim, route, prefix + below, token)
            assert (status, body["code"]) == (401, "unauthorized"), (route.method, route.path, prefix)
            assert len(token) < 10 or token not in json.dumps(body)
    assert await state_of(victim) == before
    assert not victim.engine.executed


async def test_what_needs_no_token_tells_nothing_of_anybody(victim: Stage) -> None:
    for route in OPEN:
        async with victim.client.get(f"{victim.url}/v1{route.path}") as answer:
            assert victim.namespace not in await answer.text()


@pytest.fixture
async def neighbour(victim: Stage) -> str:
    """The token of somebody who may do all in another namespace."""
    kubectl, other = victim.plane.kubectl, f"{victim.namespace}-next"
    await kubectl.run("create", "namespace", other)
    await kubectl.apply(rights(other, "user"))
    token = await provisioning.user_token(kubectl, "user", namespace=other)
    headers = {"Authorization": f"Bearer {token}"}
    async with asyncio.timeout(SECONDS):  # The API server's own authorizer follows its watch.
        while True:
            async with victim.client.get(f"{victim.url}/v1/sessions", headers=headers) as answer:
                if answer.status == 200:
                    return token


async def test_the_token_of_one_namespace_does_nothing_in_another(victim: Stage, neighbour: str) -> None:
    before = await state_of(victim)
    for below, route in WALKED:
        status, body = await asked(victim, route, f"/ns/{victim.namespace}{below}", neighbour)
        if route.rights:
            assert (status, body["code"]) == (403, "forbidden"), (route.method, route.path)
            continue
        # A batch refuses each for itself.
        assert status == 200
        assert {(each["ok"], each["code"]) for each in body["results"]} == {(False, "forbidden")}, route.path
    assert await state_of(victim) == before
    assert not victim.engine.executed


async def test_nor_do_its_names_reach_what_others_call_alike(victim: Stage, neighbour: str) -> None:
    """Under the short paths, with the names that things have in the other namespace."""
    before = await state_of(victim)
    for below, route in WALKED:
        if route.path in {"/sessions", "/sandboxes", "/exec"} and route.method == "POST":
            continue  # It would wait for a machine of its own.
        status, body = await asked(victim, route, below, neighbour, upgrade=False)
        assert status < 500, (route.method, route.path, body)
        assert "theirs" not in json.dumps(body) or status in {200, 404}, (route.method, route.path, body)
        if route.parameters or not route.rights:
            found = (
                [each["ok"] for each in body["results"]] if "results" in body else [status == 200 and body]
            )
            assert not any(found), (route.method, route.path, body)
    assert await state_of(victim) == before
    assert not victim.engine.executed


async def test_the_good_token_does_reach_all_of_them(victim: Stage) -> None:
    """Or the tests above would show nothing."""
    refused: list[str] = []
    for below, route in WALKED:
        if route.method in {"GET", "PUT"} and not route.path.endswith("/terminal"):
            status, body = await asked(victim, route, f"/ns/{victim.namespace}{below}", victim.token)
            refused += [f"{route.path}: {body}"] if status in {401, 403} else []
    assert refused == []


@pytest.mark.parametrize(
    "header",
    ["Basic dXNlcjpwYXNz", "Bearer", "bearer  ", "Bearer a b", "Token x", "Bearer \u00e9", "x" * 7000],
)
async def test_an_odd_header_is_a_refusal_like_others(stage: Stage, header: str) -> None:
    with_it = {"Authorization": header}
    try:
        async with stage.client.get(f"{stage.url}/v1/sessions", headers=with_it) as answer:
            assert (answer.status, (await answer.json())["code"]) == (401, "unauthorized")
    except aiohttp.ClientError as err:
        pytest.fail(f"no answer at all: {err}")
