"""What is kept of a guest's output where only its end matters, as of a command that prints a score."""

from __future__ import annotations

import asyncio

from forktree_agent.engine.contract import ExecResult
from forktree_agent.engine.microvm.guest_execs import Ending, GuestExec
from forktree_agent.engine.microvm.guest_frames import Exited, Output, Stream


def output(data: bytes, stream: Stream = Stream.STDOUT) -> Output:
    return Output(generation="g", id="a", stream=stream, offset=0, data=data)


async def taken(limit: int, end_bytes: int | None, *outputs: Output, truncated: bool = False) -> ExecResult:
    ended: asyncio.Future[Ending] = asyncio.get_running_loop().create_future()
    command = GuestExec("g", limit, ended, end_bytes=end_bytes)
    for each in outputs:
        command.take(each)
        kept = len(command.stdout) + len(command.stderr)
        assert kept <= (limit if end_bytes is None else 2 * end_bytes)
    last = Exited(generation="g", id="a", code=0, timed_out=False, signal=None, truncated=truncated)
    return command.result(last)


async def test_the_end_of_each_stream_is_kept_and_said_to_be_no_more() -> None:
    result = await taken(
        1000, 4, output(b"abc"), output(b"defg"), output(b"xyz", Stream.STDERR), output(b"h")
    )
    assert (result.stdout, result.stderr) == (b"efgh", b"xyz")
    assert (result.truncated, result.end_lost) == (True, False)


async def test_a_short_output_is_whole() -> None:
    result = await taken(1000, 10, output(b"5\n"))
    assert (result.stdout, result.truncated, result.end_lost) == (b"5\n", False, False)


async def test_an_end_that_did_not_come_is_said_to_be_lost() -> None:
    said_by_guest = await taken(1000, 4, output(b"abcdef"), truncated=True)
    assert (said_by_guest.stdout, said_by_guest.end_lost) == (b"cdef", True)
    # A guest that sends more than it was asked for, and does not say so.
    lied = await taken(8, 4, output(b"abcdefghij"))
    assert (lied.stdout, lied.truncated, lied.end_lost) == (b"efgh", True, True)


async def test_elsewhere_the_beginning_is_kept() -> None:
    result = await taken(4, None, output(b"abc"), output(b"def"))
    assert (result.stdout, result.truncated, result.end_lost) == (b"abcd", True, False)
