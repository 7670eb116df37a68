"""Calls to the API server: what is sent, what is understood, and that every one ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from forktree.kube import errors
from forktree.models import ObjectMeta, Session, SessionPhase, SessionStatus, Uid
from forktree.models.session import SessionSpec, TemplateRef
from unit.api_server import ScriptedServer, listing, refuses, says, session


@pytest.fixture
async def server() -> AsyncIterator[ScriptedServer]:
    async with ScriptedServer.running() as running:
        yield running


async def test_get_gives_the_object(server: ScriptedServer) -> None:
    server.script.append(says(session("a", 3, phase="Running")))
    async with server.client() as client:
        got = await client.get(Session, "default", "a")
    assert (got.metadata.name, got.status.phase) == ("a", "Running")
    assert server.seen[0].path == "/apis/forktree.dev/v1alpha1/namespaces/default/sessions/a"
    assert server.seen[0].headers["Authorization"] == "Bearer token"


async def test_list_reads_all_pages_of_one_instant(server: ScriptedServer) -> None:
    server.script += [listing(9, session("a", 1), more="next"), listing(9, session("b", 2))]
    async with server.client() as client:
        got = await client.list(Session, "default", field_selector="spec.nodeName=", label_selector="x=y")
    assert ([each.metadata.name for each in got.items], got.resource_version) == (["a", "b"], "9")
    assert server.seen[0].query["fieldSelector"] == "spec.nodeName="
    assert server.seen[1].query["continue"] == "next"
    assert server.seen[1].query["labelSelector"] == "x=y"


async def test_list_whose_instant_is_forgotten_between_pages_begins_again(server: ScriptedServer) -> None:
    server.script += [
        listing(9, session("gone", 1), more="next"),
        refuses(410, "Expired"),
        listing(12, session("b", 2)),
    ]
    async with server.client() as client:
        got = await client.list(Session)
    assert ([each.metadata.name for each in got.items], got.resource_version) == (["b"], "12")


async def test_create_sends_the_manifest_and_gives_what_the_server_kept(server: ScriptedServer) -> None:
    bodies: list[object] = []

    async def echo(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        bodies.append(body)
        return web.json_response({**body, "metadata": {**body["metadata"], "uid": "u-9"}}, status=201)

    server.script.append(echo)
    new = Session(
        metadata=ObjectMeta(name="a", namespace="n"), spec=SessionSpec(template_ref=TemplateRef(name="t"))
    )
    async with server.client() as client:
        made = await client.create(new)
    assert made.metadata.uid == "u-9"
    assert bodies == [new.manifest()]
    assert (server.seen[0].method, server.seen[0].path) == (
        "POST",
        "/apis/forktree.dev/v1alpha1/namespaces/n/sessions",
    )


async def test_delete_names_the_uid_it_means(server: ScriptedServer) -> None:
    bodies: list[object] = []

    async def conflict(request: web.Request) -> web.StreamResponse:
        bodies.append(await request.json())
        return await refuses(409, "Conflict")(request)

    server.script.append(conflict)
    async with server.client() as client:
        with pytest.raises(errors.Conflict):
            await client.delete(Session, "n", "a", uid=Uid("u-1"), propagation="Background")
    assert bodies == [
        {
            "kind": "DeleteOptions",
            "apiVersion": "v1",
            "preconditions": {"uid": "u-1"},
            "propagationPolicy": "Background",
        }
    ]


async def test_patches_say_which_kind_they_are(server: ScriptedServer) -> None:
    server.script += [says(session("a", 1)), says(session("a", 2))]
    async with server.client() as client:
        await client.merge_patch(Session, "n", "a", {"status": {"node": None}}, subresource="status")
        await client.apply(Session, "n", "a", {"status": {}}, manager="me", subresource="status", force=True)
    merge, apply = server.seen
    assert merge.path.endswith("/sessions/a/status")
    assert merge.headers["Content-Type"] == "application/merge-patch+json"
    assert apply.headers["Content-Type"] == "application/apply-patch+yaml"
    assert dict(apply.query) == {"fieldManager": "me", "force": "true"}


async def test_a_status_is_replaced_whole_where_its_version_holds(server: ScriptedServer) -> None:
    bodies: list[object] = []

    async def echo(request: web.Request) -> web.StreamResponse:
        bodies.append(await request.json())
        return await says(session("a", 2, phase="Running"))(request)

    server.script += [says(session("a", 1, message="gone")), echo]
    async with server.client() as client:
        before = await client.get(Session, "default", "a")
        after = await client.replace_status(before, SessionStatus(phase=SessionPhase.RUNNING, node="n"))
    assert (server.seen[1].method, server.seen[1].path) == (
        "PUT",
        "/apis/forktree.dev/v1alpha1/namespaces/default/sessions/a/status",
    )
    assert bodies == [
        {
            "apiVersion": "forktree.dev/v1alpha1",
            "kind": "Session",
            "metadata": {"name": "a", "namespace": "default", "uid": "uid-a", "resourceVersion": "1"},
            "status": SessionStatus(phase=SessionPhase.RUNNING, node="n").to_json(),
        }
    ]
    assert after.metadata.resource_version == "2"


async def test_refusal_has_the_servers_own_sentence(server: ScriptedServer) -> None:
    server.script.append(refuses(404, "NotFound", 'sessions.forktree.dev "a" not found'))
    async with server.client() as client:
        with pytest.raises(errors.NotFound, match=r'sessions\.forktree\.dev "a" not found'):
            await client.get(Session, "n", "a")


async def test_refused_token_is_read_again_once(server: ScriptedServer) -> None:
    server.tokens.extend(["renewed"])
    server.script += [refuses(401, "Unauthorized"), says(session("a", 1))]
    async with server.client() as client:
        await client.get(Session, "n", "a")
    assert [each.headers["Authorization"] for each in server.seen] == ["Bearer token", "Bearer renewed"]


async def test_token_that_stays_refused_is_an_error(server: ScriptedServer) -> None:
    server.script += [refuses(401, "Unauthorized"), refuses(401, "Unauthorized")]
    async with server.client() as client:
        with pytest.raises(errors.Unauthorized):
            await client.get(Session, "n", "a")


async def test_server_that_does_not_answer_is_unavailable_at_the_deadline(server: ScriptedServer) -> None:
    begun = time.monotonic()
    async with server.client() as client:
        with pytest.raises(errors.Unavailable, match="in time"):
            await client.get(Session, "n", "a", deadline=asyncio.get_running_loop().time() + 0.1)
    assert time.monotonic() - begun < 2


async def test_server_that_is_away_is_unavailable(server: ScriptedServer) -> None:
    server.url = "http://127.0.0.1:1"
    async with server.client() as client:
        with pytest.raises(errors.Unavailable, match="not reached"):
            await client.get(Session, "n", "a")


async def test_object_of_another_version_is_unreadable_and_not_quoted(server: ScriptedServer) -> None:
    server.script.append(says({**session("a", 1), "spec": {"secret": "s3cret"}}))
    async with server.client() as client:
        with pytest.raises(errors.Unreadable) as caught:
            await client.get(Session, "n", "a")
    assert "exactly one of templateRef and forkRef" in str(caught.value)
    assert "s3cret" not in str(caught.value)
