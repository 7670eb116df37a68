"""What existing clients ask to be run, run by this machine's own shell as a guest would."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from forktree_agent.http.collimate.programs import INTERPRETER_VARIABLE, program
from forktree_agent.http.collimate.wire import SandboxExec

SEED = "5eed" * 16


def run(wanted: dict[str, Any], **env: str) -> tuple[int, str]:
    """Exit code and output. That is all of it: nothing may come on the second stream."""
    todo = program(SandboxExec.model_validate(wanted, strict=False))
    done = subprocess.run(
        todo.argv,
        input=todo.stdin,
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": os.environ["PATH"], "FORKTREE_SEED": SEED, INTERPRETER_VARIABLE: sys.executable, **env},
    )
    assert done.stderr == ""
    return done.returncode, done.stdout


def test_both_streams_come_as_one_in_their_order() -> None:
    assert run({"command": "echo a; echo b >&2; echo c; exit 3"}) == (3, "a\nb\nc\n")


def test_what_the_shell_itself_complains_of_is_output_too() -> None:
    code, said = run({"command": "if"})
    assert code == 2
    assert "yntax error" in said


def test_commands_run_one_after_the_other_and_the_last_one_counts() -> None:
    commands = [["false"], ["printf", "%s|", "a b", "$HOME", "it's"], ["sh", "-c", "exit 4"]]
    assert run({"commands": commands}) == (4, "a b|$HOME|it's|")


def test_of_several_forms_the_first_counts() -> None:
    assert run({"command": "echo one", "commands": [["echo", "two"]], "code": "print(3)"})[1] == "one\n"
    assert run({"commands": [["echo", "two"]], "code": "print(3)"})[1] == "two\n"


def test_files_are_there_before_the_command_with_their_folders(tmp_path: Path) -> None:
    odd = tmp_path / "it's a folder" / "$HOME"
    files = [
        {"path": str(odd), "content": "$(id) `id`\n\\n\nEOF\n"},
        {"path": str(tmp_path / "unended"), "content": "no newline"},
        {"path": str(tmp_path / "empty"), "content": ""},
        {"path": str(tmp_path / "large"), "content": "0123456789abcde\n" * (1 << 14)},
    ]
    assert run({"files": files, "command": f"cat '{tmp_path}/unended'; cat"}) == (0, "no newline\n")
    assert odd.read_text() == files[0]["content"]
    assert (tmp_path / "empty").read_text() == ""
    assert (tmp_path / "large").read_text() == files[3]["content"]


def test_files_alone_are_enough(tmp_path: Path) -> None:
    assert run({"files": [{"path": f"{tmp_path}/a", "content": "a"}]}) == (0, "")
    assert (tmp_path / "a").read_text() == "a\n"


def test_no_command_runs_where_a_file_cannot_be_written(tmp_path: Path) -> None:
    code, said = run({"files": [{"path": str(tmp_path), "content": "x"}], "command": "echo ran"})
    assert code != 0
    assert "irectory" in said
    assert "ran" not in said


def test_code_is_run_by_its_interpreter_and_leaves_no_file(tmp_path: Path) -> None:
    before = set(Path("/tmp").glob("forktree-code-*"))
    code = "import sys\nprint(__name__, len(sys.argv), flush=True)\nsys.stderr.write('also\\n')\nsys.exit(5)"
    assert run({"code": code}) == (5, "__main__ 1\nalso\n")
    assert run({"code": "echo from $0 && exit 6"}, **{INTERPRETER_VARIABLE: "sh"})[0] == 6
    assert set(Path("/tmp").glob("forktree-code-*")) == before


def test_pythons_own_generator_follows_the_seed() -> None:
    draw = {"code": "import random\nprint(random.getrandbits(64))"}
    assert run(draw) == run(draw)
    assert run(draw) != run(draw, FORKTREE_SEED="0" * 64)


WRONG: list[dict[str, Any]] = [
    {},
    {"commands": [[]]},
    {"command": "a\0b"},
    {"files": [{"path": "", "content": "x"}]},
    {"files": [{"path": "/a", "content": "\0"}]},
    {"command": "x", "timeout_seconds": 0},
    {"command": "x", "timeout_seconds": 3601},
    {"command": "x", "cmd": "y"},
]


@pytest.mark.parametrize("wrong", WRONG)
def test_what_nothing_can_be_made_of_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"."):
        SandboxExec.model_validate(wrong)
