"""Logs as JSON: fields are fields, whatever their values hold, and every line of our code has its form."""

from __future__ import annotations

import ast
import io
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forktree.models import Reason
from forktree.tracing.context import parsed, trace_ids, within
from forktree_logs.json_lines import OWN, JsonLines, fields_of

SOURCES = Path(__file__).parents[2]
LEVELS = {"debug", "info", "warning", "error", "exception", "critical"}


def line(message: object, *arguments: object, exc_info: bool = False) -> dict[str, Any]:
    """What is written for one call."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines(trace_ids))
    logger = logging.Logger("ours")
    logger.addHandler(handler)
    logger.info(message, *arguments, exc_info=exc_info)
    written = stream.getvalue()
    assert written.count("\n") == 1
    found: dict[str, Any] = json.loads(written)
    assert found.pop("time").endswith("Z")
    assert (found.pop("level"), found.pop("logger")) == ("info", "ours")
    return found


def test_a_line_has_its_event_and_its_fields_with_their_types() -> None:
    found = line(
        "forked uid=%s children=%d pause_ms=%.1f ready_ms=%s ok=%s reason=%s",
        "u-1", 3, 4.1666, None, True, Reason.AT_CAPACITY,
    )  # fmt: skip
    assert found == {
        "event": "forked",
        "uid": "u-1",
        "children": 3,
        "pause_ms": 4.2,
        "ready_ms": None,
        "ok": True,
        "reason": "AtCapacity",
    }


def test_no_value_can_become_a_field_or_another_line() -> None:
    hostile = 'x" admin=true\n{"event":"forged"} %s'
    assert line("told error=%r name=%s", hostile, hostile) == {
        "event": "told",
        "error": hostile,
        "name": hostile,
    }


def test_parts_around_a_value_belong_to_it() -> None:
    assert line("placed session=%s/%s node=%s kind=Session share=%d%%", "ns", "a", "n", 50) == {
        "event": "placed",
        "session": "ns/a",
        "node": "n",
        "kind": "Session",
        "share": "50%",
    }


def test_an_event_may_be_made_of_parts() -> None:
    assert line("%s uid=%s", "paused", "u") == {"event": "paused", "uid": "u"}
    assert line("%s_serving port=%d", "metrics", 80) == {"event": "metrics_serving", "port": 80}


def test_what_is_no_number_is_said_in_words() -> None:
    assert line("odd a=%.1f b=%s", float("nan"), float("inf")) == {"event": "odd", "a": "nan", "b": "inf"}


def test_a_detail_may_have_many_lines_and_an_exception_its_stack() -> None:
    assert line("crashed id=%s\n%s", "r", "one\ntwo") == {"event": "crashed", "id": "r", "detail": "one\ntwo"}
    found: dict[str, Any] = {}
    try:
        int("why")
    except ValueError:
        found = line("broke uid=%s", "u", exc_info=True)
    assert found["event"] == "broke"
    assert str(found["exception"]).endswith("invalid literal for int() with base 10: 'why'")


@pytest.mark.parametrize(
    ("message", "arguments"),
    [
        ("Retrying (%s) after %d", ("x", 3)),
        ("short uid=%s", ()),
        ("mapped a=%(a)s", ({"a": 1},)),
        (ValueError("no text"), ()),
        ("event time=%s", ("now",)),
    ],
)
def test_what_is_not_of_that_form_is_one_message(message: object, arguments: tuple[object, ...]) -> None:
    assert set(line(message, *arguments)) == {"message"}


def test_a_line_names_its_trace() -> None:
    with within(parsed("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")):
        assert line("forked") == {
            "event": "forked",
            "trace_id": "0af7651916cd43dd8448eb211c80319c",
            "span_id": "b7ad6b7169203331",
        }


def logged() -> Iterator[tuple[str, str]]:
    """Where something is logged in our programs, and its template."""
    for folder in ("sdk/forktree", "operator", "node-agent"):
        for path in sorted((SOURCES / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if (
                    isinstance(node, ast.Call)
                    and isinstance(node.func, ast.Attribute)
                    and node.func.attr in LEVELS
                    and isinstance(node.func.value, ast.Name)
                    and node.func.value.id in {"log", "_log"}
                ):
                    template = node.args[0]
                    assert isinstance(template, ast.Constant), f"{path}:{node.lineno} is no constant"
                    yield f"{path}:{node.lineno}", str(template.value)


def test_all_that_our_programs_log_has_that_form() -> None:
    found = dict(logged())
    assert len(found) > 100
    others = {where: template for where, template in found.items() if fields_of(template) is None}
    assert not others
    for template in found.values():
        form = fields_of(template)
        assert form is not None
        names = [name for name, _, _ in form[1]]
        assert len(names) == len(set(names)), template
        assert not OWN & set(names), template


def test_a_keeper_that_cannot_begin_says_so_in_json(tmp_path: Path) -> None:
    not_a_folder = tmp_path / "file"
    not_a_folder.write_text("")
    command = [sys.executable, "-m", "forktree_keeper", f"--state-dir={not_a_folder}", "--cgroup-root=../up"]
    ended = subprocess.run(
        [*command, "--log-format=json"], capture_output=True, text=True, check=False, timeout=60
    )
    assert ended.returncode == 1
    said = json.loads(ended.stderr)
    assert (said["event"], said["level"], said["logger"]) == ("cannot_begin", "error", "forktree_keeper")
    assert said["error"]


def test_a_keeper_loads_nothing_but_the_standard_library_and_how_a_log_is_written() -> None:
    script = (
        "import sys; before = set(sys.modules); import forktree_keeper.__main__\n"
        "new = {each.partition('.')[0] for each in set(sys.modules) - before}\n"
        "print(sorted(new - set(sys.stdlib_module_names)))"
    )
    printed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert printed.stdout == "['forktree_keeper', 'forktree_logs']\n"
