"""The command line against a whole system: its page as it stands there, streams, exit codes, a terminal."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest

from e2e.whole import SECONDS, Whole
from forktree_dev.checkout import CHECKOUT
from unit.routed_agent import Ran, Terminal, forktree, started

pytestmark = pytest.mark.asyncio(loop_scope="session")

PAGE = (CHECKOUT / "docs" / "cli.md").read_text()
NOT_HERE = re.compile(r"^(\. ~/\.cache.*|forktree exec -it .*)\n", re.MULTILINE)
"""What needs a playground, or a person at a terminal."""


def environment(whole: Whole) -> dict[str, str]:
    programs = Path(sys.executable).parent
    return {
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "HOME": os.environ["HOME"],
        "FORKTREE_URL": whole.node.url,
        "FORKTREE_CA": str(whole.node.ca_path),
        "FORKTREE_TOKEN": whole.token,
        "FORKTREE_NAMESPACE": whole.namespace,
    }


@pytest.mark.timeout(600)
async def test_what_the_page_shows_works(whole: Whole, tmp_path: Path) -> None:
    await whole.template("python")
    blocks = re.findall(r"```\n((?:[^`]|`(?!``))*)```", PAGE)
    assert len(blocks) == 7
    said = ""
    for block in blocks:
        script = NOT_HERE.sub("", block)
        process = await asyncio.create_subprocess_exec(
            *("bash", "-euo", "pipefail", "-c", script),
            env=environment(whole),
            cwd=tmp_path,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        async with asyncio.timeout(2 * SECONDS):
            out, err = await process.communicate()
        assert process.returncode == 0, (script, out.decode(), err.decode())
        assert err == b"", (script, err.decode())
        said += out.decode()
    assert "✓ may run commands: yes" in said
    assert "right" in said
    assert "★" in said
    assert "\nhello\n" in said
    assert "\ndone\n" in said
    assert (tmp_path / "again.txt").read_text() == (tmp_path / "copied" / "notes.txt").read_text() == "text\n"
    await whole.names_are(set())


async def test_every_answer_is_json_where_that_is_asked_for(whole: Whole, tmp_path: Path) -> None:
    await whole.template()

    async def ask(*arguments: str) -> Ran:
        ran = await forktree(environment(whole), *arguments, "-o", "json")
        assert ran.exit_code == 0, (arguments, ran.err)
        return ran

    assert (await ask("create", "tiny", "--name", "root", "--seed", "7")).json["session_id"] == "root"
    won = "--branch=a=echo 1 > /tmp/won", "--branch=b=echo 2 > /tmp/won"
    fork = (await ask("fork", "root", *won, "--score", "cat /tmp/won", "--wait")).json
    first, best = (each["session_id"] for each in fork["children"])
    assert (fork["best_session_id"], fork["best_score"]) == (best, 2.0)
    assert (await ask("score", first, "--reward", "tests=3")).json["rewards"] == {"tests": 3.0}
    assert {each["session_id"] for each in (await ask("get")).json} == {"root", first, best}
    found = (await ask("tree", first)).json
    assert (found["root_session_id"], found["best_session_id"], len(found["sessions"])) == ("root", best, 3)
    for path in (await ask("export", "root")).json["trajectories"]:
        step = path["steps"][-1]
        assert step["argv"][:2] == ["/bin/sh", "-c"]
        assert (step["exit_code"], step["parent_session_id"], step["fork_id"]) == (0, "root", fork["fork_id"])
        assert step["seed"]
        assert path["baseline_id"]
    assert (await ask("logs", best)).json["score"]["stdout"] == "2\n"
    assert (await ask("top")).json["node"]["ready"] is True
    assert (await ask("templates")).json[0]["template_id"] == "tiny"
    assert (await ask("doctor")).json["ok"] is True
    assert (await ask("pause", best)).json["phase"] == "Paused"
    assert (await ask("resume", best)).json["phase"] == "Running"
    assert (await ask("checkpoint", best, "good")).json["checkpoint"] == "good"
    assert (await ask("checkpoints", best)).json[0]["available"] is True
    back = (await ask("rollback", best, "good")).json["session_id"]
    assert (await ask("release", back)).json["phase"] == "Released"
    local = tmp_path / "x"
    local.write_text("x")
    assert (await ask("cp", str(local), f"{best}:/tmp/x")).json["to"] == f"{best}:/tmp/x"
    links = "mkdir /tmp/run7; mv /tmp/x /tmp/run7; ln -s run7 /tmp/latest; ln -s run7/x /tmp/link"
    await whole.sh(best, links)
    await ask("cp", f"{best}:/tmp/latest", str(tmp_path / "run"))
    await ask("cp", f"{best}:/tmp/link", str(tmp_path / "y"))
    assert (tmp_path / "run" / "x").read_text() == (tmp_path / "y").read_text() == "x"
    assert (await ask("prune", "root")).json == [{"session_id": "root", "deleted": True}]
    gone = await forktree(environment(whole), "tree", "root")
    assert (gone.exit_code, gone.out, len(gone.err.splitlines())) == (1, "", 1)


async def test_exec_has_the_commands_exit_code_and_its_streams(whole: Whole) -> None:
    await whole.template()
    await whole.session()
    told = environment(whole)
    ran = await forktree(told, "exec", "root", "--", "sh", "-c", "echo out; echo err >&2; exit 42")
    assert (ran.exit_code, ran.out, ran.err) == (42, "out\n", "err\n")
    assert (await forktree(told, "exec", "root", "--", "sh", "-c", "kill -9 $$")).exit_code == 128 + 9
    late = await forktree(told, "exec", "root", "--timeout", "1", "--", "sleep", "60")
    assert (late.exit_code, late.out) == (124, "")
    data = bytes(range(256)) * 1000
    summed = await forktree(told, "exec", "-i", "root", "--", "md5sum", stdin=data)
    counted = await forktree(told, "exec", "-i", "-o", "json", "root", "--", "wc", "-c", stdin=data)
    assert summed.exit_code == 0
    assert json.loads(counted.out)["stdout"].strip() == str(len(data))


async def test_ctrl_c_kills_the_command_in_the_session(whole: Whole) -> None:
    await whole.template()
    await whole.session()
    command = ("exec", "root", "--", "sh", "-c", "echo begun; exec sleep 4321")
    async with started(environment(whole), *command) as process, asyncio.timeout(SECONDS):
        assert process.stdout is not None
        assert await process.stdout.readline() == b"begun\n"
        process.send_signal(signal.SIGINT)
        _, err = await process.communicate()
    assert (process.returncode, err) == (130, b"")
    assert "4321" not in await whole.sh("root", "ps -o args | grep -v grep | grep sleep || true")


async def test_a_shell_on_a_terminal(whole: Whole) -> None:
    await whole.template()
    await whole.session()
    with Terminal() as ours:
        ours.resize(30, 90)
        ours.type(b"echo $((6*7)) of $(stty size)\n")
        async with started(environment(whole), "exec", "-it", "root", terminal=ours) as process:
            await ours.shows(b"42 of 30 90")
            ours.type(b"echo be''gins; cat\n")
            await ours.shows(b"begins")  # Only now is the terminal that of the command and not of the shell.
            ours.type(b"hel\x7fp\n")
            await ours.shows(b"\nhep")
            ours.type(b"\x03")
            await ours.shows(b"# ")
            ours.resize(40, 100)
            process.send_signal(signal.SIGWINCH)
            ours.type(b"echo now $(stty size)\n")
            await ours.shows(b"now 40 100")
            ours.type(b"exit 9\n")
            async with asyncio.timeout(SECONDS):
                assert await process.wait() == 9
