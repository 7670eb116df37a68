"""A page of docs/ that shows commands and what they print, run and compared with what they print now.

A block is `$ command` and below it its output; manifests are applied. What differs from run to run (age,
times, uids, addresses) is not compared. `WRITE_PAGES=1 .venv/bin/pytest FILE` writes the page anew with what
was printed.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from difflib import unified_diff
from itertools import groupby
from pathlib import Path

from e2e.whole import SECONDS

COLUMNS = 120
"""Of a terminal that a table must fit, unless `-o wide` is asked for."""

_BLOCK = re.compile(r"^```(yaml)?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SETTLED_SECONDS = 20.0
_WRITES = os.environ.get("WRITE_PAGES") == "1"

_VARIES = (
    (re.compile(r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b"), "UID"),
    (re.compile(r"\b[0-9a-f]{64}\b"), "HASH"),
    (re.compile(r"\b\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z"), "TIME"),
    (re.compile(r"\b127\.0\.0\.1:\d+"), "ADDRESS"),
    (re.compile(r"(?<=-\d-)[0-9a-f]{5}\b"), "XXXXX"),
    (re.compile(r"\b\d+(\.\d+)? (ms|MiB)\b"), r"N \2"),
    (re.compile(r"\b(\d+[smhd]){1,2}\b"), "AGE"),
    (re.compile(r"^( *(\w+ Ms|Point Bytes|Fork Point ID|Resource Version|Seed): +)\S+$"), r"\1N"),
)
_EVENT = re.compile(r" *(AGE +)?(Normal|Warning) ")
_CELLS = {"FORK MS", "PAUSE MS", "RESERVED", "ACCELERATOR", "CANARY", "WHY"}
"""Columns whose cells differ from run to run, or from machine to machine."""


@dataclass(frozen=True, slots=True)
class Step:
    """A command and what the page says that it prints; without a command a manifest."""

    command: str | None
    text: str


Run = Callable[[str, str], Awaitable[str]]
"""Runs a shell command with something to read; what it prints, errors among it."""


def shell(environment: Mapping[str, str], folder: Path) -> Run:
    async def run(command: str, stdin: str) -> str:
        process = await asyncio.create_subprocess_exec(
            *("bash", "-c", command),
            cwd=folder,
            env=environment,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            async with asyncio.timeout(3 * SECONDS):
                printed, _ = await process.communicate(stdin.encode())
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        return printed.decode()

    return run


async def shows(page: Path, run: Run) -> None:
    """Fail where a command of the page prints something else than stands below it."""
    text, told = page.read_text(), ""
    end, wrong = 0, list[str]()
    for block in _BLOCK.finditer(text):
        told += text[end : block.start(2)]
        end = block.end(2)
        steps = [*_steps(block[1] == "yaml", block[2])]
        told += "" if steps else block[2]
        for step in steps:
            if step.command is None:
                printed = await run("kubectl apply -f -", step.text)
                assert "error" not in printed.lower(), printed
                told += step.text
                continue
            printed = await _settled(step, run)
            told += f"$ {step.command}\n{_shown(printed)}"
            if same(step.text) != same(printed):
                wrong.append(f"$ {step.command}")
                wrong += unified_diff(same(step.text).splitlines(), same(printed).splitlines(), "page", "now")
            if step.command.startswith("kubectl get") and "wide" not in step.command:
                wrong += [
                    f"over {COLUMNS} columns: {line}" for line in printed.splitlines() if len(line) > COLUMNS
                ]
    if _WRITES:
        page.write_text(told + text[end:])
    else:
        assert wrong == [], "\n".join(wrong)


async def _settled(step: Step, run: Run) -> str:
    """What the command prints; one that only looks is asked again until what it shows has come about."""
    assert step.command is not None
    looks = step.command.split()[1] in {"get", "describe", "events", "auth"}
    deadline = asyncio.get_running_loop().time() + (_SETTLED_SECONDS if looks else 0)
    while True:
        printed = await run(step.command, "")
        if same(printed) == same(step.text) or asyncio.get_running_loop().time() > deadline:
            return printed
        await asyncio.sleep(0.5)  # Events are written beside the work, and nobody says when.


def _steps(manifest: bool, block: str) -> Iterator[Step]:
    if manifest:
        if block.startswith("apiVersion:"):
            yield Step(None, block)
        return
    for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        lines = part.splitlines(keepends=True)
        count = 1
        while lines[count - 1].endswith("\\\n"):
            count += 1
        yield Step("".join(lines[:count]).rstrip("\n"), "".join(lines[count:]))


def _shown(printed: str) -> str:
    """As it stands in the page: kubectl pads the last column and ends some outputs with empty lines."""
    lines = [line.rstrip() for line in printed.rstrip().splitlines()]
    return "".join(f"{line}\n" for line in lines)


def same(printed: str) -> str:
    """What is printed, but for what differs from run to run."""
    lines = list[str]()
    header: list[tuple[int, str]] = []
    for line in _shown(printed).splitlines():
        if re.match(r"(NAME|LAST SEEN|NAMESPACE) {2,}", line):
            header = [(match.start(), match[0].strip()) for match in re.finditer(r"\S+( \S+)*", line)]
        elif not line:
            header = []
        told = _without_cells(line, header)
        for pattern, word in _VARIES:
            told = pattern.sub(word, told)
        if _EVENT.match(told) and " Unscheduled " in told:
            continue  # Who is quick does not wait, and nobody says that it did.
        lines.append(re.sub(r"(?<=\S) {2,}", "  ", told))
    # Events of one second come in any order.
    runs = groupby(lines, lambda line: _EVENT.match(line) is not None)
    return "\n".join(line for events, run in runs for line in (sorted(run) if events else run))


def _without_cells(line: str, header: list[tuple[int, str]]) -> str:
    ends = [start for start, _ in header[1:]] + [len(line)]
    for (start, name), end in reversed([*zip(header, ends, strict=True)] if header else []):
        if name in _CELLS and line[start:end].strip():
            line = f"{line[:start]}N  {line[end:]}"
    return line
