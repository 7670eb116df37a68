"""The command line against an agent that answers as told: what it asks, draws and says when it goes wrong."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import shlex
import signal
import sys
import tarfile
import termios
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from rich.console import Console

from forktree import AsyncSession, AsyncTree
from forktree.wire_trees import TreeInfo
from forktree_cli.drawing import drawn
from unit.agent_server import created, forked, info, refuses
from unit.api_server import says
from unit.routed_agent import (
    PROGRAM,
    SECONDS,
    Ran,
    RoutedAgent,
    Terminal,
    forktree,
    lines,
    started,
    tree,
    tree_body,
)

GOLDEN = Path(__file__).parents[1] / "golden" / "cli_tree.txt"

Run = Callable[..., Awaitable[Ran]]


@pytest.fixture
async def agent(tmp_path: Path) -> AsyncIterator[RoutedAgent]:
    async with RoutedAgent.running(tmp_path) as agent:
        yield agent


@pytest.fixture
def run(agent: RoutedAgent) -> Run:
    async def one(*arguments: str | Path, stdin: bytes = b"") -> Ran:
        return await forktree(agent.environment(), *arguments, stdin=stdin)

    return one


def out(stream: str, text: str, offset: int = 0) -> dict[str, object]:
    data = base64.b64encode(text.encode()).decode()
    return {"type": "output", "stream": stream, "offset": offset, "data_base64": data}


def end(exit_code: int, *, timed_out: bool = False) -> dict[str, object]:
    return {
        "type": "end",
        "id": "e",
        "exit_code": exit_code,
        "timed_out": timed_out,
        "truncated": False,
        "exec_time_ms": 1.0,
    }


def drawing(body: dict[str, object]) -> str:
    transport: Any = None  # A tree that is drawn asks nobody.
    found: AsyncTree[AsyncSession] = AsyncTree(
        transport, lambda each: AsyncSession(transport, each), TreeInfo.model_validate(body)
    )
    console = Console(file=io.StringIO(), width=200, color_system=None, highlight=False)
    console.print(drawn(found))
    assert isinstance(console.file, io.StringIO)
    return "".join(line.rstrip() + "\n" for line in console.file.getvalue().splitlines())


def test_a_tree_is_drawn_with_guides_phases_scores_bytes_and_the_best() -> None:
    assert drawing(tree_body()) == GOLDEN.read_text()


def test_names_that_would_drive_a_terminal_are_drawn_as_marks() -> None:
    shown = drawing(tree_body(names="\x1b[2J\r\n"))
    assert "\x1b" not in shown
    assert "before\N{REPLACEMENT CHARACTER}[2J" in shown


async def test_without_a_terminal_there_are_no_colours(agent: RoutedAgent, run: Run) -> None:
    agent.answers["GET /sessions/ways-1/tree"] = tree()
    ran = await run("tree", "ways-1")
    assert (ran.exit_code, ran.err) == (0, "")
    assert "".join(line.rstrip() + "\n" for line in ran.out.splitlines()) == GOLDEN.read_text()


async def test_a_tree_as_json_names_the_best(agent: RoutedAgent, run: Run) -> None:
    agent.answers["GET /sessions/root/tree"] = tree()
    found = (await run("tree", "root", "-o", "json")).json
    assert found["best_session_id"] == "ways-1"
    assert [each["session_id"] for each in found["sessions"]][:2] == ["root", "ways-0"]
    assert found["totals"]["live"] == 4


async def test_without_a_name_each_tree_is_drawn_once(agent: RoutedAgent, run: Run) -> None:
    agent.answers["GET /sessions"] = says([info("root"), info("ways-0", parent_session_id="root", depth=1)])
    agent.answers["GET /sessions/root/tree"] = tree()
    assert (await run("tree", "-o", "name")).out.split()[0] == "root"
    assert len(agent.bodies("GET /sessions/root/tree")) == 1


async def test_a_watched_tree_is_told_line_by_line(agent: RoutedAgent, run: Run) -> None:
    begun: list[dict[str, object]] = [{"type": "session", "session": info("root")}, {"type": "synced"}]
    then: list[dict[str, object]] = [
        {"type": "session", "session": info("root", score=1.5)},
        {"type": "gone", "kind": "session", "id": "root"},
    ]

    async def answer(request: web.Request) -> web.StreamResponse:
        return await (lines(*begun, *then) if "watch" in request.query else tree())(request)

    agent.answers["GET /sessions/root/tree"] = answer
    ran = await run("tree", "root", "--watch", "-o", "json")
    told = [json.loads(line) for line in ran.out.splitlines()]
    assert [each.get("best_score") for each in told] == [None, 1.5]


async def test_create_and_fork_send_what_was_said(agent: RoutedAgent, run: Run) -> None:
    agent.answers["POST /sessions"] = created("s1")
    made = await run("create", "python", "--name", "s1", "-l", "team=a", "--seed", "7", "-e", "A=b=c")
    assert (made.exit_code, made.out) == (0, "s1\n")
    assert agent.bodies("POST /sessions") == [
        {"template_id": "python", "name": "s1", "labels": {"team": "a"}, "seed": "7", "env": {"A": "b=c"}}
    ]
    agent.answers["POST /sessions/s1/fork"] = forked("f-0", "f-1", parent="s1")
    scored = ("--score", "cat /s", "--keep-top", "1", "--wait")
    ran = await run("fork", "s1", "-b", "a=echo 1", "-b", "b=", *scored, "-o", "name")
    assert ran.out == "f-0\nf-1\n"
    (body,) = agent.bodies("POST /sessions/s1/fork")
    assert body["branches"] == [
        {"name": "a", "exec": {"command": "echo 1", "timeout_seconds": 60}},
        {"name": "b"},
    ]
    assert (body["score"]["command"], body["keep_top"]) == ("cat /s", 1)


async def test_n_is_a_number_for_fork_and_the_namespace_elsewhere(agent: RoutedAgent, run: Run) -> None:
    agent.answers["POST /sessions/s1/fork"] = forked("f-0", "f-1", parent="s1")
    assert len((await run("-n", "ns", "fork", "s1", "-n", "2", "-o", "json")).json["children"]) == 2
    assert agent.bodies("POST /sessions/s1/fork")[0]["replicas"] == 2
    elsewhere = await run("get", "-n", "other")
    assert elsewhere.exit_code == 1
    assert "/ns/other/v1/sessions" in elsewhere.err


@pytest.mark.parametrize(
    ("arguments", "says_what"),
    [
        (("fork", "s", "-b", "nonsense"), "--branch takes NAME=VALUE, not 'nonsense'"),
        (("score", "s"), "give a score, --reward, or --clear"),
        (("score", "s", "nan"), "a score is a finite number"),
        (("exec", "s"), "give a command behind `--`"),
        (("exec", "s", "--attach", "e", "--", "ls"), "give a command behind `--`"),
        (("cp", "a", "b"), "one of the two is SESSION:/PATH"),
        (("cp", "a", "s:b"), "a path in a session begins with `/`"),
        (("nonsense",), "No such command"),
    ],
)
async def test_a_wrong_call_ends_with_2(run: Run, arguments: tuple[str, ...], says_what: str) -> None:
    ran = await run(*arguments)
    assert (ran.exit_code, ran.out) == (2, "")
    assert says_what in " ".join(ran.err.split())


async def test_what_the_agent_refuses_is_one_sentence(agent: RoutedAgent, run: Run) -> None:
    agent.answers["POST /sessions/s/pause"] = refuses("not_ready", 409, "session s\x1b[31m\nis paused")
    ran = await run("pause", "s")
    assert (ran.exit_code, ran.out) == (1, "")
    assert ran.err == "forktree: session s\N{REPLACEMENT CHARACTER}[31m\N{REPLACEMENT CHARACTER}is paused\n"


async def test_an_agent_that_is_not_there_is_one_sentence(agent: RoutedAgent) -> None:
    ran = await forktree(agent.environment() | {"FORKTREE_URL": "https://127.0.0.1:1"}, "get")
    assert ran.exit_code == 1
    assert len(ran.err.splitlines()) == 1
    assert "https://127.0.0.1:1" in ran.err


async def test_exec_passes_on_streams_and_the_exit_code(agent: RoutedAgent, run: Run) -> None:
    agent.answers["POST /sessions/s/exec"] = _detached
    agent.answers["GET /sessions/s/execs/ID"] = lines(out("stdout", "one\n"), out("stderr", "two\n"), end(7))
    ran = await run("exec", "s", "--", "sh", "-c", "x; exit 7")
    assert (ran.exit_code, ran.out, ran.err) == (7, "one\n", "two\n")
    (body,) = agent.bodies("POST /sessions/s/exec")
    assert body["argv"] == ["sh", "-c", "x; exit 7"]


async def test_exec_as_json_has_all_of_it(agent: RoutedAgent, run: Run) -> None:
    agent.answers["GET /sessions/s/execs/e1"] = lines(out("stdout", "one\n"), end(-1, timed_out=True))
    ran = await run("exec", "s", "--attach", "e1", "-o", "json")
    assert ran.exit_code == 124
    assert json.loads(ran.out) == {
        "id": "e1", "exit_code": -1, "timed_out": True, "truncated": False, "stdout": "one\n", "stderr": "",
    }  # fmt: skip


async def test_exec_sends_standard_input_to_its_end(agent: RoutedAgent, run: Run) -> None:
    agent.answers["POST /sessions/s/exec"] = _detached
    got = asyncio.Event()
    pieces: list[tuple[bytes, bool]] = []

    async def take(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        pieces.append((base64.b64decode(body["data_base64"]), body["close"]))
        if body["close"]:
            got.set()
        return await says({"id": "e", "bytes": len(pieces[-1][0]), "closed": body["close"]})(request)

    async def follow(request: web.Request) -> web.StreamResponse:
        await got.wait()
        return await lines(end(0))(request)

    agent.answers["GET /sessions/s/execs/ID"] = follow
    agent.answers["POST /sessions/s/execs/ID/stdin"] = take
    assert (await run("exec", "-i", "s", "--", "cat", stdin=b"a" * 100_000)).exit_code == 0
    assert b"".join(data for data, _ in pieces) == b"a" * 100_000
    assert [closed for _, closed in pieces].count(True) == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_command_is_killed_with_its_exec(agent: RoutedAgent, number: signal.Signals) -> None:
    agent.answers["POST /sessions/s/exec"] = _detached
    followed, killed = asyncio.Event(), asyncio.Event()

    async def follow(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        await response.prepare(request)
        followed.set()
        await killed.wait()
        return response

    async def kill(request: web.Request) -> web.StreamResponse:
        killed.set()
        return await says({"id": "e", "killed": True})(request)

    agent.answers["GET /sessions/s/execs/ID"] = follow
    agent.answers["DELETE /sessions/s/execs/ID"] = kill
    async with (
        started(agent.environment(), "exec", "s", "--", "sleep", "9") as process,
        asyncio.timeout(SECONDS),
    ):
        await followed.wait()
        process.send_signal(number)
        _, err = await process.communicate()
    assert killed.is_set()
    assert (process.returncode, err) == (128 + number, b"")


async def test_a_command_is_killed_when_nobody_reads_it_any_more(agent: RoutedAgent) -> None:
    agent.answers["POST /sessions/s/exec"] = _detached
    killed = asyncio.Event()

    async def follow(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        await response.prepare(request)
        offset = 0
        while not killed.is_set():
            await response.write(json.dumps(out("stdout", "y\n" * 1000, offset)).encode() + b"\n")
            offset += 2000
            await asyncio.sleep(0)
        return response

    async def kill(request: web.Request) -> web.StreamResponse:
        killed.set()
        return await says({"id": "e", "killed": True})(request)

    agent.answers["GET /sessions/s/execs/ID"] = follow
    agent.answers["DELETE /sessions/s/execs/ID"] = kill
    line = f"{shlex.join(PROGRAM)} exec s -- yes | head -n 1"
    process = await asyncio.create_subprocess_exec(
        "bash", "-c", line, env=agent.environment(), stdout=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(SECONDS):
        assert (await process.communicate())[0] == b"y\n"
        await killed.wait()


async def _detached(request: web.Request) -> web.StreamResponse:
    body = await request.json()
    return await says({"id": body["id"], "detached": True}, 202)(request)


async def test_a_terminal_is_joined_resized_and_given_back(agent: RoutedAgent) -> None:
    seen: list[object] = []

    async def terminal(request: web.Request) -> web.StreamResponse:
        seen.append((request.query.getall("argv"), request.query["rows"], request.query["cols"]))
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        await socket.send_bytes(b"ready> ")
        async for message in socket:
            if message.type is aiohttp.WSMsgType.TEXT:
                seen.append(json.loads(message.data))
                await socket.send_bytes(b"resized")
                continue
            seen.append(message.data)
            if message.data == b"\x03":
                await socket.send_str(json.dumps({"type": "end", "exit_code": 5}))
                break
            await socket.send_bytes(b"got " + message.data)
        return socket

    agent.answers["GET /sessions/s/terminal"] = terminal
    with Terminal() as ours:
        ours.resize(20, 60)
        before = termios.tcgetattr(ours.theirs)
        ours.type(b"early\n")
        shell = ("exec", "-it", "s", "--", "bash", "-l")
        async with (
            started(agent.environment(), *shell, terminal=ours) as process,
            asyncio.timeout(SECONDS),
        ):
            await ours.shows(b"got early")
            ours.type(b"x")
            await ours.shows(b"got x")
            ours.resize(33, 99)
            process.send_signal(signal.SIGWINCH)
            await ours.shows(b"resized")
            ours.type(b"\x03")  # Ctrl-C goes to the command and not to the program.
            assert await process.wait() == 5
        assert termios.tcgetattr(ours.theirs) == before
    assert seen == [
        (["bash", "-l"], "20", "60"), b"early\n", b"x", {"type": "resize", "rows": 33, "cols": 99}, b"\x03",
    ]  # fmt: skip


async def test_a_terminal_that_is_refused_says_why(agent: RoutedAgent, run: Run) -> None:
    assert "needs a terminal" in (await run("exec", "-it", "s")).err
    agent.answers["GET /sessions/s/terminal"] = refuses("session_gone", 410, "session s was released")
    with Terminal() as ours:
        told = agent.environment()
        async with started(
            told, "exec", "-it", "s", terminal=ours, stderr=asyncio.subprocess.PIPE
        ) as process:
            _, err = await process.communicate()
    assert (process.returncode, err) == (1, b"forktree: session s was released\n")


async def test_a_link_in_a_session_is_copied_as_what_it_leads_to(
    agent: RoutedAgent, run: Run, tmp_path: Path
) -> None:
    def entry(name: str, kind: str) -> dict[str, object]:
        return {"name": name, "type": kind, "bytes": 0, "mode": "0755", "mtime": 0.0}

    async def listed(request: web.Request) -> web.StreamResponse:
        match request.query["path"]:
            case "/tmp":
                links = [entry("latest", "symlink"), entry("note", "symlink")]
                return await says({"entries": links})(request)
            case "/tmp/latest":
                return await says({"entries": [entry("log", "file")]})(request)
            case _:
                return await refuses("conflict", 409, "that is a file, not a directory")(request)

    async def packed(_: web.Request) -> web.StreamResponse:
        with io.BytesIO() as made:
            with tarfile.open(fileobj=made, mode="w") as archive:
                archive.addfile(tarfile.TarInfo("log"), io.BytesIO())
            return web.Response(body=made.getvalue(), content_type="application/x-tar")

    agent.answers["GET /sessions/s/files/list"] = listed
    agent.answers["GET /sessions/s/tar"] = packed
    agent.answers["GET /sessions/s/files"] = says({"of": "note"})
    assert (await run("cp", "s:/tmp/latest", tmp_path / "run")).exit_code == 0
    assert [each.name for each in (tmp_path / "run").iterdir()] == ["log"]
    assert (await run("cp", "s:/tmp/note", tmp_path / "note")).exit_code == 0
    assert (tmp_path / "note").is_file()


async def test_files_go_in_and_out(agent: RoutedAgent, run: Run, tmp_path: Path) -> None:
    async def put(request: web.Request) -> web.StreamResponse:
        return await says({"path": request.query["path"], "bytes": 0, "sha256": ""})(request)

    async def get(request: web.Request) -> web.StreamResponse:
        return web.Response(body=b"of " + request.query["path"].encode())

    agent.answers["PUT /sessions/s/files"] = put
    agent.answers["GET /sessions/s/files"] = get
    agent.answers["GET /sessions/s/files/list"] = says({"entries": []})
    local = tmp_path / "a.txt"
    local.write_bytes(b"\x00\xff")
    assert (await run("cp", local, "s:/tmp/", "-o", "json")).json["to"] == "s:/tmp/a.txt"
    assert agent.bodies("PUT /sessions/s/files") == [b"\x00\xff"]
    ran = await run("cp", "s:/etc/hostname", tmp_path)
    assert (ran.exit_code, ran.out, ran.err) == (0, "", "")
    assert (tmp_path / "hostname").read_bytes() == b"of /etc/hostname"
    missing = await run("cp", tmp_path / "none", "s:/x")
    assert missing.exit_code == 1
    assert "none" in missing.err


async def test_logs_are_found_by_the_session(agent: RoutedAgent, run: Run) -> None:
    agent.answers["GET /sessions/ways-1"] = says(info("ways-1", fork_id="ways"))
    forks: Any = tree_body()["forks"]
    agent.answers["GET /forks/ways"] = says(forks[0])
    ended = {"ended": True, "exit_code": 3, "timed_out": False, "truncated": False}
    command = {**ended, "stdout": "o\n", "stderr": "e\n"}
    agent.answers["GET /forks/ways/children/1/log"] = says({"fork_id": "ways", "index": 1, "exec": command})
    ran = await run("logs", "ways-1")
    assert (ran.exit_code, ran.out) == (0, "o\n")
    assert ran.err == "e\nforktree: the command ended with 3\n"
    assert (await run("logs", "ways", "--child", "1", "-o", "json")).json["exec"]["exit_code"] == 3


async def test_prune_names_what_is_not_there(agent: RoutedAgent, run: Run) -> None:
    agent.answers["GET /sessions/a"] = says(info("a"))
    agent.answers["POST /batch/prune"] = says({"results": [{"session_id": "a", "ok": True, "deleted": True}]})
    assert (await run("prune", "a", "b")).exit_code == 1
    assert agent.bodies("POST /batch/prune") == []
    assert (await run("prune", "a")).out == "a deleted\n"


async def test_an_export_says_what_led_to_each_leaf(agent: RoutedAgent, run: Run) -> None:
    agent.answers["GET /sessions/root/tree"] = tree()
    found = (await run("export", "root", "-o", "json")).json
    assert {each["leaf_session_id"] for each in found["trajectories"]} == {
        "deep-0", "deep-1", "ways-1", "ways-2",
    }  # fmt: skip
    (bold,) = [each for each in found["trajectories"] if each["leaf_session_id"] == "ways-1"]
    assert (bold["is_best"], bold["baseline_id"], bold["score"]) == (True, "base-1", 0.75)
    first, last = bold["steps"]
    assert first["session_id"] == last["parent_session_id"] == "root"
    assert (last["branch"], last["seed"], last["exit_code"], last["fork_id"]) == ("bold", "s1", 3, "ways")
    assert last["rewards"] == {"tests": 3.0}
    by_line = await run("export", "root", "--leaves", "scored", "-o", "json", "--lines")
    assert [json.loads(line)["leaf_session_id"] for line in by_line.out.splitlines()] == ["deep-1", "ways-1"]


async def test_the_doctor_says_what_holds_and_what_to_do(agent: RoutedAgent, run: Run) -> None:
    agent.answers |= {
        "GET /v1/health": says({"status": "ok", "version": "1.2.3"}),
        "GET /sessions": says([]),
        "POST /sessions": refuses("forbidden", 403, "you may not create sessions"),
        "GET /node": says({"node": "n1", "ready": False, "canary": {
            "passed": False, "reason": "NoQemu", "message": "there is no QEMU"}}),
        "GET /templates": says([{"template_id": "py", "image": "i", "ready_nodes": 1, "standby": 0, "nodes": [
            {"node": "n1", "phase": "Ready"}]}]),
    }  # fmt: skip
    ran = await run("doctor")
    assert ran.exit_code == 1
    assert "! may create sessions: you may not create sessions -> bind the role" in ran.out
    assert "✗ node n1: no session is placed there: there is no QEMU (NoQemu) -> kubectl describe" in ran.out
    assert "✓ template py: ready on 1 of 1 nodes" in ran.out
    as_json = json.loads((await run("doctor", "-o", "json")).out)
    assert as_json["ok"] is False
    assert {each["check"] for each in as_json["checks"]} >= {"agent", "token", "may fork", "node n1"}


async def test_the_doctor_names_a_token_of_another_audience(agent: RoutedAgent, tmp_path: Path) -> None:
    agent.answers["GET /v1/health"] = says({"status": "ok", "version": "1"})
    claims = base64.urlsafe_b64encode(json.dumps({"aud": ["other"], "sub": "me"}).encode()).decode()
    ran = await forktree(agent.environment() | {"FORKTREE_TOKEN": f"x.{claims.rstrip('=')}.y"}, "doctor")
    assert ran.exit_code == 1
    assert "✗ token: it is of me and meant for ['other'], not for forktree.dev" in ran.out
    nowhere = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    lost = await forktree(nowhere, "doctor")
    assert lost.exit_code == 1
    assert "✗ connection:" in lost.out


async def test_a_shell_completes_names_of_sessions(agent: RoutedAgent) -> None:
    agent.answers["GET /sessions"] = says([info("alpha"), info("beta")])
    asked = {"_FORKTREE_COMPLETE": "complete_bash", "COMP_WORDS": "forktree tree al", "COMP_CWORD": "2"}
    ran = await forktree(agent.environment() | asked)
    assert ran.out.split() == ["alpha"]
