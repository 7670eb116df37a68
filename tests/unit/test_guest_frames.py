"""The guest channel's frames: written and read as the guest's init does, and safe to read from anybody."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forktree_agent.engine.microvm import guest_frames as frames

GOLDEN = Path(__file__).parents[1] / "golden" / "guest_frames.jsonl"
GENERATION = "6f1c2d3e-4a5b-4c6d-8e7f-901a2b3c4d5e"
NIL = "00000000-0000-0000-0000-000000000000"

REQUESTS: list[frames.Request] = [
    frames.Start(argv=("/bin/server", "--flag"), env={"LEVEL": "3"}, cwd="/app"),
    frames.Start(argv=(), env={}, cwd="/"),
    frames.TakeIdentity(
        generation=GENERATION,
        hostname="cart-0-1a2b3",
        unix_ns=1767225600123456789,
        entropy=bytes(range(32)),
        env={"FORKTREE_SEED": "7", "NOTE": 'naïve "quoted"\n\U0001f333'},
    ),
    frames.Exec(
        id="a1",
        generation=GENERATION,
        argv=("sh", "-c", 'echo "$X" | tr a b'),
        env={"X": "1"},
        cwd="/srv",
        stdin=bytes([0, 10, 255]),
        timeout_ms=1500,
        output_limit=65536,
    ),
    frames.Exec(
        id="a2",
        generation=NIL,
        argv=("true",),
        env={},
        cwd=None,
        stdin=None,
        timeout_ms=1,
        output_limit=0,
        stdin_open=True,
        terminal=frames.TerminalSize(rows=24, cols=80),
        flow=frames.Flow(granted=1 << 40, waits=True, tail_bytes=65536),
    ),
    frames.Cancel(id="a1"),
    frames.Stdin(id="a1", data=b"hi\n", end=False),
    frames.Stdin(id="a1", data=b"", end=True),
    frames.Resize(id="a1", rows=50, cols=132),
    frames.Grant(id="a1", granted=262144, waits=False),
    frames.Replay(id="a1"),
    frames.Ping(nonce="n1"),
    frames.ListExecs(),
    frames.SetClock(unix_ns=1767225600123456789),
    frames.Freeze(nonce="n3"),
    frames.Thaw(nonce="n4"),
    frames.HttpGet(nonce="n2", port=8000, path="/ready?deep=1", timeout_ms=5000),
]
REPORTS: list[frames.Report] = [
    frames.Booted(protocol=frames.PROTOCOL),
    frames.Started(pid=42),
    frames.Started(pid=None),
    frames.StartFailed(message='not found: "/bin/server"'),
    frames.Identified(generation=GENERATION),
    frames.IdentityFailed(generation=GENERATION, message="not frozen"),
    frames.Begun(generation=GENERATION, id="a1"),
    frames.Output(generation=GENERATION, id="a1", stream=frames.Stream.STDOUT, offset=0, data=b"hi\n"),
    frames.Output(
        generation=GENERATION, id="a1", stream=frames.Stream.STDERR, offset=1 << 40, data=bytes([255, 0])
    ),
    frames.StdinTaken(generation=GENERATION, id="a1", bytes=3, open=True),
    frames.Replayed(generation=GENERATION, id="a1", stdin_bytes=3, stdin_open=False),
    frames.Exited(generation=GENERATION, id="a1", code=3, timed_out=False, signal=None, truncated=False),
    frames.Exited(generation=GENERATION, id="a1", code=-1, timed_out=True, signal=9, truncated=True),
    *(
        frames.ExecFailed(generation=GENERATION, id="a1", code=code, message="why")
        for code in frames.RefusalCode
    ),
    frames.WorkloadExit(generation=NIL, code=137, signal=9),
    frames.Pong(nonce="n1"),
    frames.Running(generation=GENERATION, ids=("a1", "a2")),
    frames.HttpStatus(nonce="n2", status=200, message=None),
    frames.HttpStatus(nonce="n2", status=None, message="refused"),
    frames.Frozen(nonce="n3", message=None),
    frames.Frozen(nonce="n3", message="timed out"),
    frames.Thawed(nonce="n4", message=None),
    frames.Thawed(nonce="n4", message="no such file"),
]


def golden(to: str) -> list[str]:
    entries = [json.loads(line) for line in GOLDEN.read_text().splitlines()]
    return [entry["line"] for entry in entries if entry["to"] == to]


def test_requests_are_written_as_the_guest_reads_them() -> None:
    assert [frames.encode(request).decode() for request in REQUESTS] == [
        f"{line}\n" for line in golden("guest")
    ]


def test_reports_are_read_as_the_guest_writes_them() -> None:
    assert [frames.decode(line.encode()) for line in golden("host")] == REPORTS


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"null",
        b"{}",
        b"[" * 100_000,
        b'{"type":"started","pid":"1"}',
        b'{"type":"ping","nonce":"n"}',
        b'{"type":"booted"}',
        b'{"type":"pong","nonce":"\xff"}',
        b'{"type":"output","generation":"g","id":"x","stream":"stdin","offset":0,"data":""}',
        b'{"type":"output","generation":"g","id":"x","stream":"stdout","offset":0,"data":"*"}',
        b'{"type":"output","generation":"g","id":"x","stream":"stdout","offset":-1,"data":""}',
        b'{"type":"exit","generation":"g","id":"x","code":256,"timed_out":false,"signal":null,"truncated":false}',
        b'{"type":"exec_failed","generation":"g","id":"x","code":"bored","message":""}',
    ],
    ids=range(13),
)
def test_what_is_no_report_is_none(line: bytes) -> None:
    assert frames.decode(line) is None


@given(st.binary())
def test_reading_noise_raises_nothing(line: bytes) -> None:
    frames.decode(line)


def test_the_tail_of_a_cut_report_is_no_report() -> None:
    for line in golden("host"):
        assert [at for at in range(1, len(line)) if frames.decode(line[at:].encode()) is not None] == []


@given(st.lists(st.binary(max_size=20)), st.lists(st.integers(0, 50), max_size=10))
def test_lines_are_the_same_however_the_stream_is_cut(chunks: list[bytes], cuts: list[int]) -> None:
    stream = b"\n".join(chunks)
    whole = list(frames.LineCutter().feed(stream))
    assert whole == stream.split(b"\n")[:-1]
    cutter = frames.LineCutter()
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    pieces = [stream[start:end] for start, end in pairwise(edges)]
    assert [line for piece in pieces for line in cutter.feed(piece)] == whole


def test_a_line_without_end_is_given_up_before_it_fills_memory() -> None:
    cutter = frames.LineCutter()
    with pytest.raises(frames.LineTooLong):
        for _ in range(1 + frames.MAX_REPORT_BYTES // 65536):
            list(cutter.feed(b"x" * 65536))
    with pytest.raises(frames.LineTooLong):
        list(frames.LineCutter().feed(b"x" * (frames.MAX_REPORT_BYTES + 1) + b"\n"))
