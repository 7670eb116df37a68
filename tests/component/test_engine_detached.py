"""Commands that are tied to nobody, in real machines: read at any pace, from anywhere, by whoever asks."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from component.keeper_fixtures import running_keeper
from component.node import Node, engine_on, soon
from forktree_agent.engine.contract import (
    Command,
    CommandRefused,
    ExecChunk,
    ExecEnd,
    ExecNotFound,
    ExecReader,
    ExecStream,
    Machine,
    TerminalSize,
)
from forktree_agent.engine.microvm.kept_output import MACHINE_BYTES, STREAM_BYTES
from forktree_agent.engine.microvm.kept_reading import UNREAD_BYTES, WINDOW_BYTES

pytestmark = pytest.mark.asyncio(loop_scope="session")

GATE = "mkfifo /tmp/go; echo one; echo two >&2; cat /tmp/go; echo three; exit 7"


@dataclass(slots=True)
class Read:
    """What a reader got of each stream, and where that began."""

    stdout: bytearray = field(default_factory=bytearray)
    stderr: bytearray = field(default_factory=bytearray)
    starts: dict[ExecStream, int] = field(default_factory=dict[ExecStream, int])
    end: ExecEnd | None = None

    def take(self, chunk: ExecChunk) -> None:
        """Pieces of a stream follow one another."""
        stream = self.stdout if chunk.stream is ExecStream.STDOUT else self.stderr
        start = self.starts.setdefault(chunk.stream, chunk.offset)
        assert chunk.offset == start + len(stream)
        stream += chunk.data


async def read_on(reader: ExecReader, read: Read, *, until: bytes | None = None) -> Read:
    """Read to the end, or until standard output has had this."""
    while until is None or until not in read.stdout:
        match await reader.next(deadline=soon()):
            case ExecChunk() as chunk:
                read.take(chunk)
            case ExecEnd() as end:
                read.end = end
                return read
            case None:
                raise AssertionError((read, "nothing came"))
    return read


async def read_all(node: Node, machine: Machine, exec_id: str, stdout: int = 0, stderr: int = 0) -> Read:
    reading = node.engine.reading(
        machine.id, exec_id, stdout_offset=stdout, stderr_offset=stderr, deadline=soon()
    )
    async with reading as reader:
        return await read_on(reader, Read())


def sh(script: str, exec_id: str = "work", **more: object) -> Command:
    return Command(argv=("/bin/sh", "-c", script), id=exec_id, timeout_seconds=100, **more)  # type: ignore[arg-type]


async def test_a_detached_command_is_read_while_it_runs_and_after_its_end(node: Node) -> None:
    machine = await node.root()
    assert await node.engine.begin(machine.id, sh(GATE), deadline=soon()) == "work"
    (state,) = node.engine.execs(machine.id)
    assert (state.id, state.ended) == ("work", False)
    reading = node.engine.reading(machine.id, "work", stdout_offset=0, stderr_offset=0, deadline=soon())
    async with reading as reader:
        read = await read_on(reader, Read(), until=b"one\n")
        await node.sh(machine, "echo > /tmp/go")
        await read_on(reader, read)
    assert (bytes(read.stdout), bytes(read.stderr)) == (b"one\n\nthree\n", b"two\n")
    assert read.end == ExecEnd(exit_code=7, timed_out=False)

    again = await read_all(node, machine, "work", stdout=4, stderr=2)
    assert (bytes(again.stdout), bytes(again.stderr)) == (b"\nthree\n", b"o\n")
    result = await node.engine.attach(machine.id, "work", deadline=soon())
    assert (result.stdout, result.exit_code, result.truncated) == (b"one\n\nthree\n", 7, False)
    (state,) = node.engine.execs(machine.id)
    assert (state.ended, state.end, state.stdout_bytes) == (True, read.end, len(read.stdout))


async def test_what_cannot_be_run_is_refused_before_anybody_is_told_of_it(node: Node) -> None:
    machine = await node.root()
    with pytest.raises(CommandRefused, match="no program"):
        await node.engine.begin(machine.id, Command(argv=("/no/such",), id="none"), deadline=soon())
    assert node.engine.execs(machine.id) == ()
    with pytest.raises(ExecNotFound):
        await read_all(node, machine, "none")


async def test_a_command_waits_for_its_reader_and_nothing_is_lost(node: Node) -> None:
    machine = await node.root()
    total = 3_000_000
    command = sh(f"seq 1000000 | head -c {total}; echo end >&2")
    async with node.engine.streaming(machine.id, command, deadline=soon()) as reader:
        first = await reader.next(deadline=soon())
        assert isinstance(first, ExecChunk)
        # Long enough for an emulated guest to write all of it, were it not held back.
        await node.sh(machine, "for i in 1 2 3 4 5 6 7 8 9 10; do usleep 100000; done")
        (state,) = node.engine.execs(machine.id)
        assert not state.ended
        assert state.stdout_bytes <= WINDOW_BYTES + len(first.data)
        read = Read()
        read.take(first)
        await read_on(reader, read)
    expected = "".join(f"{number}\n" for number in range(1, 600_000)).encode()[:total]
    assert bytes(read.stdout) == expected
    assert read.stderr == b"end\n"


async def test_a_command_that_nobody_reads_goes_on_and_its_end_is_kept(node: Node) -> None:
    machine = await node.root()
    async with node.engine.streaming(machine.id, sh("yes | head -c 5000000; echo end"), deadline=soon()):
        pass  # Whoever began it is gone at once.
    result = await node.engine.attach(machine.id, "work", deadline=soon())
    assert (len(result.stdout), result.stdout[-4:], result.truncated) == (STREAM_BYTES, b"end\n", True)
    read = await read_all(node, machine, "work", stdout=100)
    assert read.starts[ExecStream.STDOUT] == 5_000_004 - STREAM_BYTES, "what is not kept is told"


async def test_more_than_anybody_would_read_is_not_sent_but_its_end_is_kept(node: Node) -> None:
    machine = await node.root()
    await node.engine.begin(machine.id, sh("yes | head -c 40000000; echo end"), deadline=soon())
    result = await node.engine.attach(machine.id, "work", deadline=soon())
    assert result.exit_code == 0
    (state,) = node.engine.execs(machine.id)
    assert state.stdout_bytes <= 17 << 20


async def test_a_guest_that_floods_takes_its_share_and_no_more(node: Node) -> None:
    """Of small pieces and of large ones, from many commands at once, read by nobody."""
    machine, other = await node.root(), await node.root(name="other")
    small = "while :; do echo x; done"
    for number in range(12):
        script = small if number % 2 else "yes"
        command = Command(argv=("sh", "-c", script), id=f"flood-{number}", timeout_seconds=600)
        await node.engine.begin(machine.id, command, deadline=soon())
    for _ in range(5):  # Others are answered all along, and so is this one.
        assert await node.sh(other, "echo here") == "here\n"
        states = node.engine.execs(machine.id)
        assert [state.ended for state in states] == [False] * 12
        assert max(state.stdout_bytes for state in states) <= UNREAD_BYTES + (1 << 20)
    assert await node.sh(machine, "echo here") == "here\n"
    (child,) = (await node.fork(other)).children
    assert await node.sh(child, "echo child") == "child\n"
    kept = 0
    for number in range(12):
        assert await node.engine.kill_exec(machine.id, f"flood-{number}", deadline=soon())
        kept += len((await node.engine.attach(machine.id, f"flood-{number}", deadline=soon())).stdout)
    assert 0 < kept <= MACHINE_BYTES


async def test_a_killed_command_ends_with_all_of_its_group(node: Node) -> None:
    machine = await node.root()
    await node.engine.begin(machine.id, sh("sleep 543 & echo up; sleep 543"), deadline=soon())
    assert await node.engine.kill_exec(machine.id, "work", deadline=soon()) is True
    assert (await read_all(node, machine, "work")).end == ExecEnd(exit_code=137, timed_out=False)
    assert await node.sh(machine, "ps | grep -c '[s]leep 543' || true") == "0\n"
    assert await node.engine.kill_exec(machine.id, "work", deadline=soon()) is False
    with pytest.raises(ExecNotFound):
        await node.engine.kill_exec(machine.id, "other", deadline=soon())


async def test_a_child_forked_in_the_midst_of_a_stream_has_it_from_its_beginning(node: Node) -> None:
    parent = await node.root()
    async with node.engine.streaming(parent.id, sh(GATE), deadline=soon()) as reader:
        read = await read_on(reader, Read(), until=b"one\n")
        (child,) = (await node.fork(parent)).children
        await node.sh(child, "echo child > /tmp/go")
        carried = await read_all(node, child, "work")
        assert bytes(carried.stdout) == b"one\nchild\nthree\n"
        assert carried.end == ExecEnd(exit_code=7, timed_out=False)
        await node.sh(parent, "echo parent > /tmp/go")
        await read_on(reader, read)
    assert bytes(read.stdout) == b"one\nparent\nthree\n"


async def test_a_child_is_not_held_up_by_the_reader_of_its_parent(node: Node) -> None:
    parent = await node.root()
    async with node.engine.streaming(parent.id, sh("yes | head -c 2000000"), deadline=soon()) as reader:
        await reader.next(deadline=soon())
        (child,) = (await node.fork(parent)).children
        assert (await node.engine.attach(child.id, "work", deadline=soon())).exit_code == 0
        (state,) = node.engine.execs(parent.id)
        assert not state.ended


async def test_input_stays_open_until_it_is_closed(node: Node) -> None:
    machine = await node.root()
    command = sh("read a; echo got $a; cat | wc -c", stdin=b"first\n", stdin_open=True)
    async with node.engine.streaming(machine.id, command, deadline=soon()) as reader:
        read = await read_on(reader, Read(), until=b"got first\n")
        await node.engine.write(machine.id, "work", bytes(1_000_000), end=False, deadline=soon())
        await node.engine.write(machine.id, "work", b"last", end=True, deadline=soon())
        await read_on(reader, read)
    assert bytes(read.stdout) == b"got first\n1000004\n"
    with pytest.raises(CommandRefused, match="has ended"):
        await node.engine.write(machine.id, "work", b"x", end=False, deadline=soon())


async def test_input_is_refused_where_nobody_reads_it(node: Node) -> None:
    machine = await node.root()
    await node.engine.begin(machine.id, sh("sleep 60", "deaf"), deadline=soon())
    with pytest.raises(CommandRefused, match="is not open"):
        await node.engine.write(machine.id, "deaf", b"x", end=False, deadline=soon())
    await node.engine.begin(
        machine.id, sh("exec <&-; echo closed; sleep 60", "shut", stdin_open=True), deadline=soon()
    )
    reading = node.engine.reading(machine.id, "shut", stdout_offset=0, stderr_offset=0, deadline=soon())
    async with reading as reader:
        await read_on(reader, Read(), until=b"closed\n")
    with pytest.raises(CommandRefused, match="is not open"):
        for _ in range(100):  # The first may still be on its way to a pipe that nobody reads.
            await node.engine.write(machine.id, "shut", b"x" * 100_000, end=False, deadline=soon())


async def test_a_program_on_a_terminal_sees_one_and_its_size(node: Node) -> None:
    machine = await node.root()
    script = "test -t 0 && test -t 1 && echo tty; stty size; read x; stty size; echo $x >&2"
    command = sh(script, terminal=TerminalSize(rows=30, cols=100))
    async with node.engine.streaming(machine.id, command, deadline=soon()) as reader:
        read = await read_on(reader, Read(), until=b"30 100\r\n")
        await node.engine.resize(machine.id, "work", TerminalSize(rows=50, cols=132))
        await node.engine.write(machine.id, "work", b"typed\n", end=False, deadline=soon())
        await read_on(reader, read)
    assert bytes(read.stdout) == b"tty\r\n30 100\r\ntyped\r\n50 132\r\ntyped\r\n"
    assert read.end == ExecEnd(exit_code=0, timed_out=False)


async def test_what_is_typed_at_a_terminal_interrupts_and_ends(node: Node) -> None:
    machine = await node.root()
    command = sh("echo up; sleep 60; echo not here", terminal=TerminalSize(rows=24, cols=80))
    async with node.engine.streaming(machine.id, command, deadline=soon()) as reader:
        read = await read_on(reader, Read(), until=b"up\r\n")
        await node.engine.write(machine.id, "work", b"\x03", end=False, deadline=soon())
        await read_on(reader, read)
    assert read.end == ExecEnd(exit_code=130, timed_out=False)
    cat = Command(argv=("cat",), id="cat", terminal=TerminalSize(rows=24, cols=80))
    async with node.engine.streaming(machine.id, cat, deadline=soon()) as reader:
        await node.engine.write(machine.id, "cat", b"line\n", end=True, deadline=soon())
        read = await read_on(reader, Read())
    assert bytes(read.stdout) == b"line\r\nline\r\n"
    assert read.end == ExecEnd(exit_code=0, timed_out=False)


async def test_a_stream_outlives_the_agent_that_began_it(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    async with running_keeper(tmp_path, f"forktree-test-detached-{os.getpid()}") as socket_path:
        async with engine_on(socket_path, journal) as first:
            machine = await first.root()
            await first.engine.begin(machine.id, sh(GATE), deadline=soon())
            await first.engine.begin(machine.id, sh("echo brief; exit 9", "brief"), deadline=soon())
            await first.engine.attach(machine.id, "brief", deadline=soon())
            asking = sh("read a; read b; echo $a $b", "asking", stdin_open=True)
            await first.engine.begin(machine.id, asking, deadline=soon())
            await first.engine.write(machine.id, "asking", b"old\n", end=False, deadline=soon())
            read = await asyncio.wait_for(_first(first, machine), 60)
        async with engine_on(socket_path, journal) as second:
            ended = await read_all(second, machine, "brief")
            assert (bytes(ended.stdout), ended.end) == (b"brief\n", ExecEnd(exit_code=9, timed_out=False))
            assert await second.sh(machine, "echo go > /tmp/go; echo asked") == "asked\n"
            rest = await read_all(second, machine, "work", stdout=len(read.stdout), stderr=len(read.stderr))
            assert bytes(read.stdout + rest.stdout) == b"one\ngo\nthree\n"
            assert rest.end == ExecEnd(exit_code=7, timed_out=False)
            whole = await read_all(second, machine, "work")
            assert (bytes(whole.stdout), bytes(whole.stderr)) == (b"one\ngo\nthree\n", b"two\n")
            await second.engine.write(machine.id, "asking", b"new\n", end=True, deadline=soon())
            assert bytes((await read_all(second, machine, "asking")).stdout) == b"old new\n"
            await second.engine.release(machine.id)


async def _first(node: Node, machine: Machine) -> Read:
    reading = node.engine.reading(machine.id, "work", stdout_offset=0, stderr_offset=0, deadline=soon())
    async with reading as reader:
        return await read_on(reader, Read(), until=b"one\n")
