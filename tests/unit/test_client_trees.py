"""A tree as the client shows it, and as it follows it; scores, batches, and what a branch block leaves."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import pytest
import rich.console

from forktree import AsyncClient, AsyncTree, Branch, errors
from forktree._async.session import AsyncSession
from unit.agent_server import ScriptedAgent, breaks, created, forked, info, refuses
from unit.api_server import says
from unit.test_client_streams import lines
from unit.toy_agent import ToyAgent


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[ScriptedAgent]:
    async with ScriptedAgent.running(tmp_path / "tls") as running:
        yield running


@pytest.fixture
async def client(server: ScriptedAgent) -> AsyncIterator[AsyncClient]:
    async with server.client() as client:
        yield client


SESSIONS = [
    info("root", root="root"),
    info("a", parent_session_id="root", depth=1, score=1.0, unique_bytes=3 << 20),
    info("b", parent_session_id="root", depth=1, score=2.0),
    info("c", parent_session_id="a", depth=2, score=5.0, phase="Released", ready=False, reason="Expired"),
    info("<d>", parent_session_id="pruned", depth=2),
]
TOTALS = {"sessions": 5, "live": 4, "depth": 2, "point_bytes": 7}
TREE = {"root_session_id": "root", "sessions": SESSIONS, "forks": [], "totals": TOTALS}


@pytest.fixture
async def tree(server: ScriptedAgent, client: AsyncClient) -> AsyncTree[AsyncSession]:
    server.script.append(says(TREE))
    return await client.sessions.named("b").tree(memory=True)


async def test_a_tree_knows_its_best_its_leaves_and_the_way_to_each(
    tree: AsyncTree[AsyncSession], server: ScriptedAgent
) -> None:
    assert server.seen[0].path == "/ns/ns/v1/sessions/b/tree?memory=1"
    assert [node.id for node in tree] == ["root", "a", "c", "b", "<d>"]
    assert tree.best() is tree["c"]
    assert tree.best(live=True) is tree["b"]
    assert [node.id for node in tree.leaves()] == ["c", "b", "<d>"]
    assert [node.id for node in tree.path("c")] == [node.id for node in tree.path(tree["c"])]
    assert [node.id for node in tree.path("c")] == ["root", "a", "c"]
    assert (tree["a"].session.id, tree["a"].session.depth, len(tree), tree.totals.live) == ("a", 1, 5, 4)
    with pytest.raises(KeyError):
        tree.path("z")


async def test_a_tree_is_shown_as_text_in_colours_and_in_a_notebook(tree: AsyncTree[AsyncSession]) -> None:
    assert str(tree).splitlines() == [
        "root",
        "├── a  score 1  3.0 MiB",
        "│   └── c  score 5  Released (Expired)",
        "├── b  score 2",
        "└── <d>",
    ]
    console = rich.console.Console(file=io.StringIO(), force_terminal=True, width=80)
    console.print(tree)
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert "score 5" in shown
    assert "★" in shown
    html = tree._repr_html_()  # pyright: ignore[reportPrivateUsage]  # What notebooks call.
    assert "&lt;d&gt;" in html
    assert "<d>" not in html
    assert html.count("★") == 1


async def test_a_watched_tree_is_told_anew_after_each_change_and_each_break(
    tree: AsyncTree[AsyncSession], server: ScriptedAgent
) -> None:
    def seen(name: str, **more: object) -> dict[str, object]:
        return {"type": "session", "session": info(name, **more)}

    synced, alive = {"type": "synced"}, {"type": "alive"}
    server.script += [
        lines(
            seen("root"), seen("a", parent_session_id="root"), synced, alive,
            seen("a", parent_session_id="root", score=3.0), cut=True,
        ),
        breaks,
        lines(
            seen("root"), synced, {"type": "gone", "kind": "session", "id": "x"},
            {"type": "gone", "kind": "session", "id": "root"},
        ),
    ]  # fmt: skip
    async with aclosing(tree.watch()) as trees:
        told = [str(each) async for each in trees]
    assert told == ["root\n└── a", "root\n└── a  score 3", "root", "root"]


async def test_scores_and_states_are_told_as_they_are_meant(
    server: ScriptedAgent, client: AsyncClient
) -> None:
    server.script += [says(info("s", score=1.5))] * 6
    session = client.sessions.named("s")
    await session.score(1.5, speed=2)
    await session.score(None)
    await session.score(speed=2)
    assert session.info.score == 1.5
    await session.pause()
    await session.resume()
    await session.release()
    assert [(each.path.rpartition("/")[2], each.body) for each in server.seen] == [
        ("score", {"score": 1.5, "rewards": {"speed": 2}}),
        ("score", {"score": None}),
        ("score", {"rewards": {"speed": 2}}),
        ("pause", {}),
        ("resume", {}),
        ("release", {}),
    ]


async def test_what_a_fork_is_to_be_like_is_said_in_the_servers_words(
    server: ScriptedAgent, client: AsyncClient
) -> None:
    server.script += [forked("a", "b"), forked("c", parent="s", fork="g")]
    fork = await client.sessions.named("s").fork(
        branches=[Branch(name="left", command="go left", timeout=5, seed=7), Branch(env={"A": "b"})],
        labels={"team": "x"},
        score=["rate"],
        keep_top=1,
        complete=True,
    )
    await fork.fork(1, name="again")
    assert server.seen[0].path.endswith("/sessions/s/fork?wait=complete")
    assert server.seen[0].body == {
        "branches": [
            {"name": "left", "seed": "7", "exec": {"command": "go left", "timeout_seconds": 5}},
            {"env": {"A": "b"}},
        ],
        "labels": {"team": "x"},
        "score": {"argv": ["rate"], "timeout_seconds": 60},
        "keep_top": 1,
    }
    assert (server.seen[1].path, server.seen[1].body) == (
        "/ns/ns/v1/forks/f/fork",
        {"replicas": 1, "name": "again"},
    )


async def test_many_are_scored_and_pruned_in_batches_and_who_failed_is_told(
    server: ScriptedAgent, client: AsyncClient
) -> None:
    sessions = [client.sessions.named(f"s{index}") for index in range(300)]
    ok = says({"results": [{"session_id": "s", "ok": True}]})
    server.script += [ok, ok]
    await client.score(dict.fromkeys(sessions, 1.0))
    bodies = [each.body for each in server.seen]
    assert sorted(len(body["scores"]) for body in bodies) == [44, 256]

    gone = {"session_id": "s1", "ok": False, "error": "it is gone", "code": "no_such_session"}
    refused = {"session_id": "s2", "ok": False, "error": "you may not", "code": "forbidden"}
    server.script += [breaks, says({"results": [gone]}), says({"results": [gone, refused]})]
    await client.prune(sessions[:2])  # Gone is what it was to be.
    with pytest.raises(errors.BatchFailed, match="1 of 1 failed; s2: you may not") as failed:
        await client.prune(sessions[:3])
    assert isinstance(failed.value.failures["s2"], errors.Forbidden)


async def test_commands_in_many_sessions_are_run_once_and_answered_in_order(
    server: ScriptedAgent, client: AsyncClient
) -> None:
    done = {"id": "e", "stderr": "", "timed_out": False, "truncated": False, "exec_time_ms": 1.0}
    results = [
        {"session_id": name, "ok": True, "exec": {**done, "stdout": name, "exit_code": code}}
        for name, code in (("a", 0), ("b", 1))
    ]
    sessions = [client.sessions.named(name) for name in "ab"]
    server.script += [says({"results": results}), says({"results": results}), breaks]
    found = await client.exec_each(sessions, lambda session: ["echo", session.id])
    assert [result.stdout for result in found] == ["a", "b"]
    assert server.seen[0].body == {
        "execs": {name: {"argv": ["echo", name], "timeout_seconds": 30.0} for name in "ab"}
    }
    with pytest.raises(errors.CommandFailed):
        await client.exec_each(sessions, "true", check=True)
    with pytest.raises(errors.AnswerLost):
        await client.exec_each(sessions, "true")
    assert len(server.seen) == 3


async def test_a_branch_ends_with_its_block_unless_it_is_kept(tmp_path: Path) -> None:
    async with ToyAgent.running(tmp_path / "tls") as agent, agent.client() as client:
        root = await client.sessions.create("t")
        async with root.branch() as child:
            assert set(agent.texts) == {root.id, child.id}
        assert set(agent.texts) == {root.id}
        async with root.branch(3) as children:
            children[1].keep()
        assert set(agent.texts) == {root.id, children[1].id}
        with pytest.raises(ZeroDivisionError):
            async with root.branch():
                raise ZeroDivisionError
        assert set(agent.texts) == {root.id, children[1].id}

        def sync() -> None:
            with agent.sync_client() as client, client.sessions.named(root.id).branch(2) as children:
                assert len(children) == 2

        await asyncio.to_thread(sync)
        assert set(agent.texts) == {root.id, children[1].id}


async def test_a_tree_is_kept_alive_as_long_as_the_block_runs(
    server: ScriptedAgent, client: AsyncClient
) -> None:
    heard = says({"root_session_id": "s", "renew_within_secs": 1.0})
    server.script += [created(), *[heard] * 3]
    session = await client.sessions.create("t")
    async with session.keep_alive(0.03):
        await server.asked(4)
    server.script += [heard, refuses("forbidden", 403, "not any more")]
    with pytest.raises(errors.Forbidden, match="not any more"):
        async with session.keep_alive(0.03):
            (beating,) = [each for each in asyncio.all_tasks() if each.get_name() == "forktree-repeating"]
            await asyncio.wait([beating], timeout=20)


async def test_checkpoints_are_named_and_gone_back_to(server: ScriptedAgent, client: AsyncClient) -> None:
    point = {"checkpoint": "c", "fork_id": "f", "created_secs_ago": 1.0, "available": True}
    server.script += [
        breaks,
        says(point, 201),
        says([point]),
        breaks,
        forked("again"),
        refuses("not_found", 404),
    ]
    session = client.sessions.named("s")
    assert (await session.checkpoint("c", keep_last=3)).fork_id == "f"
    assert [each.checkpoint for each in await session.checkpoints()] == ["c"]
    assert (await session.rollback("c", release=True)).id == "again"
    await session.delete_checkpoint("c")
    assert server.seen[1].body == {"name": "c", "keep_last": 3}
    assert server.seen[3].key == server.seen[4].key is not None
