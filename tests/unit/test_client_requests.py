"""What the client does when answers are lost, late, refused, or not from the agent at all."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web

from forktree import AsyncClient, Retries, errors
from forktree_agent.http import errors as agent
from forktree_agent.http.certificates import self_signed
from unit.agent_server import (
    ScriptedAgent,
    breaks,
    breaks_after,
    created,
    finished,
    forked,
    info,
    refuses,
)
from unit.api_server import says


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[ScriptedAgent]:
    async with ScriptedAgent.running(tmp_path / "tls") as running:
        yield running


@pytest.fixture
async def client(server: ScriptedAgent) -> AsyncIterator[AsyncClient]:
    async with server.client() as client:
        yield client


def test_every_word_of_the_agent_has_a_class_here() -> None:
    for code in agent.Code:
        error = errors.refused("why", code=code, status=agent.STATUS[code])
        assert error.code == code, code
    begun: set[str] = {code for code in agent.Code if errors.refused("", code=code, status=0).begun}
    assert set(agent.Code) - begun == {"at_capacity", "session_bringup_failed", "overloaded", "draining"}


async def test_a_session_is_made_forked_used_and_deleted(server: ScriptedAgent, client: AsyncClient) -> None:
    server.script += [created(), forked("a", "b"), finished("hello\n"), says({"deleted": True})]
    session = await client.sessions.create("t")
    assert (session.id, session.template_id, session.depth, session.parent_id) == ("s", "t", 0, None)
    fork = await session.fork(2)
    assert [(child.id, child.parent_id, child.depth) for child in fork] == [("a", "s", 1), ("b", "s", 1)]
    assert (fork.id, len(fork), fork[-1], fork.pause_ms) == ("f", 2, fork.children[1], 2.0)
    result = await fork[0].exec(["echo", "hello"], env={"A": "b"}, cwd="/tmp", stdin="in", timeout=5)
    assert (result.stdout, result.ok) == ("hello\n", True)
    await session.prune()
    assert [(each.method, each.path) for each in server.seen] == [
        ("POST", "/ns/ns/v1/sessions"),
        ("POST", "/ns/ns/v1/sessions/s/fork"),
        ("POST", "/ns/ns/v1/sessions/a/exec"),
        ("DELETE", "/ns/ns/v1/sessions/s"),
    ]
    assert server.seen[2].body == {
        "argv": ["echo", "hello"],
        "env": {"A": "b"},
        "cwd": "/tmp",
        "stdin": "in",
        "timeout_seconds": 5,
    }


async def test_a_lost_answer_to_a_fork_is_asked_for_again_by_the_same_key(
    server: ScriptedAgent, client: AsyncClient
) -> None:
    server.script += [created(), breaks, breaks_after(b'{"fork_id":'), forked("a")]
    session = await client.sessions.create("t")
    assert [child.id for child in await session.fork()] == ["a"]
    keys = {each.key for each in server.seen[1:]}
    assert len(server.seen) == 4
    assert len(keys) == 1
    assert None not in keys
    assert server.seen[0].key not in keys


async def test_what_was_named_has_no_key_and_is_asked_for_again_all_the_same(
    server: ScriptedAgent, client: AsyncClient
) -> None:
    server.script += [breaks, created("mine")]
    assert (await client.sessions.create("t", name="mine")).id == "mine"
    assert [(each.key, each.body) for each in server.seen] == [
        (None, {"template_id": "t", "name": "mine"})
    ] * 2


async def test_a_key_whose_answer_stays_away_is_told_and_finds_the_fork_again(
    server: ScriptedAgent, client: AsyncClient
) -> None:
    server.script += [created(), *[breaks] * 5, forked("a")]
    session = await client.sessions.create("t")
    with pytest.raises(errors.AnswerLost) as lost:
        await session.fork()
    assert lost.value.idempotency_key == server.seen[1].key
    again = await session.fork(idempotency_key=lost.value.idempotency_key)
    assert again[0].id == "a"
    assert server.seen[-1].key == server.seen[1].key


async def test_a_command_whose_answer_is_lost_is_not_run_twice(
    server: ScriptedAgent, client: AsyncClient
) -> None:
    server.script += [created(), breaks, finished()]
    session = await client.sessions.create("t")
    with pytest.raises(errors.AnswerLost):
        await session.exec("rm -r /tmp/x")
    assert len(server.seen) == 2


@pytest.mark.parametrize("code", ["at_capacity", "session_bringup_failed", "overloaded"])
async def test_what_was_refused_before_it_began_is_asked_for_again(
    code: str, server: ScriptedAgent, client: AsyncClient
) -> None:
    status = agent.STATUS[agent.Code(code)]
    server.script += [refuses(code, status), created(), refuses(code, status), finished()]
    session = await client.sessions.create("t")
    assert (await session.exec("true")).ok
    assert len(server.seen) == 4


async def test_no_room_is_told_when_it_stays_so(server: ScriptedAgent, client: AsyncClient) -> None:
    server.script += [refuses("at_capacity", 503, "the node is full")] * 5
    with pytest.raises(errors.AtCapacity, match="the node is full"):
        await client.sessions.create("t")
    assert len(server.seen) == 5


async def test_a_server_that_says_when_is_not_asked_before(server: ScriptedAgent, tmp_path: Path) -> None:
    server.script += [refuses("overloaded", 503, headers={"Retry-After": "3600"})]
    async with server.client() as client:
        session = client.sessions.create("t", timeout=5)
        with pytest.raises(errors.Overloaded):
            await session  # There is no time for a second attempt, so there is none.
    assert len(server.seen) == 1


@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        ("no_template", 404, errors.NoSuchTemplate),
        ("conflict", 409, errors.Conflict),
        ("unauthorized", 401, errors.Unauthorized),
        ("internal", 500, errors.ServerBroken),
        ("a_word_of_the_future", 418, errors.Refused),
    ],
)
async def test_other_refusals_are_told_at_once_by_their_class(
    code: str, status: int, kind: type[errors.Refused], server: ScriptedAgent, client: AsyncClient
) -> None:
    server.script += [refuses(code, status, "a sentence")]
    with pytest.raises(kind, match=r"^a sentence$") as refused:
        await client.sessions.create("t")
    assert (refused.value.given_code, refused.value.status, len(server.seen)) == (code, status, 1)


async def test_reading_is_repeated_after_any_passing_failure(
    server: ScriptedAgent, client: AsyncClient
) -> None:
    server.script += [
        refuses("upstream_error", 502),
        breaks,
        says({"session_id": "s"}, 503),
        says([info("s")]),
    ]
    assert [session.id for session in await client.sessions.list()] == ["s"]


async def test_what_is_gone_is_deleted_already(server: ScriptedAgent, client: AsyncClient) -> None:
    server.script += [breaks, refuses("no_such_session", 404)]
    await client.sessions.delete("s")
    assert len(server.seen) == 2


async def test_a_silent_server_is_left_at_the_deadline(server: ScriptedAgent, client: AsyncClient) -> None:
    with pytest.raises(errors.AnswerLost, match="no answer"):
        await client.sessions.create("t", timeout=0.2)


async def test_a_server_that_drips_is_left_at_the_deadline(
    server: ScriptedAgent, client: AsyncClient
) -> None:
    async def drips(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b" ")
            await asyncio.sleep(0.01)

    server.script += [drips, drips]
    with pytest.raises(errors.AnswerLost):
        await client.sessions.create("t", timeout=0.3)
    with server.sync_client() as sync, pytest.raises(errors.AnswerLost):
        await asyncio.to_thread(lambda: sync.sessions.create("t", timeout=0.3))


async def test_the_sync_client_does_the_same(server: ScriptedAgent) -> None:
    server.script += [created(), breaks, forked("a", "b"), refuses("at_capacity", 503), finished("x"), breaks]

    def work() -> None:
        with server.sync_client() as client:
            session = client.sessions.create("t")
            fork = session.fork(2)
            assert [child.id for child in fork] == ["a", "b"]
            assert fork[1].exec("echo x").stdout == "x"
            with pytest.raises(errors.AnswerLost):
                session.exec("echo x")

    await asyncio.to_thread(work)
    assert server.seen[1].key == server.seen[2].key


async def test_another_certificate_than_the_agents_is_not_spoken_to(
    server: ScriptedAgent, tmp_path: Path
) -> None:
    stranger = self_signed(tmp_path / "stranger", ["127.0.0.1"])
    async with AsyncClient(server.url, token="secret", ca=stranger.ca_bundle) as client:
        with pytest.raises(errors.Untrusted, match="FORKTREE_CA"):
            await client.health()
    assert server.seen == []


async def test_where_nobody_listens_the_client_says_so(tmp_path: Path, server: ScriptedAgent) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # Bound and not listening: whoever connects is refused.
        url = f"https://127.0.0.1:{held.getsockname()[1]}"
        async with AsyncClient(url, token="t", ca=server.ca, retries=Retries(most=1)) as client:
            with pytest.raises(errors.Unreachable, match=url):
                await client.sessions.create("t")


async def test_an_answer_of_something_else_is_told_as_such(
    server: ScriptedAgent, client: AsyncClient
) -> None:
    async def page(_: web.Request) -> web.StreamResponse:
        return web.Response(text="<html>hello</html>")

    async def error_page(_: web.Request) -> web.StreamResponse:
        return web.Response(text="<html>\n no\n</html>", status=403)

    server.script += [page, error_page]
    with pytest.raises(errors.UnexpectedAnswer, match="none of this API"):
        await client.sessions.create("t")
    with pytest.raises(errors.Refused, match="status 403 and no error of ours: <html> no </html>"):
        await client.sessions.create("t")


async def test_a_renewed_token_is_used_once_the_last_one_is_refused(
    server: ScriptedAgent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "token"
    file.write_text("old\n")
    monkeypatch.setenv("FORKTREE_TOKEN_FILE", str(file))

    async def expires(request: web.Request) -> web.StreamResponse:
        file.write_text("new\n")
        return await refuses("unauthorized", 401)(request)

    server.script += [expires, created()]
    async with AsyncClient(server.url, ca=server.ca) as client:
        await client.sessions.create("t")
    assert [each.token for each in server.seen] == ["old", "new"]
    assert server.seen[0].path == "/v1/sessions"


async def test_names_are_parts_of_paths_and_nothing_else(server: ScriptedAgent, client: AsyncClient) -> None:
    server.script += [refuses("no_such_session", 404)] * 2
    for name in ("../../v1/health", ".."):
        with pytest.raises(errors.NoSuchSession):
            await client.sessions.get(name)
    assert [each.path.count("/") for each in server.seen] == [5, 5]


async def test_a_closed_client_says_so(server: ScriptedAgent) -> None:
    client = server.client()
    await client.close()
    with pytest.raises(errors.ClientError, match="closed"):
        await client.health()


async def test_a_failed_command_says_what_it_said(server: ScriptedAgent, client: AsyncClient) -> None:
    server.script += [
        created(),
        finished(exit_code=2, stderr="no such file\n"),
        finished(exit_code=-1, timed_out=True),
        finished(exit_code=2),
    ]
    session = await client.sessions.create("t")
    with pytest.raises(errors.CommandFailed, match="command e ended with 2: no such file"):
        await session.exec("cat x", check=True)
    with pytest.raises(errors.CommandFailed, match="ran out of time"):
        await session.exec("cat x", check=True)
    assert (await session.exec("cat x")).exit_code == 2
