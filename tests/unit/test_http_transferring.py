"""What a session's file tool says is a stranger's word: whatever it says is answered in a sentence."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterable
from typing import cast

import pytest

from forktree.models import ObjectMeta, Session, SessionSpec
from forktree.models.session import TemplateRef
from forktree_agent.control.facade import Facade
from forktree_agent.engine.contract import (
    CommandRefused,
    ExecChunk,
    ExecEnd,
    ExecReader,
    ExecStream,
    MachineGone,
)
from forktree_agent.http import transferring
from forktree_agent.http.errors import Code, Refusal
from forktree_agent.http.transferring import HEAD_BYTES, LIST_BYTES, Readable, Tool, Written, listed, octal

SESSION = Session(
    metadata=ObjectMeta(name="s", namespace="n"), spec=SessionSpec(template_ref=TemplateRef(name="t"))
)
GOOD = b'{"ok":{"mode":420,"bytes":3},"why":null,"message":null}\n'


class Said:
    """A tool that says these things. After them: the end with this exit code, or nothing ever."""

    id = "tool"

    def __init__(self, said: Iterable[bytes], exit_code: int | None = 0) -> None:
        self._said = list(said)
        self._exit_code = exit_code

    async def next(self, *, deadline: float) -> ExecChunk | ExecEnd | None:
        if self._said:
            return ExecChunk(stream=ExecStream.STDOUT, offset=0, data=self._said.pop(0))
        return None if self._exit_code is None else ExecEnd(exit_code=self._exit_code, timed_out=False)


class Sink:
    """What is written to it, until it takes no more."""

    def __init__(self, takes: int = 1 << 30) -> None:
        self.got = b""
        self.ended = False
        self._takes = takes

    async def write(self, _: Session, __: str, data: bytes, *, end: bool, deadline: float) -> None:
        if len(self.got) + len(data) > self._takes:
            raise CommandRefused("command tool has ended and takes no input")
        self.got += data
        self.ended |= end


def tool(*said: bytes, exit_code: int | None = 0, sink: Sink | None = None) -> Tool:
    facade = cast("Facade", sink or Sink())
    return Tool(facade, SESSION, cast("ExecReader", Said(said, exit_code)))


async def content(at_work: Tool) -> bytes:
    return b"".join([piece async for piece in at_work.content()])


async def test_what_comes_after_the_first_line_is_the_content() -> None:
    at_work = tool(GOOD[:10], GOOD[10:] + b"a\n", b"bc")
    assert await at_work.told(Readable) == Readable(mode=420, bytes=3)
    assert await content(at_work) == b"a\nbc"


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"\n",
        b"{}\n",
        b"no json\n",
        b"[" * 10_000 + b"\n",
        b'{"ok":{"mode":"x"}}\n',
        b'{"ok":{"mode":1e99}}\n',
        b'{"ok":null}\n',
        b"\xff\xfe\n",
        b"x" * (2 * HEAD_BYTES),
    ],
    ids=range(10),
)
async def test_nonsense_is_a_defect_of_the_session_and_no_crash(line: bytes) -> None:
    with pytest.raises(Refusal, match="nothing that makes sense") as refused:
        await tool(line, exit_code=1).told(Readable)
    assert refused.value.code is Code.INTERNAL


@pytest.mark.parametrize(
    ("why", "code"),
    [
        ("not_found", Code.NOT_FOUND),
        ("wrong_kind", Code.CONFLICT),
        ("full", Code.NO_SPACE),
        ("denied", Code.FORBIDDEN),
        ("invalid", Code.BAD_REQUEST),
        ("a word of its own", Code.INTERNAL),
    ],
)
async def test_each_failure_has_a_code_and_a_bounded_sentence(why: str, code: Code) -> None:
    line = f'{{"ok":null,"why":"{why}","message":"{"because " * 1000}"}}\n'.encode()
    with pytest.raises(Refusal, match="because") as refused:
        await tool(line, exit_code=1).told(Readable)
    assert refused.value.code is code
    assert len(refused.value.sentence) < 1000


@pytest.mark.parametrize("exit_code", [1, 137, None], ids=str)
async def test_a_tool_that_breaks_off_is_no_end(exit_code: int | None) -> None:
    at_work = tool(GOOD + b"ab", exit_code=exit_code)
    await at_work.told(Readable)
    with pytest.raises(ConnectionError):
        await content(at_work)


@pytest.mark.parametrize("entries", [b"{}\n", b'{"name":1}\n', b"\xff\n", b'{"name":"a","type":"file"'])
async def test_a_list_of_nonsense_is_refused(entries: bytes) -> None:
    with pytest.raises(Refusal, match="nothing that makes sense"):
        await listed(tool(b'{"ok":1}\n' + entries))


async def test_a_list_without_end_is_given_up() -> None:
    entry = b'{"name":"a","type":"file","bytes":1,"mode":420,"mtime":1}\n'
    at_work = tool(b'{"ok":1}\n', *[entry * 20_000] * (2 * LIST_BYTES // (20_000 * len(entry))))
    with pytest.raises(Refusal, match="too long") as refused:
        await listed(at_work)
    assert refused.value.code is Code.LIMIT_REACHED


async def pieces(*parts: bytes, then: Exception | None = None) -> AsyncIterator[bytes]:
    for part in parts:
        yield part
    if then is not None:
        raise then


async def test_what_is_sent_is_marked_as_whole_only_when_it_is() -> None:
    sink = Sink()
    await tool(sink=sink).take(pieces(b"ab", b"c"))
    assert sink.got == b"\0\0\0\x02ab\0\0\0\x01c\0\0\0\0"
    for broken in (Refusal(Code.BAD_REQUEST, "cut"), MachineGone("gone")):
        sink = Sink()
        with pytest.raises(type(broken)):
            await tool(sink=sink).take(pieces(b"ab", then=broken))
        assert (sink.got, sink.ended) == (b"\0\0\0\x02ab", True)


async def test_a_caller_that_leaves_has_its_tool_take_back_what_it_began() -> None:
    sink, begun = Sink(), asyncio.Event()

    async def stalled() -> AsyncIterator[bytes]:
        yield b"ab"
        begun.set()
        await asyncio.sleep(1000)

    taking = asyncio.create_task(tool(sink=sink).take(stalled()))
    await begun.wait()
    taking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await taking
    assert (sink.got, sink.ended) == (b"\0\0\0\x02ab", True)


async def test_a_tool_that_ends_early_says_why() -> None:
    line = b'{"ok":null,"why":"full","message":"no room"}\n'
    at_work = tool(line, exit_code=1, sink=Sink(takes=10))
    await at_work.take(pieces(bytes(100)))
    with pytest.raises(Refusal, match="no room"):
        await at_work.told(Written)


async def test_a_long_list_is_read_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes a third of a second, and others' forks are timed by the same loop."""
    threads = set[int]()

    def seen(mode: int) -> str:
        threads.add(threading.get_ident())
        return octal(mode)

    monkeypatch.setattr(transferring, "octal", seen)
    entry = b'{"name":"a","type":"file","bytes":1,"mode":420,"mtime":1}\n'
    assert [each.mode for each in await listed(tool(b'{"ok":2}\n' + 2 * entry))] == ["0644"] * 2
    assert threading.get_ident() not in threads
    assert threads


async def test_a_length_that_none_can_be_is_no_answer() -> None:
    with pytest.raises(Refusal, match="makes sense"):
        await tool(b'{"ok":{"mode":420,"bytes":-3}}\n').told(Readable)
