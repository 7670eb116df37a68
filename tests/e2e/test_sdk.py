"""The client against a whole system: found in the cluster, answers lost on the way, tokens of all kinds."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import pytest_asyncio

from e2e.whole import SECONDS, Whole
from forktree import AsyncClient, Branch, Client, Ended, errors
from forktree.kube.access import ClusterAccess

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest_asyncio.fixture(loop_scope="session")
async def client(whole: Whole) -> AsyncIterator[AsyncClient]:
    await whole.template()
    async with AsyncClient(whole.node.url, token=whole.token, ca=whole.node.ca_path) as client:
        yield client


async def test_a_client_that_is_told_nothing_finds_its_agent_in_the_cluster(whole: Whole) -> None:
    await whole.template()
    kubeconfig = whole.system.kubectl.kubeconfig
    async with AsyncClient(kubeconfig=kubeconfig, namespace=whole.namespace) as client:
        session = await client.sessions.create("tiny")
        assert (await session.exec("echo $((6 * 7))")).stdout == "42\n"
        assert [each.id for each in await client.sessions.list()] == [session.id]

    def sync() -> str:
        with Client(kubeconfig=kubeconfig, namespace=whole.namespace) as client:
            (child,) = client.sessions.get(session.id).fork(1)
            return child.exec(["hostname"], check=True).stdout.strip()

    assert await asyncio.to_thread(sync) != ""


async def test_a_tree_is_made_used_and_pruned(client: AsyncClient, whole: Whole) -> None:
    machines = whole.machines()
    root = await client.sessions.create("tiny", name="root")
    await root.exec("echo once > /tmp/x", check=True)
    fork = await root.fork(3)
    await asyncio.gather(*(each.exec(f"echo {each.id} >> /tmp/x", check=True) for each in fork))
    for each in fork:
        assert (await each.exec("cat /tmp/x")).stdout == f"once\n{each.id}\n"
    assert (await root.exec("cat /tmp/x")).stdout == "once\n"
    assert fork.pause_ms is not None
    assert (await fork[1].refresh()).parent_id == root.id
    assert fork[1].depth == 1
    await root.prune()
    await whole.machines_are(machines)
    with pytest.raises((errors.NoSuchSession, errors.SessionGone)):
        await fork[0].exec("true")


async def test_commands_say_how_they_ended(client: AsyncClient) -> None:
    session = await client.sessions.create("tiny")
    assert (await session.exec("cat; exit 3", stdin="in")).exit_code == 3
    late = await session.exec("echo early; sleep 60", timeout=1)
    assert (late.timed_out, late.exit_code, late.ok) == (True, -1, False)
    told = await session.exec(["sh", "-c", 'echo "$A" in $(pwd)'], env={"A": "b c"}, cwd="/tmp")
    assert told.stdout == "b c in /tmp\n"
    with pytest.raises(errors.CommandFailed, match="no-such"):
        await session.exec("ls /no-such", check=True)


class Cutter:
    """Stands between a client and an agent and carries bytes, until it is to lose an answer."""

    def __init__(self, url: str) -> None:
        self._there = urlsplit(url)
        self.lose = 0
        """How many connections are cut in place of carrying the next thing that the agent says."""
        self.lost = 0

    @asynccontextmanager
    async def listening(self) -> AsyncGenerator[str]:
        server = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        async with server:
            yield f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection(self._there.hostname, self._there.port)
        asked = asyncio.Event()

        async def up() -> None:
            while data := await reader.read(1 << 16):
                if self.lose:
                    asked.set()
                up_writer.write(data)

        async def down() -> None:
            while data := await up_reader.read(1 << 16):
                if self.lose and asked.is_set():
                    self.lose -= 1
                    self.lost += 1
                    return
                writer.write(data)

        tasks = [asyncio.create_task(up()), asyncio.create_task(down())]
        with contextlib.suppress(OSError):
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        writer.transport.abort()
        up_writer.transport.abort()


async def test_a_fork_whose_answer_is_lost_is_found_again_and_made_once(whole: Whole) -> None:
    await whole.template()
    cutter = Cutter(whole.node.url)
    async with (
        cutter.listening() as url,
        AsyncClient(url, token=whole.token, ca=whole.node.ca_path) as client,
    ):
        session = await client.sessions.create("tiny")
        machines = whole.machines()
        cutter.lose = 1
        fork = await session.fork(2)
        assert cutter.lost == 1
        assert len(whole.machines() - machines) == 2
        assert [(await each.exec("echo here")).stdout for each in fork] == ["here\n"] * 2

        cutter.lose = 1
        with pytest.raises(errors.AnswerLost):
            await session.exec("echo once >> /tmp/x")
        assert (await session.exec("cat /tmp/x")).stdout in {"once\n", ""}  # Never twice.


async def test_a_token_that_is_not_right_says_why(whole: Whole) -> None:
    def unsigned(**claims: object) -> str:
        parts = [{"alg": "RS256"}, claims]
        coded = [base64.urlsafe_b64encode(json.dumps(each).encode()).decode().rstrip("=") for each in parts]
        return ".".join([*coded, "c2ln"])

    other_audience = await whole.kubectl("create", "token", "default", "--audience=elsewhere")
    expired = unsigned(aud=["forktree.dev"], exp=1_000_000_000)
    for token, said in (
        (other_audience.strip(), "meant for elsewhere"),
        (expired, "expired"),
        ("x", "no token"),
    ):
        async with AsyncClient(whole.node.url, token=token, ca=whole.node.ca_path) as client:
            with pytest.raises(errors.Unauthorized, match=said):
                await client.sessions.list()


async def test_who_may_not_is_told_what(whole: Whole) -> None:
    await whole.kubectl("create", "serviceaccount", "nobody")
    kubeconfig = whole.system.kubectl.kubeconfig
    async with AsyncClient(
        kubeconfig=kubeconfig, namespace=whole.namespace, service_account="nobody"
    ) as client:
        with pytest.raises(errors.Forbidden, match="may not list sessions"):
            await client.sessions.list()
    async with AsyncClient(
        kubeconfig=kubeconfig, namespace=whole.namespace, service_account="missing"
    ) as client:
        with pytest.raises(errors.BadSettings, match="no service account missing"):
            await client.sessions.list()


async def test_a_cluster_without_an_agent_says_so(whole: Whole, tmp_path: Path) -> None:
    whole_text = whole.system.kubectl.kubeconfig.read_text()
    server = ClusterAccess.from_kubeconfig(whole.system.kubectl.kubeconfig).server_url
    (tmp_path / "nowhere").write_text(whole_text.replace(server, "https://127.0.0.1:1"))
    async with AsyncClient(kubeconfig=tmp_path / "nowhere") as client:
        with pytest.raises(errors.NoAgent, match=r"127\.0\.0\.1:1 does not answer"):
            await client.sessions.list()


async def test_a_fork_runs_scores_and_prunes_and_more_children_come_of_its_instant(
    client: AsyncClient,
) -> None:
    root = await client.sessions.create("tiny", labels={"run": "x"}, seed=5, env={"MODE": "fast"})
    assert (await root.exec("echo $MODE $FORKTREE_SEED")).stdout == "fast 5\n"
    fork = await root.fork(
        branches=[Branch(name=f"n{n}", command=f"echo {n} > /tmp/n", labels={"n": str(n)}) for n in range(3)],
        score="cat /tmp/n",
        keep_top=1,
        keep_point=True,
        complete=True,
    )
    assert (fork.best_score, fork.best) == (2.0, fork[2])
    assert [child.info.score for child in fork] == [0.0, 1.0, 2.0]
    (late,) = await fork.fork(1)
    assert (await late.exec("cat /tmp/n")).exit_code != 0  # From the instant, not from a child.
    assert (await client.forks.get(fork.id)).parent_id == root.id
    assert {each.id for each in await client.sessions.list(labels={"run": "x"})} == {root.id}
    await late.score(9, speed=1.5)
    tree = await root.tree(memory=True)
    best = tree.best()
    assert best is not None
    assert (best.session, best.info.rewards) == (late, {"speed": 1.5})
    assert [node.id for node in tree.path(best)] == [root.id, late.id]
    assert tree.root.info.unique_bytes is not None
    await client.prune([late, root])


async def test_a_checkpoint_is_gone_back_to_and_a_paused_session_waits(client: AsyncClient) -> None:
    root = await client.sessions.create("tiny")
    await root.exec("echo 1 > /tmp/x", check=True)
    await root.checkpoint("one")
    assert (await root.checkpoint("one")).checkpoint == "one"
    await root.exec("echo 2 > /tmp/x", check=True)
    back = await root.rollback("one")
    assert (await back.exec("cat /tmp/x")).stdout == "1\n"
    assert [each.checkpoint for each in await root.checkpoints()] == ["one"]
    assert (await root.pause()).info.phase == "Paused"
    with pytest.raises(errors.NotReady, match="paused"):
        await root.exec("true")
    await root.resume()
    assert (await root.exec("cat /tmp/x")).stdout == "2\n"
    await root.release()
    with pytest.raises(errors.SessionGone):
        await root.exec("true")
    assert (await back.exec("cat /tmp/x")).stdout == "1\n"
    await root.delete()
    await root.delete()


async def test_many_are_told_at_once(client: AsyncClient) -> None:
    root = await client.sessions.create("tiny")
    fork = await root.fork(4)
    results = await client.exec_each(fork, lambda session: f"echo {session.id}", check=True)
    assert [result.stdout.strip() for result in results] == [child.id for child in fork]
    await client.prune(fork[1:])
    with pytest.raises(errors.BatchFailed) as failed:
        await client.exec_each(fork, "true")
    assert set(failed.value.failures) == {child.id for child in fork[1:]}
    async with root.keep_alive(60):
        pass
    await root.prune()


async def test_a_tree_is_followed_as_it_grows_over_a_restart_of_the_agent(
    client: AsyncClient, whole: Whole
) -> None:
    root = await client.sessions.create("tiny")
    async with asyncio.timeout(SECONDS), aclosing((await root.tree()).watch()) as trees:
        assert len(await anext(trees)) == 1
        await root.fork(2)
        async for tree in trees:
            if len(tree) == 3:
                break
        await whole.crash_agent()
        await root.fork(1)
        async for tree in trees:
            if len(tree) == 4:
                break
        await root.delete()
        async for tree in trees:  # It ends with the tree.
            assert len(tree) <= 4


async def test_what_a_command_writes_is_followed_over_broken_connections_and_a_dead_agent(
    whole: Whole,
) -> None:
    await whole.template()
    cutter = Cutter(whole.node.url)
    script = "for i in 1 2 3 4; do echo $i; while [ ! -e /tmp/go$i ]; do sleep 0.1; done; done; exit 7"
    async with (
        cutter.listening() as url,
        AsyncClient(url, token=whole.token, ca=whole.node.ca_path) as client,
        AsyncClient(whole.node.url, token=whole.token, ca=whole.node.ca_path) as other,
    ):
        session = await client.sessions.create("tiny")
        hand = other.sessions.named(session.id)
        seen, code = "", None
        async with asyncio.timeout(SECONDS), aclosing(session.stream(script)) as events:
            async for event in events:
                if isinstance(event, Ended):
                    code = event.exit_code
                    break
                assert event.missing == 0
                seen += event.text
                if seen == "1\n":
                    cutter.lose = 1
                elif seen == "1\n2\n":
                    await whole.crash_agent()
                await hand.write(f"/tmp/go{seen.split()[-1]}", b"")
        assert (seen, code) == ("1\n2\n3\n4\n", 7)
        assert cutter.lost == 1
        await session.delete()


async def test_a_command_runs_by_itself_takes_input_and_is_found_again(client: AsyncClient) -> None:
    session = await client.sessions.create("tiny")
    command = await session.start("cat; echo done", stdin_open=True)
    await command.write("hello ")
    assert command.id in await session.execs()
    with pytest.raises(errors.NotReady):
        await command.wait(timeout=0)
    await command.write(b"world ", close=True)
    assert (await session.attach(command.id).wait()).stdout == "hello world done\n"
    endless = await session.start("sleep 600")
    await endless.kill()
    assert (await endless.wait()).exit_code == 128 + 9
    with pytest.raises(errors.BadRequest):
        await session.start(["/no/such/program"])
    await session.delete()


async def test_files_and_folders_go_in_and_come_out(client: AsyncClient, tmp_path: Path) -> None:
    session = await client.sessions.create("tiny")
    await session.write("/work/a b", "text", mode=0o600)
    assert await session.read("/work/a b") == b"text"
    assert [(entry.name, entry.mode, entry.bytes) for entry in await session.files("/work")] == [
        ("a b", 0o600, 4)
    ]
    with pytest.raises(errors.NotFound):
        await session.read("/work/none")
    (tmp_path / "in" / "sub").mkdir(parents=True)
    (tmp_path / "in" / "sub" / "f").write_bytes(b"x" * 3_000_000)
    await session.upload(tmp_path / "in", "/work/copy")
    await session.upload(tmp_path / "in" / "sub" / "f", "/work/copy/g")
    assert (await session.exec("cmp /work/copy/sub/f /work/copy/g")).ok
    await session.download("/work/copy/", tmp_path / "out")
    assert (tmp_path / "out" / "sub" / "f").read_bytes() == (tmp_path / "out" / "g").read_bytes()
    await session.download("/work/a b", tmp_path / "file")
    assert (tmp_path / "file").read_text() == "text"
    await session.remove("/work", recursive=True)
    await session.remove("/work")
    assert not (await session.exec("ls /work")).ok
    await session.delete()
